"""New keys and values are stored in the pages of a pool by the kernel that computes them, and then read from there."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusec.analysis.memory import moved_bytes
from fusec.compiler import Compiled
from fusec.dynamo import backend, compiled_graphs
from fusec.reference.contract import compare_outputs
from tests.codegen.test_attention import kernels
from tests.codegen.test_paged_attention import HEADS, PAGE, PAGES, SHARED, WIDTH, attend, pages
from tests.combinations import named, rotating

Store = Callable[[Tensor, Tensor, Tensor], object]
"""Stores rows [tokens, heads, width] at slots, counted over all pages, of a pool [pages, page, heads, width]."""


def copy_to_rows(pool: Tensor, slots: Tensor, rows: Tensor) -> object:
    return pool.view(-1, HEADS, WIDTH).index_copy_(0, slots, rows)


def set_rows(pool: Tensor, slots: Tensor, rows: Tensor) -> object:
    pool.view(-1, HEADS, WIDTH)[slots] = rows
    return None


def set_slots_of_pages(pool: Tensor, slots: Tensor, rows: Tensor) -> object:
    pool[slots // PAGE, slots % PAGE] = rows
    return None


def put_in_slots_of_pages(pool: Tensor, slots: Tensor, rows: Tensor) -> object:
    return pool.index_put_((slots.div(PAGE, rounding_mode="floor"), slots % PAGE), rows)


STORES = [copy_to_rows, set_rows, set_slots_of_pages, put_in_slots_of_pages]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def step(store: Store) -> Callable[..., Tensor]:
    """Attention of new tokens, whose keys and values are stored first."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, angles: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor,
        lengths: Tensor,
    ) -> Tensor:  # fmt: skip
        q, k = (rotated(x, *angles) for x in (q, k))
        for pool, new in ((keys, k), (values, v)):
            store(pool, slots, new.transpose(1, 2).reshape(-1, HEADS, WIDTH))
        return pages(q, keys, values, table, lengths)

    return attention


def sample(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Pages are not shared here: each new row has a slot of its own."""
    torch.manual_seed(tokens)
    q, k, v = (torch.randn(3, n, tokens, WIDTH).to(dtype) for n in (HEADS * SHARED, HEADS, HEADS))
    angles, pools = torch.randn(2, tokens, WIDTH).to(dtype), torch.randn(2, PAGES, PAGE, HEADS, WIDTH).to(dtype)
    table, lengths = torch.randperm(PAGES)[:18].reshape(3, 6), torch.tensor([6 * PAGE, tokens, 50])
    places = lengths[:, None] - tokens + torch.arange(tokens)
    slots = (table.gather(1, places // PAGE) * PAGE + places % PAGE).flatten()
    return [q, k, v, angles, pools[0].clone(), pools[1].clone(), slots, table, lengths]


def copied(inputs: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in inputs]


def exact(inputs: list[Tensor]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x.clone() for x in inputs]


def run(function: Callable[..., object], inputs: list[Tensor]) -> tuple[object, Compiled]:
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(function, backend=backend, options={"strict": True})(*inputs)
    (result,) = compiled_graphs()
    return found, result


@pytest.mark.parametrize(
    ("store", "tokens", "dtype"),
    rotating(STORES, (1, 20), (torch.float32, torch.bfloat16, torch.float16)),
    ids=named,
)
def test_new_rows_are_stored_where_they_are_computed(store: Store, tokens: int, dtype: torch.dtype) -> None:
    inputs = sample(tokens, dtype)
    eager, real = copied(inputs), exact(inputs)
    got, result = run(step(store), inputs)
    assert [s.kind for s in result.program.steps] == ["kernel"] * 2, "one stores, and one attends"
    assert not {"take", "write", "reshape"} & set(kernels(result))
    want, reference = step(store)(*eager), step(store)(*real)
    assert compare_outputs(want, got, reference).passed
    for i in (4, 5):
        assert compare_outputs(eager[i], inputs[i], real[i]).passed
    untouched = torch.ones(PAGES * PAGE, dtype=torch.bool).index_fill(0, inputs[6], False)
    for before, after in zip(sample(tokens, dtype)[4:6], inputs[4:6], strict=True):
        assert torch.equal(before.flatten(0, 1)[untouched], after.flatten(0, 1)[untouched])


@pytest.mark.parametrize("tokens", [1, 20])
def test_pages_whose_heads_are_outside(tokens: int) -> None:
    """The pools are [pages, heads, page, width] in memory, and a new row has a place in each head's part."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, lengths: Tensor
    ) -> Tensor:
        for pool, new in ((keys, k), (values, v)):
            pool[slots // PAGE, :, slots % PAGE] = new.transpose(1, 2).reshape(-1, HEADS, WIDTH) * 2
        found = (pool.transpose(1, 2)[table].flatten(1, 2).transpose(1, 2) for pool in (keys, values))
        return attend(q, *found, lengths)

    q, k, v, _, keys, values, *rest = sample(tokens)
    keys, values = (pool.transpose(1, 2).contiguous() for pool in (keys, values))
    inputs = [q, k, v, keys, values, *rest]
    eager, real = copied(inputs), exact(inputs)
    got, result = run(attention, inputs)
    assert [s.kind for s in result.program.steps] == ["kernel"] * 2
    assert compare_outputs(attention(*eager), got, attention(*real)).passed
    assert all(map(torch.equal, inputs[3:5], eager[3:5]))


@pytest.mark.parametrize("store", STORES, ids=lambda f: f.__name__)
def test_bytes_are_those_of_the_new_rows(store: Store) -> None:
    inputs = sample(1)
    _, result = run(step(store), inputs)
    (stored,) = (n for n in result.graph.nodes if n.writes)
    _, k, v, angles, *_, slots, _, _ = inputs
    assert moved_bytes(stored) == 2 * (k.nbytes + v.nbytes) + angles.nbytes + slots.nbytes


@pytest.mark.parametrize(("store", "slot"), rotating(STORES, (-1, PAGES * PAGE)), ids=named)
def test_a_slot_that_does_not_exist(store: Store, slot: int) -> None:
    """A negative index counts from the end, except in index_copy; nothing is stored before an IndexError."""
    inputs = sample(1)
    inputs[6] = torch.cat([torch.tensor([slot]), inputs[6][1:]])
    kept, eager = copied(inputs), copied(inputs)
    try:
        step(store)(*eager)
    except IndexError:
        with pytest.raises(IndexError, match="out of bounds"):
            run(step(store), inputs)
        assert all(map(torch.equal, inputs, kept))
    else:
        run(step(store), inputs)
        assert torch.equal(inputs[5], eager[5])


@pytest.mark.parametrize(("page", "slot"), [(0, PAGE), (0, -PAGE - 1), (PAGES, 0), (-PAGES - 1, 0)])
def test_an_index_is_checked_in_its_own_dim(page: int, slot: int) -> None:
    """The slot behind a page is no slot of the next one."""

    def store(pool: Tensor, numbers: Tensor, slots: Tensor, rows: Tensor) -> None:
        pool[numbers, slots] = rows * 2

    def look_up(pool: Tensor, numbers: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        return pool[numbers, slots] + rows

    rows, numbers, slots = torch.randn(2, HEADS, WIDTH), torch.tensor([1, page]), torch.tensor([3, slot])
    for function in (store, look_up):
        pool = torch.zeros(PAGES, PAGE, HEADS, WIDTH)
        with pytest.raises(IndexError):
            function(pool.clone(), numbers, slots, rows)
        with pytest.raises(IndexError, match="out of bounds"):
            run(function, [pool, numbers, slots, rows])
        assert not pool.any()
        valid = [torch.randn(PAGES, PAGE, HEADS, WIDTH), torch.tensor([1, -2]), torch.tensor([-3, 5]), rows]
        eager = copied(valid)
        (got, result), want = run(function, valid), function(*eager)
        assert torch.equal(valid[0], eager[0]) and (want is None or torch.equal(got, want))
        assert [s.kind for s in result.program.steps] == ["kernel"]


def read_before(pool: Tensor, slots: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    flat = pool.view(-1, HEADS, WIDTH)
    old = flat[slots] * 2
    flat[slots] = rows.sin()
    return old, flat[slots] + 1


def returned(pool: Tensor, slots: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    flat = pool.view(-1, HEADS, WIDTH)
    flat.index_copy_(0, slots, rows.sin())
    return flat, pool[1] + 1


def twice(pool: Tensor, slots: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    flat = pool.view(-1, HEADS, WIDTH)
    flat[slots] = rows.sin()
    between = pool.sum((1, 2, 3))
    flat[slots + 1] = rows.cos()
    return between, pool.sum((1, 2, 3))


def moved(pool: Tensor, slots: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    flat = pool.view(-1, HEADS, WIDTH)
    flat[slots] = flat[slots + 1] + rows
    return (pool.amax((1, 2, 3)),)


def other_view(pool: Tensor, slots: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """What is written as rows was viewed as pages before, and is read so afterwards."""
    seen = pool.flatten(1)
    before = seen.sum(1)
    pool.view(-1, HEADS, WIDTH)[slots] = rows.sin()
    return before, seen.sum(1)


@pytest.mark.parametrize("function", [read_before, returned, twice, moved, other_view], ids=lambda f: f.__name__)
def test_reads_of_the_old_and_of_the_new_rows(function: Callable[..., tuple[Tensor, ...]]) -> None:
    inputs = [torch.randn(PAGES, PAGE, HEADS, WIDTH), torch.tensor([5, 30, 17]), torch.randn(3, HEADS, WIDTH)]
    eager = copied(inputs)
    got, _ = run(function, inputs)
    for a, b in zip(got, function(*eager), strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(inputs[0], eager[0])
    if function is returned:
        assert got[0].data_ptr() == inputs[0].data_ptr()  # type: ignore[index]


@pytest.mark.parametrize("store", [set_slots_of_pages, put_in_slots_of_pages], ids=lambda f: f.__name__)
def test_pages_that_are_not_one_after_another(store: Store) -> None:
    """Every other page of a pool, pages whose heads are outside, part of heads or rows: none is stored elsewhere."""
    rows, slots = torch.randn(3, HEADS, WIDTH), torch.tensor([5, 30, 17])
    for whole, pool in (
        (x := torch.zeros(PAGES * 2, PAGE, HEADS, WIDTH), x[::2]),
        (x := torch.zeros(PAGES, HEADS, PAGE, WIDTH), x.transpose(1, 2)),
        (x := torch.zeros(PAGES, PAGE, HEADS * 2, WIDTH), x[:, :, HEADS:]),
        (x := torch.zeros(PAGES, PAGE, HEADS, WIDTH * 2), x[..., ::2]),
    ):
        run(lambda p, s, r: store(p, s, r * 2), [pool, slots, rows])
        found = pool[slots // PAGE, slots % PAGE]
        assert torch.equal(found, rows * 2) and whole.count_nonzero() == rows.numel()


def test_a_page_of_keys_that_is_not_written_is_found() -> None:
    """The comparison sees a single row that is missing."""
    inputs = sample(1)
    want = step(set_rows)(*copied(inputs))
    reference = step(set_rows)(*exact(inputs))
    missing = copied(inputs)
    wrong = attend(rotated(missing[0], *missing[3]), *_contiguous(missing), missing[8])
    assert not compare_outputs(want, wrong, reference).passed


def _contiguous(inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    k, v = (pool[inputs[7]].flatten(1, 2).transpose(1, 2) for pool in inputs[4:6])
    return k, v
