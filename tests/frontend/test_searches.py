"""Binary searches: eager's places in one kernel, in rows with ties and NaN, and in rows that are not sorted."""

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace
from tests.combinations import rotating

both = pytest.mark.parametrize("target", ["cpp", "triton"])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def in_one_kernel(function: Callable[..., Tensor], *inputs: Tensor, target: str = "cpp") -> Tensor:
    """Run a function as a program, which must be a single kernel."""
    if target == "triton":
        pytest.importorskip("triton")
    made = compile_graph(trace(function, list(inputs), symbolic=False), Config(strict=True, target=target)).program
    assert [step.kind for step in made.steps] == ["kernel"], made.source
    (found,) = made(list(inputs))
    return found


@both
@pytest.mark.parametrize(("n", "right"), rotating((1, 2, 7, 8, 100), (False, True)))
def test_places_in_a_row_of_any_length(n: int, right: bool, target: str) -> None:
    row = torch.randint(-20, 20, (n,), generator=generator()).float().sort().values
    values = torch.randint(-22, 22, (3, 37), generator=generator()).float()
    found = in_one_kernel(lambda r, v: torch.searchsorted(r, v, right=right), row, values, target=target)
    assert torch.equal(found, torch.searchsorted(row, values, right=right))


@both
@pytest.mark.parametrize("right", [False, True])
def test_steps_are_eagers_in_rows_with_nan_or_out_of_order(right: bool, target: str) -> None:
    rows = torch.tensor([
        [-inf, -0.0, 0.0, 1.0, nan], [nan, nan, nan, nan, nan], [-inf, -inf, 2.0, inf, inf], [3.0, -1.0, nan, 2.0, 0.0],
    ])  # fmt: skip
    values = torch.tensor([-inf, -1.0, -0.0, 0.0, 0.5, 2.0, inf, nan]).repeat(4, 1)
    found = in_one_kernel(lambda r, v: torch.searchsorted(r, v, right=right), rows, values, target=target)
    assert torch.equal(found, torch.searchsorted(rows, values, right=right))


@both
@pytest.mark.parametrize(
    ("dtype", "right"),
    rotating((torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8), (False, True)),
    ids=str,
)
def test_all_dtypes_and_batches_of_rows(dtype: torch.dtype, right: bool, target: str) -> None:
    rows = torch.randint(0, 90, (2, 3, 12), generator=generator()).to(dtype).sort().values
    values = torch.randint(0, 99, (2, 3, 20), generator=generator()).to(dtype)
    found = in_one_kernel(
        lambda r, v: torch.searchsorted(r, v * 1, side="right" if right else "left", out_int32=True), rows, values,
        target=target,
    )  # fmt: skip
    assert found.dtype == torch.int32
    assert torch.equal(found, torch.searchsorted(rows, values, right=right, out_int32=True))


def test_the_greatest_integers_are_in_order() -> None:
    most = torch.iinfo(torch.int64).max
    row, values = torch.tensor([most - 2, most - 1, most]), torch.tensor([most - 1, most, -most - 1])
    assert torch.equal(in_one_kernel(torch.searchsorted, row, values), torch.searchsorted(row, values))


@both
def test_buckets_of_what_is_computed(target: str) -> None:
    edges, x = torch.tensor([-1.0, 0.0, 0.5, 2.0]), torch.randn(5, 9, generator=generator())
    found = in_one_kernel(lambda e, x: torch.bucketize(x.exp() - 1, e, right=True), edges, x, target=target)
    assert torch.equal(found, torch.bucketize(x.exp() - 1, edges, right=True))


def test_an_inverse_of_the_distribution_is_one_kernel() -> None:
    x, u = torch.randn(3, 300, generator=generator()), torch.rand(3, 1, generator=generator())

    def draw(x: Tensor, u: Tensor) -> Tensor:
        return torch.searchsorted(x.softmax(-1).cumsum(-1), u)

    made = compile_graph(trace(draw, [x, u], symbolic=False), Config(strict=True)).program
    assert {step.kind for step in made.steps} == {"kernel"} and torch.equal(made([x, u])[0], draw(x, u))


def test_sizes_that_are_known_only_at_run_time() -> None:
    row = torch.arange(40.0)
    made = compile_graph(
        trace(lambda v, r: torch.searchsorted(r, v), [torch.zeros(4, 11), row], symbolic=True), Config(strict=True)
    ).program
    for shape in ((3, 5), (1, 70)):
        values = 50 * torch.rand(shape, generator=generator())
        assert torch.equal(made([values, row])[0], torch.searchsorted(row, values))


@pytest.mark.filterwarnings("ignore:.*non-contiguous")  # eager's
@pytest.mark.parametrize(
    "function",
    [
        lambda r, v: torch.searchsorted(r, v[:, :0]), lambda r, v: torch.searchsorted(r[:0], v),
        lambda r, v: torch.searchsorted(r.flip(0), v, sorter=torch.arange(39, -1, -1)),
        lambda r, v: torch.searchsorted(r, v.mT), lambda r, v: torch.searchsorted(r, v[0, 0]),
        lambda r, v: torch.searchsorted(r, 2.5), lambda r, v: torch.bucketize(v.mT, r),
        lambda r, v: torch.searchsorted(r[::2], v[:, ::2]),
    ],
)  # fmt: skip
def test_views_and_what_is_left_to_aten(function: Callable[..., Any]) -> None:
    row, values = torch.arange(40.0), 50 * torch.rand(4, 6, generator=generator())
    found, expected = torch.compile(function, backend="fusec")(row, values), function(row, values)
    assert torch.equal(found, expected) and found.stride() == expected.stride() and found.dtype == expected.dtype


@pytest.mark.parametrize(
    "function",
    [
        lambda r, v: torch.searchsorted(r > 2, v > 2), lambda r, v: torch.searchsorted(r, v, side="middle"),
        lambda r, v: torch.searchsorted(r[0], v), lambda r, v: torch.bucketize(v, v),
    ],
    ids=["bool", "side", "scalar", "matrix"],
)  # fmt: skip
def test_what_eager_refuses_is_refused(function: Callable[..., Any]) -> None:
    row, values = torch.arange(40.0), torch.rand(4, 6, generator=generator())
    with pytest.raises(RuntimeError):
        function(row, values)
    with pytest.raises(RuntimeError):
        torch.compile(function, backend="fusec")(row, values)
