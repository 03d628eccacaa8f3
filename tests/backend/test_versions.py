"""Inputs that are updated several times, or in parts: in place where nothing reads an old version afterwards."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fusec.config import Config
from fusec.dynamo import backend_for, compiled_graphs
from fusec.frontend.versions import updates_in_place
from tests.backend.agreement import check

PAGES, PAGE, HEADS, WIDTH = 4, 4, 2, 8
ROWS = torch.tensor([1, 3])
SHAPE = (2, PAGES * PAGE, HEADS, WIDTH)
EVERY_OTHER = slice(None, None, 2)


def pool() -> Tensor:
    return torch.randn(SHAPE)


def rows(count: int = 2) -> Tensor:
    return torch.randn(count, HEADS, WIDTH)


def stacked(kv: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    kv[0].index_copy_(0, at, 2 * k)
    kv[1].index_copy_(0, at, v + 1)
    return kv[0] * kv[1]


def stacked_pages(kv: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """Pages of keys beside pages of values."""
    kv = kv.view(PAGES, 2, PAGE, HEADS, WIDTH)
    kv[:, 0][at // PAGE, at % PAGE] = 2 * k
    kv[:, 1][at // PAGE, at % PAGE] = v + 1
    return kv[:, 0] * kv[:, 1]


def stacked_heads(kv: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """The indexed dim is not the first of the part."""
    kv = kv.view(2, HEADS, PAGES * PAGE, WIDTH)
    kv[0].index_copy_(1, at, 2 * k.transpose(0, 1))
    kv[1].index_copy_(1, at, v.transpose(0, 1) + 1)
    return kv[0] * kv[1]


def interleaved(kv: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """Keys and values in turn, in views that overlap, as continuous batching of transformers has them."""
    flat = kv.view(-1, HEADS, WIDTH)
    keys, values = flat[0:], flat[PAGE:]
    keys.index_copy_(0, at, 2 * k)
    values.index_copy_(0, at, v + 1)
    return keys.index_select(0, at) * values.index_select(0, at)


def twice(kv: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    flat = kv.view(-1, HEADS, WIDTH)
    flat.index_copy_(0, at, 2 * k)
    flat.index_copy_(0, at + PAGE, v + 1)
    return flat.index_select(0, at) * flat.index_select(0, at + PAGE)


def same_rows_twice(kv: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """The second update overwrites the first, in the reverse order."""
    kv[0].index_copy_(0, at, 2 * k)
    kv[0].index_copy_(0, 4 - at, v + 1)
    return kv[0] * 2


def read_between(kv: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """What is read between two updates is in no later version."""
    kv[0].index_copy_(0, at, 2 * k)
    old = kv.sum(1)
    kv[0].index_copy_(0, at, v + 1)
    return old + kv.sum(1)


SPELLINGS = [stacked, stacked_pages, stacked_heads, interleaved, twice, same_rows_twice, read_between]


@pytest.mark.parametrize("function", SPELLINGS, ids=lambda f: f.__name__)
def test_updates_in_place(function: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    check(backend_for(Config(strict=True)), function, pool(), rows(), rows(), ROWS)
    (result,) = compiled_graphs()
    assert {step.kind for step in result.program.steps} == {"kernel"}, "nothing is copied"
    (kv,) = (i for i, v in enumerate(result.graph.inputs) if v.tensor.shape == SHAPE)
    assert result.graph.written_inputs == [kv]


def views_apart(keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys.index_copy_(0, ROWS, k * 2)
    values.index_copy_(0, ROWS, v + 1)
    keys, values = (x.index_select(0, torch.arange(6)).transpose(0, 1) for x in (keys, values))
    return F.scaled_dot_product_attention(keys, keys, values)


@pytest.mark.parametrize("apart", [0, PAGE, 1, PAGES * PAGE])
def test_inputs_that_overlap(apart: int) -> None:
    """AOTAutograd makes both of one flat tensor; rows that are written twice have the second value."""
    torch._dynamo.reset()
    overlapping(apart, torch.compile(views_apart, backend=backend_for(Config(strict=True))))
    (result,) = compiled_graphs()
    assert {step.kind for step in result.program.steps} == {"kernel"}


def test_inputs_that_overlap_in_unknown_places() -> None:
    """The second update is then a copy, which follows the first."""
    torch._dynamo.reset()
    compiled = torch.compile(views_apart, backend=backend_for(Config(strict=True)))
    for apart in (PAGE, 1, 7):
        overlapping(apart, compiled)
    assert any(n.is_op("opaque") for n in compiled_graphs()[-1].graph.nodes)


def overlapping(apart: int, compiled: Callable[..., Tensor]) -> None:
    memory, k, v = torch.randn(2 * PAGES * PAGE, HEADS, WIDTH), rows(), rows()
    found = list[Tensor]()
    for run in (views_apart, compiled):
        own = memory.clone()
        with torch.no_grad():
            found += [run(own[0:], own[apart:], k, v), own]
    torch.testing.assert_close(found[2:], found[:2])


@pytest.mark.parametrize("at", [-1, PAGES * PAGE, PAGES * PAGE + 1, -PAGES * PAGE - 1])
@pytest.mark.parametrize("function", [stacked, stacked_pages, stacked_heads], ids=lambda f: f.__name__)
def test_rows_beyond_a_part(function: Callable[..., Tensor], at: int) -> None:
    """An index beyond a part is an error, although it is within the whole; nothing is stored before it is noticed."""
    given = pool(), rows(), rows(), torch.tensor([0, at])
    eager = given[0].clone()
    compiled = torch.compile(function, backend=backend_for(Config(strict=True)))
    try:
        want = function(eager, *given[1:])
    except (IndexError, RuntimeError):
        kept = given[0].clone()
        with pytest.raises(IndexError, match="out of bounds"):
            compiled(*given)
        assert torch.equal(given[0], kept)
    else:
        torch.testing.assert_close([compiled(*given), given[0]], [want, eager])


class Drawn:
    """A random program that reads and updates one tensor through views."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.steps = [(draw.choice(READS), draw.choice(PARTS), draw.choice(UPDATES), draw.random()) for _ in range(4)]

    def __call__(self, kv: Tensor, k: Tensor, at: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        kept: list[Tensor] = []
        for read, part, update, chance in self.steps:
            taken = part(kv)
            before = read(taken)
            update(taken, k + 1, at)
            if chance < 0.3:
                found.append(read(kv[1]) * 2)
            (kept if chance < 0.6 else found).append(before)
        return [*found, *(x + 1 for x in kept)]


def put(x: Tensor, k: Tensor, at: Tensor) -> None:
    x[at] = k


def put_slice(x: Tensor, k: Tensor, at: Tensor) -> None:
    x[1:3] = k


def add(x: Tensor, k: Tensor, at: Tensor) -> None:
    x.add_(1)


READS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * 2, lambda x: x.sum(0), lambda x: x[1:3].transpose(0, 1), lambda x: x.index_select(0, ROWS),
    lambda x: x.flatten()[::3] + 1, lambda x: x.clone(),
]  # fmt: skip
PARTS: list[Callable[[Tensor], Tensor]] = [
    lambda kv: kv[0], lambda kv: kv[1], lambda kv: kv.view(-1, HEADS, WIDTH), lambda kv: kv[0, 2:10],
    lambda kv: kv.view(-1, HEADS, WIDTH)[PAGE:], lambda kv: kv.view(PAGES, 2, PAGE, HEADS, WIDTH)[:, 1, 0],
    lambda kv: kv[1].view(-1, HEADS, WIDTH)[4:9], lambda kv: kv[0][::2],
]  # fmt: skip
UPDATES: list[Callable[[Tensor, Tensor, Tensor], object]] = [
    lambda x, k, at: x.index_copy_(0, at, k), lambda x, k, at: x.index_copy_(0, at, k * 2), put, put_slice, add,
]  # fmt: skip


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(n, marks=pytest.mark.thorough) for n in range(5, 200))])
def test_programs_of_reads_and_updates(seed: int) -> None:
    torch.manual_seed(seed)
    torch._dynamo.reset()
    check(backend_for(Config(strict=True)), Drawn(seed), pool(), rows(), ROWS)


def set_and_added(kv: Tensor, k: Tensor, at: Tensor) -> Tensor:
    kv[at, at % PAGE] = 2 * k
    kv.index_put_((at % PAGES, at), k, accumulate=True)
    return kv[at, at % PAGE] + 1


def set_in_all_and_in_part(kv: Tensor, k: Tensor, at: Tensor) -> Tensor:
    kv[:, :, at % HEADS, at] = 1
    kv[0, at, at % HEADS] = k[:, 0]
    return kv[at] * 2


def copied_to_rows_and_read(kv: Tensor, k: Tensor, at: Tensor) -> Tensor:
    old = kv * 2
    kv.flatten(0, 1).index_copy_(0, at, k)
    kv[at, at % PAGE] = old[at, 0]
    return kv + 1


@pytest.mark.parametrize("function", [set_and_added, set_in_all_and_in_part, copied_to_rows_and_read])
@pytest.mark.parametrize(
    "part", [(..., slice(WIDTH, None)), (..., slice(None, None, 2)), (slice(None, None, 2),)], ids=str
)
def test_versions_of_a_part_of_memory_lie_in_it(function: Callable[..., Tensor], part: tuple[slice, ...]) -> None:
    wide = (1, 2) if part[0] is ... else (2, 1)
    whole = torch.randn(PAGES * wide[0], PAGE, HEADS, WIDTH * wide[1])
    eager, inputs = whole.clone(), (rows(), ROWS)
    expected = function(eager[part], *inputs)
    with torch.no_grad():
        found = torch.compile(function, backend=backend_for(Config(strict=True)))(whole[part], *inputs)
    torch.testing.assert_close([found, whole], [expected, eager])


@pytest.mark.parametrize("late", [False, True])
def test_a_version_that_is_read_late_is_not_overwritten(late: bool) -> None:
    """In graphs of Dynamo, reads come before; in those of others, they need not."""

    def function(kv: Tensor, k: Tensor, at: Tensor) -> Tensor:
        before = kv.sum(1)
        new = kv.index_copy(0, at, k)
        after = kv.sum(1) if late else before
        kv.copy_(new)
        return before * after

    graph = make_fx(function)(pool()[0], rows(), ROWS).graph
    assert len(list(updates_in_place(graph))) == (not late)


def test_an_order_that_forgets_the_readers_of_a_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def reads_late(kv: Tensor, k: Tensor, at: Tensor) -> Tensor:
        old = kv[0] * 2
        kv[0].index_copy_(0, at, k)
        middle = kv[0] * 3
        kv[0].index_copy_(0, at, k + 1)
        return old + middle

    monkeypatch.setattr("fusec.ir.graph.Graph.order_of_effects", lambda graph: {})
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="read after its storage was written"):
        check(backend_for(Config(strict=True)), reads_late, pool(), rows(), ROWS)
