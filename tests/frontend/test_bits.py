"""Bits read as other types: every float8, bytes as wider numbers, and what is only moved."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.dynamo import compiled_graphs

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def compiled(function: Any, x: Tensor) -> Tensor:
    torch._dynamo.reset()
    result = torch.compile(function, backend="fusec")(x)
    assert [step.kind for graph in compiled_graphs() for step in graph.program.steps] == ["kernel"]
    return result


@pytest.mark.parametrize("to", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_float8_becomes_the_float_of_torch(dtype: torch.dtype, to: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    torch.testing.assert_close(compiled(lambda x: x.to(to) * 1, x), x.to(to), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "to", [torch.float16, torch.bfloat16, torch.float32, torch.int16, torch.int32, torch.int8], ids=str
)
def test_bytes_become_wider_numbers(to: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 256, (37, 24), dtype=torch.uint8)
    found = compiled(lambda x: x[:, 4:20].view(to) * 1, x)
    torch.testing.assert_close(found, x[:, 4:20].view(to) * 1, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16], ids=str)
def test_every_half(to: torch.dtype) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    found = compiled(lambda x: x.view(to) * 1, x)
    torch.testing.assert_close(found, x.view(to) * 1, rtol=0, atol=0, equal_nan=True)


def test_a_view_of_an_input_shares_its_memory() -> None:
    x = torch.randint(0, 256, (3, 8), dtype=torch.uint8)
    torch._dynamo.reset()
    found = torch.compile(lambda x: x.view(torch.int8), backend="fusec")(x)
    assert found.data_ptr() == x.data_ptr() and torch.equal(found, x.view(torch.int8))


def test_floats_as_integers_stay_a_call() -> None:
    x = torch.randn(5, 8)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda x: x.view(torch.int32) + 1, backend="fusec")(x), x.view(torch.int32) + 1)
