"""Scatters that combine elements: eager's sums and extremes in one kernel, in order, with repeated places."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.dynamo import compiled_graphs
from fusec.errors import ImportFailure
from fusec.frontend.lowering import Lowering
from fusec.frontend.scatters import require_order
from fusec.ir.graph import Graph
from fusec.ir.types import F32, TensorType
from tests.codegen.test_dynamic_indices import both
from tests.codegen.test_sorts import generator, run
from tests.combinations import rotating

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce:UserWarning", "ignore:The reduce argument:UserWarning")

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool]
OTHERS = [torch.float64, torch.float16, torch.int32, torch.int16, torch.uint8]
NUMBERS = [*DTYPES[:-1], *OTHERS]
REDUCTIONS = ["sum", "prod", "amax", "amin", "mean"]
PLACES = torch.tensor([3, 0, 3, 3, 5, 0, 3, 1])
"""Of six rows: some several times, some never."""


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return small integers, whose sums are exact in every dtype, and products in most."""
    return torch.randint(0 if dtype == torch.uint8 else -2, 4, shape, generator=generator(seed)).to(dtype)


def check(
    functions: Iterable[Callable[..., Tensor]], *inputs: Tensor, symbolic: bool = False, target: str = "cpp"
) -> None:
    """Check that the results of all functions are eager's, with eager's strides, and that kernels compute them."""
    made = list(functions)
    found, steps = run(lambda *xs: tuple(f(*xs) for f in made), *inputs, symbolic=symbolic, target=target)
    for one, function in zip(found, made, strict=True):
        expected = function(*inputs)
        assert one.dtype == expected.dtype and one.stride() == expected.stride()
        torch.testing.assert_close(one, expected, rtol=0, atol=0, equal_nan=True)
    assert "kernel" in steps and not {"opaque", "interpreted"} & set(steps)


@both
@pytest.mark.parametrize("dtype", [*DTYPES, *(pytest.param(d, marks=pytest.mark.thorough) for d in OTHERS)], ids=str)
def test_rows_are_added(dtype: torch.dtype, target: str) -> None:
    functions: list[Callable[..., Tensor]] = [
        lambda x, i, s: x.index_add(0, i, s),
        lambda x, i, s: x[:, :6].index_add(-1, i.int(), s[:6, :8]),
        lambda x, i, s: torch.zeros_like(x).index_put((i - 6,), s, accumulate=True),
    ]
    if dtype != torch.bool:
        functions.append(lambda x, i, s: x.index_add(0, i, s * s, alpha=2))
    check(functions, numbers(6, 40, dtype=dtype), PLACES, numbers(8, 40, dtype=dtype, seed=1), target=target)


@both
@pytest.mark.parametrize(("reduce", "dtype"), rotating(REDUCTIONS, NUMBERS), ids=str)
def test_elements_are_combined(reduce: str, dtype: torch.dtype, target: str) -> None:
    x, new = numbers(6, 7, dtype=dtype), numbers(9, 7, dtype=dtype, seed=1)
    places = torch.randint(0, 6, (6, 5), generator=generator())
    functions: list[Callable[..., Tensor]] = [
        lambda x, i, s: x.scatter_reduce(0, i, s, reduce),
        lambda x, i, s: x.scatter_reduce(1, i, s, reduce, include_self=False),
    ]
    if reduce != "sum":
        functions.append(lambda x, i, s: x.index_reduce(0, i[0], s[:5], reduce, include_self=False))
    check(functions, x, places, new, target=target)


@both
@pytest.mark.parametrize("symbolic", [False, True])
def test_elements_are_combined_by_other_spellings(symbolic: bool, target: str) -> None:
    functions: list[Callable[..., Tensor]] = [
        lambda x, i, s: x.scatter_add(0, i, s * 2), lambda x, i, s: x[0].scatter_add(0, i[0], s[0]),
        lambda x, i, s: x.scatter(1, i, s, reduce="add"), lambda x, i, s: x.scatter(1, i, 3.0, reduce="multiply"),
        lambda x, i, s: x[0, 0].index_add(0, i[0, :1] * 0, s[0, 0]),
        lambda x, i, s: torch.zeros(6, 9).scatter_add(1, i, torch.ones(6, 7)),
        lambda x, i, s: x.index_put((i[0], i[1]), s[0], accumulate=True),
        lambda x, i, s: x.index_put((i[:2, :3],), s[0], accumulate=True),
        lambda x, i, s: (x > 0).scatter_add(1, i, s > 0), lambda x, i, s: x.scatter_add(1, i[:, :0], s),
        lambda x, i, s: x.index_add(0, i[0, :0], s[:0]),
    ]  # fmt: skip
    check(functions, numbers(6, 7), torch.randint(0, 6, (6, 7), generator=generator()), numbers(6, 7, seed=1),
          symbolic=symbolic, target=target)  # fmt: skip


@both
def test_an_index_that_is_the_same_for_a_whole_row(target: str) -> None:
    functions: list[Callable[..., Tensor]] = [
        lambda x, i, s: x.scatter(1, i.expand(-1, 7), s * 2), lambda x, i, s: x.scatter_add(1, i.expand(-1, 7), s * 2),
        lambda x, i, s: x.scatter_reduce(0, i.expand(-1, 7), s, "amax"),
        lambda x, i, s: x.scatter_add(1, i.expand(-1, 7), torch.ones(6, 7)),
        lambda x, i, s: x.scatter_add(0, i.expand(-1, 7), s[:, :1].expand(-1, 7)),
    ]  # fmt: skip
    check(
        functions,
        numbers(6, 7),
        torch.randint(0, 6, (6, 1), generator=generator()),
        numbers(6, 7, seed=1),
        target=target,
    )


@both
@pytest.mark.parametrize("combine", [False, True])
def test_an_input_that_is_expanded_as_index(combine: bool, target: str) -> None:
    """All elements of a row have one place: the last is kept."""
    functions: list[Callable[..., Tensor]] = [
        lambda x, i, s: x.scatter_reduce(1, i, s, "amax") if combine else x.scatter(1, i, s),
        lambda x, i, s: x.scatter_add(1, i, s * 2) if combine else x.scatter(1, i, s - s.sum(-1, keepdim=True)),
    ]
    for shape in ((6, 1), (1, 1)):
        index = torch.randint(0, 8, shape, generator=generator()).expand(6, 20)
        check(functions, numbers(6, 8), index, numbers(6, 20, seed=1), target=target)


@both
def test_special_values(target: str) -> None:
    x, new = torch.tensor([1.0, -inf, nan, inf]), torch.tensor([nan, 5.0, 3.0, -inf, 2.0])
    places = torch.tensor([0, 1, 2, 3, 3])
    check(
        (lambda x, i, s, r=reduce: x.scatter_reduce(0, i, s, r) for reduce in REDUCTIONS), x, places, new, target=target
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.thorough)], ids=str)
def test_sums_of_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    places, ones = torch.zeros(3000, dtype=torch.int64), torch.ones(3000, dtype=dtype)
    for function in (
        lambda i, s: torch.zeros(2, dtype=dtype).index_add(0, i, s),
        lambda i, s: torch.zeros(2, dtype=dtype).index_put((i,), s, accumulate=True),
        lambda i, s: torch.zeros(2, dtype=dtype).scatter_add(0, i, s),
    ):
        (found,), _ = run(function, places, ones)
        assert found.tolist() == [torch.tensor(3000.0).to(dtype).item(), 0]


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_share_no_place(threads: int) -> None:
    places, new = torch.randint(0, 9, (700,), generator=generator()), torch.randn(700, 190, generator=generator())
    expected = torch.zeros(9, 190)
    for place, row in zip(places, new, strict=True):
        expected[place] += row
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for function in (
            lambda i, s: torch.zeros(9, 190).index_add(0, i, s),
            lambda i, s: torch.zeros(190, 9).index_add(1, i, s.mT).mT,
            lambda i, s: torch.zeros(190 * 9).index_add(0, (i * 190 + torch.arange(190)[:, None]).mT.reshape(-1),
                                                        s.reshape(-1)).view(9, 190),
        ):  # fmt: skip
            (found,), _ = run(function, places, new)
            assert torch.equal(found, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [64, 4])
def test_products_are_scattered_by_a_kernel_of_their_own(rows: int) -> None:
    def function(a: Tensor, b: Tensor, i: Tensor) -> Tensor:
        zeros = torch.zeros(64, 48)
        return zeros.scatter(0, i, a @ b) if rows == 4 else zeros.scatter_add(0, i, a @ b)

    inputs = numbers(rows, 32), numbers(32, 48), torch.randint(0, 3, (rows, 48), generator=generator())
    (found,), steps = run(function, *inputs)
    assert torch.equal(found, function(*inputs)) and steps.count("kernel") + steps.count("vendor") == 2


# Updates in place.


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="fusec", options={"strict": True})


UPDATES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "rows": (lambda x, i, s: x.index_add_(0, i, s.abs()), ["kernel"]),
    "elements": (lambda x, i, s: x.scatter_add_(0, i[:, None].expand(8, 5), s), ["kernel"]),
    "places": (lambda x, i, s: x.index_put_((i,), s, accumulate=True), ["kernel"]),
    "replaced": (lambda x, i, s: x.scatter_(0, i[:, None].expand(8, 5), s), ["kernel"]),
    "twice": (lambda x, i, s: x.index_add_(0, i, s).index_add_(0, i, s).sum(), ["kernel"] * 3),
    "extremes without the old ones": (
        lambda x, i, s: x.index_reduce_(0, i, s, "amax", include_self=False), ["kernel"] * 2,
    ),
    "of what is read": (lambda x, i, s: x.index_add_(0, i, x[i]), ["kernel"] * 2),
    "a view": (lambda x, i, s: x.view(-1).index_add_(0, i, s[:, 0]), ["kernel"]),
    "the old value is read": (lambda x, i, s: (x + 1, x.index_add_(0, i, s))[0], ["kernel"] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", UPDATES)
def test_inputs_are_updated_in_place(name: str) -> None:
    function, steps = UPDATES[name]
    x, new = numbers(6, 7)[:, :5].contiguous(), numbers(8, 5, seed=1)
    own, eager = x.clone(), x.clone()
    expected = function(eager, PLACES, new)
    assert torch.equal(compiled(function)(own, PLACES, new), expected) and torch.equal(own, eager)
    assert [step.kind for step in compiled_graphs()[-1].program.steps if step.kind != "opaque"] == steps


def test_an_input_is_not_read_while_it_is_updated() -> None:
    """The source is a view of it; eager would read what it has written."""

    def own_row(x: Tensor, i: Tensor) -> Tensor:
        return x.index_add_(0, i, x[1:2].expand(len(i), -1))

    own, old = numbers(6, 5), numbers(6, 5)
    compiled(own_row)(own, PLACES)
    assert torch.equal(own, old.index_add(0, PLACES, old[1:2].repeat(len(PLACES), 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_read_later_is_kept(dtype: torch.dtype) -> None:
    def old(x: Tensor, i: Tensor, s: Tensor) -> Any:
        y = x.index_add(0, i, s)
        x.add_(1)
        return y, y.index_add(0, i, s), y * 2

    def kept(x: Tensor, i: Tensor, s: Tensor) -> Any:
        y = x.index_add(0, i, s)
        z = y.view(-1)
        return y.index_add(0, i, s), z + 1

    def chain(x: Tensor, i: Tensor, s: Tensor) -> Any:
        y = torch.zeros_like(x)
        for k in range(4):
            y.index_add_(0, i[2 * k : 2 * k + 2], s[2 * k : 2 * k + 2] * k)
        return y

    def transposed(x: Tensor, i: Tensor, s: Tensor) -> Any:
        x.mT.index_add_(1, i, s.mT)
        x[1].index_add_(0, i % 5, s[:, 0])
        return x.sum()

    def mean(x: Tensor, i: Tensor, s: Tensor) -> Any:
        return x.scatter_reduce_(0, i[:, None].expand(8, 5).contiguous(), s, "mean").clone()

    for function in (old, kept, chain, transposed, mean):
        x, new = numbers(6, 5, dtype=dtype), numbers(8, 5, dtype=dtype, seed=1)
        own, eager = x.clone(), x.clone()
        torch.testing.assert_close(compiled(function)(own, PLACES, new), function(eager, PLACES, new), rtol=0, atol=0)
        assert torch.equal(own, eager)


OUTSIDE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rows": lambda x, i, s: x.index_add_(0, i, s),
    "scaled rows": lambda x, i, s: x.index_add_(0, i, s, alpha=2),
    "rows at int32": lambda x, i, s: x.index_add_(0, i.int(), s),
    "numbers": lambda x, i, s: x.view(-1).index_add_(0, i * 5, s[:, 0]),
    "elements": lambda x, i, s: x.scatter_add_(0, i[:, None].expand(8, 5), s),
    "places": lambda x, i, s: x.index_put_((i,), s, accumulate=True),
    "replaced": lambda x, i, s: x.scatter_(0, i[:, None].expand(8, 5), s),
}


@pytest.mark.parametrize(("name", "place"), rotating(list(OUTSIDE), (-1, -7, 6)))
def test_a_place_out_of_range_is_reported_as_in_eager(name: str, place: int) -> None:
    function, places = OUTSIDE[name], PLACES.clone()
    places[5] = place
    x, new = numbers(6, 5), numbers(8, 5, seed=1)
    own, eager = x.clone(), x.clone()
    if name == "places" and place == -1:
        assert torch.equal(compiled(function)(own, places, new), function(eager, places, new))
        return
    with pytest.raises((IndexError, RuntimeError)) as expected:
        function(eager, places, new)
    with pytest.raises(expected.type):
        compiled(function)(own, places, new)
    assert torch.equal(own, x)


def test_nothing_is_refused_that_eager_takes() -> None:
    none = torch.tensor([9])
    assert not compiled(lambda x, i, s: x.index_add(0, i, s))(torch.zeros(3, 0), none, torch.zeros(1, 0)).numel()


# Gradients.


@pytest.mark.parametrize("reduce", ["mean", *(pytest.param(r, marks=pytest.mark.thorough) for r in ("sum", "amax"))])
def test_gradients(reduce: str) -> None:
    def loss(table: Tensor, new: Tensor, ids: Tensor) -> Tensor:
        x = table[ids].sin().sum(1).index_add(0, PLACES, new, alpha=2)
        places = ids[:, :1].expand(6, 5).contiguous() % 5
        return x.scatter_reduce(1, places, new[:6].cos(), reduce).square().sum() + table.gather(0, ids[:2]).sum()

    ids = torch.tensor([[3, 3, -1, 0, 3]] * 3 + [[1, 0, 1, 1, 1]] * 3)
    loss_ids = lambda t, n: loss(t, n, ids % 9)  # noqa: E731
    table, new = torch.randn(9, 5, generator=generator()), torch.randn(8, 5, generator=generator(1))
    found, expected = ([x.clone().requires_grad_() for x in (table, new)] for _ in range(2))
    compiled(loss_ids)(*found).backward()
    loss_ids(*expected).backward()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert not any(n.is_op("opaque") for c in compiled_graphs()[-2:] for n in c.graph.nodes)


@pytest.mark.parametrize(("dtype", "padding"), [(torch.float32, 3), (torch.float64, None), (torch.bfloat16, 3)])
def test_rows_of_an_embedding_are_added(dtype: torch.dtype, padding: int | None) -> None:
    ids = torch.tensor([[3, 0, 3, 8], [8, 8, 1, 3]])

    def loss(table: Tensor) -> Tensor:
        rows = torch.nn.functional.embedding(ids, table, padding_idx=padding)
        return (rows * torch.arange(4.0, dtype=table.dtype)[:, None]).square().sum()

    found, expected = (numbers(9, 40).to(dtype).requires_grad_() for _ in range(2))
    compiled(loss)(found).backward()
    loss(expected).backward()
    assert found.grad is not None and torch.equal(found.grad, expected.grad)
    left = [n for n in compiled_graphs()[-1].graph.nodes if n.is_op("opaque")]
    assert len(left) == (dtype == torch.bfloat16)  # whose sums would take a copy of the table


@pytest.mark.parametrize(
    ("shape", "dim", "match"),
    [((300, 8), -2, "300 elements in order"), ((8, 30), -1, "no dim is contiguous"), ((8, 30), -2, "")],
)
def test_long_and_irregular_scatters_are_refused_on_other_devices(shape: tuple[int, int], dim: int, match: str) -> None:
    graph = Graph()
    low, x = Lowering(graph), graph.add_input(TensorType(F32, shape, (shape[1], 1), "cuda:0"))
    low.device = "cuda:0"
    with pytest.raises(ImportFailure, match=match) if match else nullcontext():
        require_order(low, x, x, dim)
