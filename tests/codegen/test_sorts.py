"""Scans, sorts and scatters: eager's results in one kernel, with NaN, zeros of both signs, ties and repeats."""

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace
from tests.codegen.test_dynamic_indices import both
from tests.combinations import named, rotating

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
SPECIAL = torch.tensor([
    [-inf, -0.0, nan, 0.0, inf, 1e-40, -1e-40], [nan, nan, 1.0, -inf, -inf, nan, inf],
    [0.0, -0.0, 0.0, -0.0, 0.0, -0.0, 0.0], [-inf] * 7, [3.0, 2.0, 3.0, 1.0, 2.0, 1.0, 3.0],
])  # fmt: skip


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(
    function: Callable[..., Any], *inputs: Tensor, symbolic: bool = False, target: str = "cpp"
) -> tuple[list[Tensor], list[str]]:
    """Run a function as a program without fallbacks; return its results and the kinds of its steps."""
    if target == "triton":
        pytest.importorskip("triton")
    config = Config(strict=True, target=target)
    made = compile_graph(trace(function, list(inputs), symbolic=symbolic), config).program
    return made([x.clone() for x in inputs]), [step.kind for step in made.steps]


def in_one_kernel(
    function: Callable[..., Any], *inputs: Tensor, symbolic: bool = False, target: str = "cpp"
) -> list[Tensor]:
    found, steps = run(function, *inputs, symbolic=symbolic, target=target)
    assert steps == ["kernel"]
    return found


def same(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal, NaN included."""
    close = found.dtype == expected.dtype and found.shape == expected.shape
    return close and bool(((found == expected) | ((found != found) & (expected != expected))).all())


# Sorts.


@both
@pytest.mark.parametrize(("n", "descending"), rotating((1, 7, 33, 300, 2049, 20_000), (False, True)))
def test_rows_of_any_length_are_sorted_and_equal_elements_keep_their_order(
    n: int, descending: bool, target: str
) -> None:
    x = (3 * torch.randn(3, n, generator=generator())).round(decimals=1 if n < 3000 else 3)
    found, steps = run(lambda x: torch.sort(x, stable=True, descending=descending), x, target=target)
    assert steps == ["kernel"] or (target == "triton" and n not in range(2, 2049))
    for a, b in zip(found, torch.sort(x, stable=True, descending=descending), strict=True):
        assert same(a, b)


@both
@pytest.mark.parametrize(("dtype", "descending"), rotating([*FLOATS, *INTEGERS, torch.bool], (False, True)), ids=str)
def test_all_dtypes_are_sorted(descending: bool, dtype: torch.dtype, target: str) -> None:
    x = torch.randint(-30, 30, (4, 90), generator=generator()).to(dtype)
    found, _ = run(lambda x: torch.sort(x, stable=True, descending=descending), x, target=target)
    for a, b in zip(found, torch.sort(x, stable=True, descending=descending), strict=True):
        assert same(a, b)


@both
@pytest.mark.parametrize(("dtype", "descending"), rotating(FLOATS, (True, False)), ids=str)
def test_nan_is_the_largest_and_zeros_are_equal(descending: bool, dtype: torch.dtype, target: str) -> None:
    x = SPECIAL.to(dtype)
    for rows in (x, x.repeat(1, 9)):
        (values, places), steps = run(lambda x: torch.sort(x, stable=True, descending=descending), rows, target=target)
        assert steps == ["kernel"] or (dtype == torch.float64 and target == "triton")
        expected = torch.sort(rows, stable=True, descending=descending)
        assert same(values, expected.values) and torch.equal(places, expected.indices)
        zeros = values == 0
        assert torch.equal(values[zeros].signbit(), expected.values[zeros].signbit()), "zeros keep their signs"


@both
@pytest.mark.parametrize(("usual", "descending"), rotating((-inf, nan, 0.0, 1.5), (True, False)), ids=str)
@pytest.mark.parametrize("n", [33, 64, 300, 5000])
def test_rows_of_mostly_equal_elements(n: int, usual: float, descending: bool, target: str) -> None:
    x = torch.full((4, n), usual)
    for row, step in zip(x[1:], (3, 7, 40), strict=True):  # others apart, and a few in a row
        row[1::step] = torch.randn(n, generator=generator())[1::step]
        row[n // 2 + 1 : n // 2 + 4] = torch.tensor([2.0, -3.0, 1.0])
    x[2:, 1::9] *= -1  # zeros of both signs
    found, steps = run(lambda x: torch.sort(x, stable=True, descending=descending), x, target=target)
    assert steps == ["kernel"] or (target == "triton" and n > 2048)
    expected = torch.sort(x, stable=True, descending=descending)
    assert same(found[0], expected.values) and torch.equal(found[1], expected.indices)
    assert torch.equal(found[0].signbit(), expected.values.signbit())


@both
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
def test_the_ends_of_integers_are_in_order(dtype: torch.dtype, target: str) -> None:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x = torch.tensor([[low, high, 0, -1, low + 1, high - 1, 1]]).to(dtype)
    assert torch.equal(run(lambda x: torch.sort(x)[0], x, target=target)[0][0], x.sort()[0])


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("n", "count"), [(50, 9), (50, 50), (3000, 1), (3000, 60), (3000, 700), (40_000, 2000)])
def test_the_first_of_many_elements(n: int, count: int, largest: bool) -> None:
    x = (3 * torch.randn(2, n, generator=generator())).round(decimals=2)
    values, places = in_one_kernel(lambda x: torch.topk(x, count, largest=largest), x)
    expected = torch.sort(x, stable=True, descending=largest)
    assert same(values, expected.values[:, :count]) and torch.equal(places, expected.indices[:, :count])


@pytest.mark.parametrize("worst", ["ascending", "equal", "masked"])
def test_rows_for_which_a_sample_tells_nothing(worst: str) -> None:
    n = 30_000
    x = torch.arange(n).float()[None] if worst == "ascending" else torch.full((1, n), -inf)
    if worst == "masked":
        x[0, 1::1000] = torch.randn(30, generator=generator())
    for function in (lambda x: torch.topk(x, 40), lambda x: torch.topk(x, 40, largest=False)):
        values, places = in_one_kernel(function, x)
        assert same(values, function(x).values) and same(x.gather(-1, places), values)
        assert len(set(places[0].tolist())) == 40


def test_the_first_elements_may_all_be_in_the_sample() -> None:
    """Wherever they are taken from: one fewer than are asked for would then be left."""
    n, count = 40_000, 200
    program = compile_graph(trace(lambda x: torch.topk(x, count), [torch.zeros(1, n)]), Config(strict=True)).program
    for step in range(2, 50):
        x = torch.rand(1, n, generator=generator())
        x[0, ::step][:count] += 1 + torch.arange(count)
        values, places = program([x])
        assert torch.equal(values, torch.topk(x, count).values)
        assert torch.equal(places[0], step * torch.arange(count - 1, -1, -1))


@both
def test_other_dims_and_views_are_sorted(target: str) -> None:
    x = torch.randn(6, 5, 4, generator=generator())
    for function in (
        lambda x: torch.sort(x, 0), lambda x: torch.sort(x.mT, 1), lambda x: torch.topk(x, 2, 1),
        lambda x: torch.argsort(x[..., 1:], stable=True), lambda x: torch.sort(x[0, 0]), lambda x: torch.sort(x[:, :0]),
    ):  # fmt: skip
        expected = function(x)
        expected = (expected,) if isinstance(expected, Tensor) else expected
        for a, b in zip(run(function, x, target=target)[0], expected, strict=True):
            assert same(a, b)


@both
def test_what_is_sorted_is_computed_and_what_is_read_of_it_too_in_one_kernel(target: str) -> None:
    def nucleus(x: Tensor) -> Tensor:
        values, order = torch.sort(x / 0.7)
        hidden = values.softmax(-1).cumsum(-1) <= 0.2
        return (x / 0.7).masked_fill(hidden.scatter(1, order, hidden), -inf)

    x = torch.randn(3, 500, generator=generator())
    found, steps = run(nucleus, x, target=target)
    assert same(found[0], nucleus(x)) and steps.count("kernel") <= 3 - (target == "cpp")
    assert not {"opaque", "interpreted"} & set(steps)


@both
def test_half_types_are_sorted_as_they_are_rounded(target: str) -> None:
    """Products of 2 or more have half the precision of their factors: neighbours become equal, and keep their order."""
    x = (1.7 + torch.arange(38)[None] * 2**-7).bfloat16()
    assert len(set(x[0].tolist())) == 38 and len(set((x * 1.2)[0].tolist())) < 38
    (found,) = in_one_kernel(lambda x: torch.argsort(x * 1.2, stable=True, descending=True), x, target=target)
    assert torch.equal(found, torch.argsort(x * 1.2, stable=True, descending=True))


@pytest.mark.parametrize("n", [5, 40, 3000])
def test_lengths_that_are_known_only_at_run_time(n: int) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return *torch.sort(x, stable=True), x.cumsum(-1), torch.argsort(x, stable=True, descending=True)

    made = compile_graph(trace(function, [torch.randn(4, 11)]), Config(strict=True)).program
    x = torch.randn(3, n, generator=generator())
    for a, b in zip(made([x]), function(x), strict=True):
        assert torch.allclose(a.double(), b.double(), atol=1e-5)


# Scans.


@both
@pytest.mark.parametrize(
    ("dtype", "dim", "scan"),
    rotating([*FLOATS, torch.int64], (0, 1, -1), (torch.cumsum, torch.cumprod)),
    ids=named,
)
def test_running_sums_and_products(scan: Callable[..., Tensor], dim: int, dtype: torch.dtype, target: str) -> None:
    x = (torch.rand(5, 37, 9, generator=generator()) * 2).to(dtype)
    (found,) = in_one_kernel(lambda x: scan(x, dim), x, target=target)
    exact = target == "cpp" or dtype != torch.float64  # tiles are not scanned one element after another
    torch.testing.assert_close(found, scan(x, dim), rtol=0.0 if exact else 1e-14, atol=0.0)


@both
def test_integers_and_booleans_are_counted_in_64_bits(target: str) -> None:
    x = torch.randint(0, 2, (3, 300), generator=generator())
    for dtype in (torch.bool, torch.uint8, torch.int32):
        (found,) = in_one_kernel(lambda x: x.cumsum(-1), x.to(dtype), target=target)
        assert torch.equal(found, x.cumsum(-1))
    (found,) = in_one_kernel(lambda x: x.cumsum(-1, dtype=torch.float32), x, target=target)
    assert torch.equal(found, x.cumsum(-1, dtype=torch.float32))


@both
def test_long_rows_are_summed_in_float64_as_eager_does(target: str) -> None:
    x = torch.rand(2, 70_000, generator=generator())
    (found,) = in_one_kernel(lambda x: x.cumsum(-1), x, target=target)
    assert torch.equal(found, x.cumsum(-1))


@both
def test_the_sum_of_zeros_is_positive(target: str) -> None:
    x = torch.tensor([[-0.0, -0.0, 1.0, -0.0], [0.0, -0.0, -0.0, -1.0]])
    for scan in (torch.cumsum, torch.cumprod):
        (found,) = in_one_kernel(lambda x, scan=scan: scan(x, -1), x, target=target)
        assert torch.equal(found, scan(x, -1)) and torch.equal(found.signbit(), scan(x, -1).signbit())


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64], ids=str)
def test_scans_of_any_length_with_infinities_and_overflow(dtype: torch.dtype, target: str) -> None:
    overflows = dtype == torch.float64 and target == "cpp"  # tiles are not scanned one element after another
    values = [-1e308, 1e308, 1e308, 1.0, -0.0] if overflows else [3.0, -0.0, 5.0, 2.0, 7.0]
    for n in (1, 2, 7, 8, 15, 16, 17, 31, 33, 100):
        x = torch.tensor(values).to(dtype).repeat(20)[:n][None].repeat(3, 1)
        if dtype.is_floating_point:
            x[1, n // 2], x[2, n // 2], x[2, -1] = inf, nan, -inf
        else:
            x[1, n // 2] = torch.iinfo(dtype).max
        for scan in (torch.cumsum, torch.cumprod):
            (found,) = in_one_kernel(lambda x, scan=scan: scan(x, -1), x, target=target)
            assert same(found, scan(x, -1))


@both
def test_scans_beside_reductions_and_of_constants(target: str) -> None:
    x = torch.randn(4, 100, generator=generator())
    for function in (
        lambda x: (x.softmax(-1).cumsum(-1) < 0.5).sum(-1), lambda x: x.exp().cumsum(-1) / x.exp().sum(-1, True),
        lambda x: torch.ones_like(x).cumsum(-1) + x, lambda x: x.cumsum(-1).cumsum(-1), lambda x: x[:, :1].cumsum(-1),
        lambda x: x.cumsum(-1)[:, :60] * 2, lambda x: x.cumsum(-1)[:, 40:] * 2,
        lambda x: x.cumsum(-1)[:, 1::2] * 2, lambda x: x.cumsum(-1)[:, 3] * 2, lambda x: x.cumsum(-1)[:, :1] * 2,
        lambda x: torch.cat([x, x.cumsum(-1)], -1) * 2, lambda x: x.mT.cumsum(-1),
        lambda x: x.cumsum(-1) + x.cumsum(0), lambda x: x.cumsum(-1).mean(),
    ):  # fmt: skip
        (found,), steps = run(function, x, target=target)
        torch.testing.assert_close(found, function(x), rtol=1e-5, atol=1e-5)
        assert set(steps) == {"kernel"}


# Scatters.


def test_elements_are_scattered() -> None:
    x, index = torch.randn(4, 30, generator=generator()), torch.randint(0, 30, (4, 12), generator=generator())
    for function in (
        lambda x, i: torch.zeros_like(x).scatter(1, i, 2.5), lambda x, i: x.scatter(1, i[:2], x[:2] * 2),
        lambda x, i: x.scatter(0, i % 4, x), lambda x, i: torch.ones(4, 31, dtype=torch.bool).scatter(1, i, False),
        lambda x, i: x.scatter(1, i, x.gather(1, i) * 3).scatter(1, i + 0, 1.0),
        lambda x, i: x[0].scatter(0, i[0], x[1]),
    ):  # fmt: skip
        (found,), steps = run(function, x, index)
        assert torch.equal(found, function(x, index)) and not {"opaque", "interpreted"} & set(steps)


def test_the_last_of_several_elements_for_one_place_is_kept() -> None:
    x, index = torch.randn(3, 4000, generator=generator()), torch.randint(0, 5, (3, 4000), generator=generator())
    (found,), _ = run(lambda x, i: torch.zeros(3, 5).scatter(1, i, x), x, index)
    for row in range(3):
        for place in range(5):
            assert found[row, place] == x[row][index[row] == place][-1]


@pytest.mark.parametrize("place", [-1, 30])
def test_a_place_out_of_range_is_reported_before_anything_is_stored(place: int) -> None:
    compiled = torch.compile(lambda x, i: x.scatter_(1, i, 1.0), backend="fusec")
    x, index = torch.zeros(4, 30), torch.randint(0, 30, (4, 12), generator=generator())
    index[2, 5] = place
    with pytest.raises(RuntimeError):
        compiled(x, index)
    assert not x.any()


def test_a_permutation_is_inverted_without_a_copy() -> None:
    x = torch.randn(3, 64, generator=generator())
    found, steps = run(lambda x: x.scatter(1, torch.argsort(x), torch.sort(x).values), x)
    assert torch.equal(found[0], x) and steps.count("kernel") == 1
