"""Selections along the last dim: eager's elements, in one kernel, with NaN, infinities and ties."""

from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from torch import Tensor

from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace

both = pytest.mark.parametrize("target", ["cpp", "triton"])
SPECIAL = torch.tensor([
    [-inf, -inf, -inf, -inf, -inf], [1.0, nan, 3.0, nan, inf], [nan, nan, nan, nan, nan], [-inf, 2.0, -inf, -inf, -inf],
    [0.0, -0.0, 0.0, -1.0, 0.5], [2.0, 2.0, 1.0, 2.0, 2.0],
])  # fmt: skip


def in_one_kernel(function: Callable[[Tensor], object], x: Tensor, target: str) -> list[Tensor]:
    """Run a function as a program, which must be a single kernel."""
    if target == "triton":
        pytest.importorskip("triton")
    made = compile_graph(trace(function, [x], symbolic=False), Config(strict=True, target=target)).program
    assert [step.kind for step in made.steps] == ["kernel"], made.source
    return made([x])


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("extreme", [torch.argmax, torch.argmin])
def test_the_first_of_the_largest_and_smallest(extreme: Callable[..., Tensor], dtype: torch.dtype, target: str) -> None:
    x = torch.randint(-20, 20, (3, 67), generator=torch.Generator().manual_seed(0)).to(dtype)
    (found,) = in_one_kernel(lambda x: extreme(x, -1, keepdim=True), x, target)
    assert torch.equal(found, extreme(x, -1, keepdim=True))


@both
def test_special_values_have_eagers_order(target: str) -> None:
    (largest,) = in_one_kernel(lambda x: x.argmax(-1), SPECIAL, target)
    (smallest,) = in_one_kernel(lambda x: x.argmin(-1), SPECIAL, target)
    assert torch.equal(largest, SPECIAL.argmax(-1)) and torch.equal(smallest, SPECIAL.argmin(-1))
    values, indices = in_one_kernel(lambda x: torch.topk(x, 3), SPECIAL, target)
    assert torch.equal(values.nan_to_num(9.0), torch.topk(SPECIAL, 3).values.nan_to_num(9.0))
    assert torch.equal(SPECIAL.gather(-1, indices).nan_to_num(9.0), values.nan_to_num(9.0))
    assert all(len(set(row)) == 3 for row in indices.tolist()), "no element twice"


@both
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8], ids=str)
def test_the_ends_of_integers_are_in_order(dtype: torch.dtype, target: str) -> None:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x = torch.tensor([[low, high, 0, low, high], [high, low, high, 1, 2], [low] * 5, [high - 1, high, 1, 2, low + 1]])
    x = x.to(dtype)
    for extreme in (torch.argmax, torch.argmin):
        (found,) = in_one_kernel(lambda x, extreme=extreme: extreme(x, -1), x, target)
        assert torch.equal(found, extreme(x, -1))


@both
@pytest.mark.parametrize("count", [1, 4, pytest.param(8, marks=pytest.mark.thorough)])
def test_a_router_is_one_kernel(count: int, target: str) -> None:
    """Softmax, selection, and scores that add up to 1."""

    def router(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(x.softmax(-1), count)
        return values / values.sum(-1, keepdim=True), indices

    x = torch.randn(7, 40, generator=torch.Generator().manual_seed(1))
    for found, eager in zip(in_one_kernel(router, x, target), router(x), strict=True):
        torch.testing.assert_close(found, eager)


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.topk(x, 9), lambda x: torch.topk(x, 2, dim=0), lambda x: torch.topk(x, 2, largest=False),
     lambda x: x.argmax(0), lambda x: x.argmax()],
)  # fmt: skip
def test_others_are_left_to_aten(function: Callable[[Tensor], object]) -> None:
    x = torch.randn(12, 20, generator=torch.Generator().manual_seed(1))
    made = compile_graph(trace(function, [x], symbolic=False), Config(strict=True)).program
    eager = function(x)
    for a, b in zip(made([x]), eager if isinstance(eager, tuple) else (eager,), strict=True):
        assert torch.equal(a, b)
