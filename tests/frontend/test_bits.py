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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64], ids=str)
def test_rows_of_types_that_are_only_moved_are_written_in_place(dtype: torch.dtype) -> None:
    def write(x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        x[1:3] = rows
        if dtype.is_floating_point:  # eager does not write unsigned integers at indices
            x[places] = rows
            x.view(2, 3, 4)[places % 2, places % 3] = rows
        return x[0]

    pool, rows = (torch.arange(n, dtype=torch.int32).view(-1, 4).to(dtype) for n in (24, 8))
    wanted, found, places = pool.clone(), pool.clone(), torch.tensor([5, -4])
    torch._dynamo.reset()
    function = torch.compile(write, backend="fusec", options={"strict": True})
    result = function(found, rows, places)
    assert torch.equal(result.to(torch.float32), write(wanted, rows, places).to(torch.float32))
    assert torch.equal(found.to(torch.float32), wanted.to(torch.float32))
    if dtype.is_floating_point:
        with pytest.raises(IndexError):
            function(found, rows, torch.tensor([0, 6]))


def test_floats_as_integers_stay_a_call() -> None:
    x = torch.randn(5, 8)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda x: x.view(torch.int32) + 1, backend="fusec")(x), x.view(torch.int32) + 1)
