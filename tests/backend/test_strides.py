"""Strides of outputs and the storage they share, which are those of aot_eager."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn import functional as F

from fusec import dynamo
from tests.backend.agreement import check, interpret, sharing


def test_empty_tensors(backend: Any) -> None:
    check(backend, lambda x: x.to(torch.float32), torch.zeros(1, 1, 0, dtype=torch.bfloat16))
    check(backend, lambda x: x.exp(), torch.zeros(7, 0, 3).transpose(0, 2))
    check(backend, lambda x: x.sum(0, keepdim=True) * 2, torch.zeros(7, 0))


def test_strides_of_single_rows(backend: Any) -> None:
    rows = torch.zeros(1, 17, dtype=torch.long)
    check(backend, lambda w: F.embedding(rows, w).movedim(0, -1), torch.randn(1, 17).requires_grad_(), grad=True)


def padded(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.ops.aten.copy(x.new_empty_strided((3, 4), (8, 1)), x)
    return y, y[1:], y.t()


def part_of_padded(x: Tensor) -> tuple[Tensor, ...]:
    y = (F.pad(x, (0, 4)) * 2)[:, :4]
    return y, y[1:], y.t()


@pytest.mark.parametrize("function", [padded, part_of_padded])
def test_outputs_in_one_padded_storage(backend: Any, function: Any) -> None:
    check(backend, function, torch.randn(3, 4))


STEPS = {
    "transpose": lambda x: x.transpose(0, -1),
    "flip": lambda x: x.flip(0),
    "part": lambda x: x[..., : x.shape[-1] // 2 + 1],
    "every second": lambda x: x[::2],
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.squeeze(),
    "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape),
    "contiguous": lambda x: x.contiguous(),
    "flatten": lambda x: x.reshape(-1),
    "double": lambda x: x * 2,
    "to integers": lambda x: x.to(torch.int32),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "add its transpose": lambda x: x + x.mT if x.ndim > 1 and x.shape[-1] == x.shape[-2] else x + 1,
    "join": lambda x: torch.cat([x, x], -1),
}


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.lists(st.sampled_from(sorted(STEPS)), max_size=5),
       st.lists(st.integers(0, 5), min_size=1, max_size=3), st.permutations(range(3)))  # fmt: skip
@settings(deadline=None, max_examples=12)
def test_strides_and_sharing_are_aot_eagers(
    shape: list[int], steps: list[str], kept: list[int], order: list[int]
) -> None:
    """Of some intermediate values, each an output; torch's fake functions guess the strides of dims of length 1."""
    torch._dynamo.reset()
    x = torch.randn(shape).permute([d for d in order if d < len(shape)])

    def function(x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for step in steps:
            values.append(STEPS[step](values[-1] if values[-1].ndim else values[-1][None]))
        return tuple(values[i] for i in kept if i < len(values))

    results = []
    with torch.no_grad():
        for backend in ("aot_eager", dynamo.backend_with(interpret), dynamo.backend):
            torch._dynamo.reset()
            outputs = torch.compile(function, backend=backend, dynamic=False)(x)
            results.append(outputs)
            assert sharing([*outputs, x]) == sharing([*results[0], x])
    for outputs in results[1:]:
        assert [significant_strides(x) for x in outputs] == [significant_strides(x) for x in results[0]]
        torch.testing.assert_close(outputs, results[0], equal_nan=True)


def significant_strides(x: Tensor) -> list[int]:
    return [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n != 1]


def test_what_a_call_returns_lies_as_it_came() -> None:
    """The fake function of max_unpool2d promises contiguous memory, and ATen keeps channels last."""
    x = torch.randn(2, 2, 6, 12).to(memory_format=torch.channels_last)
    pooled, index = F.max_pool2d(x, 2, return_indices=True)
    check(dynamo.backend, lambda pooled, index: F.max_unpool2d(pooled, index, 2), pooled, index)


def test_a_view_by_strides_sees_what_eager_lays_out() -> None:
    """Of channels last torch predicts that roll gives contiguous memory, and eager keeps channels last."""

    def function(x: Tensor) -> Tensor:
        return torch.as_strided(torch.roll(x, 1, 2) * 2, (4, 5), (5, 1)) + 1

    x = torch.randn(2, 3, 4, 5)
    check(dynamo.backend, function, x)
    assert dynamo.fallbacks() == []
    check(dynamo.backend, function, x.to(memory_format=torch.channels_last))
    (reason,) = dynamo.fallbacks()
    assert "a view by strides of what aten.roll gives" in reason
    dynamo.reset()
