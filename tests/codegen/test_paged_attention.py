"""Attention over pages of a pool: read through the table in one kernel, whatever its spelling, and never gathered."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.analysis.memory import moved_bytes
from fusec.codegen.cpp.schedules import attention
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.kernel import Constant, Dot, walk
from fusec.codegen.triton.check import check_region
from fusec.compiler import Compiled
from fusec.dynamo import backend, compiled_graphs
from fusec.ir.types import BF16, F16, F32, I8, I64, DType
from fusec.loops.indexing import DynamicIndex
from fusec.reference.contract import compare_outputs
from tests.codegen.test_attention import compiled, kernels, passes
from tests.codegen.triton_regions import regions_of
from tests.combinations import named, rotating

PAGES, PAGE, HEADS, WIDTH, SHARED = 20, 16, 2, 32, 4
DTYPES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
Spelling = Callable[..., Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    seen = (torch.arange(k.shape[2]) < lengths[:, None])[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def pages(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (keys, values))
    return attend(q, k, v, lengths)


def pages_of_heads(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """The pools are [pages, heads, page, width] in memory."""
    k, v = (pool.transpose(1, 2)[table].transpose(1, 2).flatten(2, 3) for pool in (keys, values))
    return attend(q, k, v, lengths)


def rows(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    places = (table[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
    k, v = (pool.reshape(-1, HEADS, WIDTH)[places].transpose(1, 2) for pool in (keys, values))
    return attend(q, k, v, lengths)


def selected_rows(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    places = (table[:, :, None] * PAGE + torch.arange(PAGE)).flatten()
    found = (pool.reshape(-1, HEADS, WIDTH).index_select(0, places) for pool in (keys, values))
    k, v = (x.unflatten(0, (table.shape[0], -1)).transpose(1, 2) for x in found)
    return attend(q, k, v, lengths)


def gathered_rows(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    places = (table[:, :, None] * PAGE + torch.arange(PAGE)).flatten()[:, None, None].expand(-1, HEADS, WIDTH)
    found = (pool.reshape(-1, HEADS, WIDTH).gather(0, places) for pool in (keys, values))
    k, v = (x.unflatten(0, (table.shape[0], -1)).transpose(1, 2) for x in found)
    return attend(q, k, v, lengths)


def repeated_heads(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """The heads of keys are repeated by views and a copy, as in transformers."""
    found = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (keys, values))
    k, v = (x[:, :, None].expand(-1, -1, SHARED, -1, -1).reshape(len(q), HEADS * SHARED, -1, WIDTH) for x in found)
    return attend(q, k, v, lengths)


SPELLINGS = [pages, pages_of_heads, rows, selected_rows, gathered_rows, repeated_heads]


def sample(queries: int, dtype: torch.dtype = torch.float32, spelling: Spelling = pages) -> tuple[Tensor, ...]:
    """Queries, pools, a table in which two sequences share a page, and lengths."""
    torch.manual_seed(queries)
    q = torch.randn(3, HEADS * SHARED, queries, WIDTH).to(dtype)
    pools = (torch.randn(PAGES, PAGE, HEADS, WIDTH).to(dtype) for _ in range(2))
    if spelling is pages_of_heads:
        pools = (pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in pools)
    table = torch.randint(0, PAGES, (3, 7))
    table[1, :2] = table[0, :2]
    return q, *pools, table, torch.tensor([7 * PAGE, 1, 50])


def is_read_through_the_table(result: Compiled) -> bool:
    labels = [*kernels(result)]
    return {step.kind for step in result.program.steps} == {"kernel"} and (
        labels.count("attention") == 1 and not {"take", "gather", "reshape", "permute"} & set(labels)
    )


@pytest.mark.parametrize(
    ("spelling", "queries", "dtype"),
    rotating(SPELLINGS, (1, 5, 40), (torch.float32, torch.bfloat16, torch.float16)),
    ids=named,
)
def test_pages_are_read_in_the_kernel(spelling: Spelling, queries: int, dtype: torch.dtype) -> None:
    inputs = sample(queries, dtype, spelling)
    result = compiled(spelling, inputs)
    assert is_read_through_the_table(result) and passes(spelling, result, inputs)
    if queries == 1:
        assert types_of_rows(result) == [DTYPES[dtype]] * 2


def types_of_rows(result: Compiled) -> list[DType]:
    """Return the types of the operands of attention's products that are rows of memory, listed by their numbers."""
    (kernel,) = (k for k in result.program.kernels.values() if k.kind == "attention")
    types = {buffer.name: buffer.dtype for buffer in kernel.buffers if buffer.role == "input"}
    products = [s for s in walk(kernel.body) if isinstance(s, Dot)]
    return [types[s.right.buffer] for s in products if s.listed]


def test_a_neighbouring_page_is_found() -> None:
    inputs = sample(5)
    result = compiled(pages, inputs)
    q, keys, values, table, lengths = inputs
    for wrong in ((q, keys, values, (table + 1) % PAGES, lengths), (q, keys, values, table, lengths.roll(1))):
        got, want, exact = result.program(list(wrong))[0], pages(*inputs), pages(*_doubled(inputs))
        assert not compare_outputs(want, got, exact).passed


@pytest.mark.parametrize(("spelling", "queries"), rotating((pages, rows), (1, 40)), ids=named)
def test_an_emitter_that_takes_the_next_page_is_found(
    spelling: Spelling, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Emitter.dynamic_index

    def following(self: Emitter, index: DynamicIndex) -> sympy.Expr:
        value = self.compute("add", str(found(self, index)), Constant(1), dtype=I64)
        return self.within(self.compute("minimum", value, Constant(int(index.length) - 1), dtype=I64), index.length)

    monkeypatch.setattr(Emitter, "dynamic_index", following)
    inputs = sample(queries)
    assert not passes(spelling, compiled(spelling, inputs), inputs)


@pytest.mark.parametrize(
    ("shared", "width", "count"), rotating((1, 4, 16), (64, 40, 20), (256, 257, 288, 289, 700)), ids=str
)
def test_few_queries_multiply_rows_where_they_are(shared: int, width: int, count: int) -> None:
    """Whatever their width and number: nothing is copied, and the list of rows ends anywhere in a block."""
    torch.manual_seed(count)
    q, keys = torch.randn(2, HEADS * shared, 1, width), torch.randn(800, HEADS, width)
    values, places = torch.randn(800, HEADS, width), torch.randint(0, 800, (2, count))

    def of_rows(q: Tensor, keys: Tensor, values: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
        return attend(q, *(pool[places].transpose(1, 2) for pool in (keys, values)), lengths)

    inputs = (q, keys, values, places, torch.tensor([count, count - 1]))
    result = compiled(of_rows, inputs)
    (kernel,) = (k for k in result.program.kernels.values() if k.kind == "attention")
    assert types_of_rows(result) == [F32] * 2
    assert passes(of_rows, result, inputs) and unproven_accesses(kernel) == []


@pytest.mark.parametrize("spelling", [pages, rows])
@pytest.mark.parametrize("fault", ["the row before", "the rows ahead"])
def test_a_list_of_other_rows_is_found(fault: str, spelling: Spelling, monkeypatch: pytest.MonkeyPatch) -> None:
    number = attention._AlongKeys._number

    def other(self: Any, *args: Any) -> str:
        found = number(self, *args)
        if fault == "the rows ahead":  # which are listed as 0
            return str(self.emitter.compute("minimum", found, Constant(0), dtype=I64))
        before = self.emitter.compute("sub", found, Constant(1), dtype=I64)
        return str(self.emitter.compute("maximum", before, Constant(0), dtype=I64))

    monkeypatch.setattr(attention._AlongKeys, "_number", other)
    inputs = sample(1)
    assert not passes(spelling, compiled(spelling, inputs), inputs)


def test_as_many_rows_are_listed_ahead_as_are_prefetched() -> None:
    text = Path(attention.__file__).parents[1].joinpath("panel.h").read_text(encoding="utf-8")
    assert f"int ahead = {attention._AHEAD};" in text


def test_a_lookup_of_each_column_is_no_row() -> None:
    """Columns of keys and values in another order: the index varies along the width."""

    def permuted(q: Tensor, k: Tensor, v: Tensor, order: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[..., order], v[..., order], enable_gqa=True)

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, length, WIDTH) for n, length in ((8, 1), (2, 50), (2, 50)))
    inputs = (q, k, v, torch.randperm(WIDTH))
    result = compiled(permuted, inputs)
    assert [*kernels(result)] == ["attention"] and passes(permuted, result, inputs)


def heads_of(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    sequence = torch.arange(len(q))[:, None]
    return F.scaled_dot_product_attention(q, k[sequence, heads], v[sequence, 3 - heads])


def last_heads(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    """One head of keys and one of values in the same projection, as Falcon has them."""
    both = torch.stack((k, v), 2)
    k, v = (both[:, :, [i]].broadcast_to(both.shape).flatten(1, 2) for i in (-2, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("spelling", [heads_of, last_heads])
def test_heads_are_looked_up_for_few_queries(spelling: Spelling) -> None:
    """One index for all keys of a head."""
    count = 3 if spelling is heads_of else 8
    q, (k, v) = torch.randn(2, count, 4, WIDTH), torch.randn(2, 2, 4, 40, WIDTH)
    inputs = (q, k, v, torch.tensor([[3, 0, 1], [1, 2, 0]]))
    result = compiled(spelling, inputs)
    assert {step.kind for step in result.program.steps} == {"kernel"} and passes(spelling, result, inputs)


def _doubled(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in inputs]


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("queries", [1, 40])
def test_bytes_are_those_of_contiguous_keys_and_the_index(queries: int) -> None:
    """The rows that are read count, not the pool, which is larger here."""
    q, keys, values, table, lengths = sample(queries)
    keys, values = (torch.cat([pool, pool]) for pool in (keys, values))
    k, v = (pool[table].flatten(1, 2).transpose(1, 2).contiguous() for pool in (keys, values))
    paged, contiguous = (
        sum(moved_bytes(n) for n in compiled(f, inputs).graph.nodes if n.attributes.get("label") == "attention")
        for f, inputs in ((pages, (q, keys, values, table, lengths)), (attend, (q, k, v, lengths)))
    )
    assert paged == contiguous + table.nbytes


@pytest.mark.parametrize("queries", [1, 40])
def test_codes_in_pages_are_unpacked_in_the_kernel(queries: int) -> None:
    def unpacked(q: Tensor, keys: Tensor, values: Tensor, scales: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        found = (pool[table].to(q.dtype) * scales[table][..., None] for pool in (keys, values))
        k, v = (x.flatten(1, 2).transpose(1, 2) for x in found)
        return attend(q, k, v, lengths)

    q, keys, values, table, lengths = sample(queries)
    keys, values = ((pool * 30).to(torch.int8) for pool in (keys, values))
    inputs = (q, keys, values, torch.rand(PAGES, PAGE, HEADS) / 30, table, lengths)
    result = compiled(unpacked, inputs)
    assert is_read_through_the_table(result) and passes(unpacked, result, inputs)
    if queries == 1:
        assert types_of_rows(result) == [I8] * 2, "scales are multiplied behind the products"


@pytest.mark.parametrize("queries", [1, 40])
def test_pages_behind_the_last_key_are_not_read(queries: int) -> None:
    """The loop over the keys, which are numbered across pages, ends at the length."""
    q, keys, values, _, lengths = sample(queries)
    table = torch.arange(7).expand(3, -1)
    lengths = torch.tensor([60, 1, 64])
    result = compiled(pages, (q, keys, values, table, lengths))
    want = pages(q, keys, values, table, lengths)
    keys[4:] = values[4:] = torch.nan
    torch.testing.assert_close(result.program([q, keys, values, table, lengths])[0], want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("queries", [1, 40])
def test_a_page_that_does_not_exist(queries: int) -> None:
    """As in eager: a negative page counts from the end, and any other is an IndexError before anything is stored."""
    q, keys, values, table, _ = sample(queries)
    table[2, 3:] = -1  # nothing is stored there: the sequence has fewer keys
    inputs = (q, keys, values, table, torch.tensor([7 * PAGE, 1, 40]))
    result = compiled(pages, inputs)
    assert passes(pages, result, inputs)
    for wrong in (PAGES, -PAGES - 1):
        table[2, 6] = wrong
        with pytest.raises(IndexError, match="out of"):
            pages(*inputs)
        with pytest.raises(IndexError, match="out of bounds"):
            result.program(list(inputs))


@pytest.mark.parametrize("queries", [1, 40])
def test_a_mask_depends_on_the_place_in_a_page(queries: int) -> None:
    """Its index is a remainder of the key's number."""

    def filled(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, filled: Tensor) -> Tensor:
        k, v = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (keys, values))
        seen = (torch.arange(PAGE) < filled[..., None]).flatten(1)[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    q, keys, values, table, _ = sample(queries)
    inputs = (q, keys, values, table, torch.randint(0, PAGE, table.shape))
    result = compiled(filled, inputs)
    assert is_read_through_the_table(result) and passes(filled, result, inputs)


@pytest.mark.parametrize(("spelling", "queries"), rotating((pages, pages_of_heads, rows), (1, 40)), ids=named)
def test_pages_are_read_in_the_kernel_of_a_gpu(spelling: Spelling, queries: int) -> None:
    found = [r for r in regions_of(spelling, sample(queries)) if "attention" in r.attributes["label"]]
    (outcome,) = (check_region(region, chips=()) for region in found)
    assert outcome.kernel.kind == "attention" and outcome.ok, outcome


@pytest.mark.parametrize("count", [12, pytest.param(250, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("queries", "dtype"), rotating((1, 3), (torch.bfloat16, torch.float32)), ids=str)
def test_random_tables_are_padded_batches(dtype: torch.dtype, queries: int, count: int) -> None:
    """Sequences of up to 300 keys in random pages, some of them shared or missing, in one compilation."""
    torch._dynamo.reset()
    fast = torch.compile(pages, backend=backend, options={"strict": True})
    seeded = random.Random(queries)
    for _ in range(count):
        batch, pool, most = seeded.randint(2, 5), seeded.randint(2, 40), seeded.randint(2, 19)
        q = torch.randn(batch, HEADS * SHARED, queries, WIDTH).to(dtype)
        keys, values = (torch.randn(pool, PAGE, HEADS, WIDTH).to(dtype) for _ in range(2))
        lengths = torch.tensor([seeded.choice([0, 1, PAGE, seeded.randint(0, min(300, most * PAGE))]) for _ in q])
        table = torch.randint(0, pool, (batch, most))
        table[torch.arange(most) * PAGE >= lengths[:, None]] = -1
        for x, dims in ((q, [0]), (keys, [0]), (values, [0]), (table, [0, 1]), (lengths, [0])):
            for dim in dims:
                torch._dynamo.maybe_mark_dynamic(x, dim)
        with torch.no_grad():
            got, padded = fast(q, keys, values, table, lengths), torch.zeros(2, batch, most * PAGE, HEADS, WIDTH)
            for sequence, length in enumerate(lengths.tolist()):
                for place in range(length):
                    page, slot = table[sequence, place // PAGE], place % PAGE
                    padded[0, sequence, place], padded[1, sequence, place] = keys[page, slot], values[page, slot]
            k, v = (x.transpose(1, 2) for x in padded)
            want, exact = (
                attend(q, k.to(dtype), v.to(dtype), lengths),
                attend(q.double(), k.double(), v.double(), lengths),
            )
        assert compare_outputs(want, got, exact).passed, (lengths, table)
    (result,) = compiled_graphs()
    assert is_read_through_the_table(result)
