"""Sequences packed one after another: blocks of keys that a mask hides from all queries of a block are left out."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.codegen.cpp.schedules import attention
from fusec.codegen.cpp.schedules.blocked_attention import BlockedAttention
from fusec.codegen.cpp.target import CppTarget
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.compiler import Compiled
from fusec.dynamo import backend, compiled_graphs
from fusec.ir.types import BOOL
from fusec.reference.contract import compare_outputs
from tests.codegen.test_attention import compiled, kernels, passes
from tests.combinations import rotating

BLOCK = 64
"""Queries, and keys, of a block where there are many of both."""
LENGTHS = (100, 37, 200, 1, 64, 150)


def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype) if mask.is_floating_point() else mask)


def call_shared(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    mask = mask.to(q.dtype) if mask.is_floating_point() else mask
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], attn_mask=mask, enable_gqa=True)


def filled(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """The lowest number in place of a score."""
    scores = (q @ k.transpose(-1, -2) * 0.2).float()
    return scores.masked_fill(~seen, torch.finfo(torch.float32).min).softmax(-1).to(v.dtype) @ v


def added(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """The lowest number is added to a score, as older models do."""
    scores = (q @ k.transpose(-1, -2) * 0.2).float()
    lowest = torch.full((), torch.finfo(torch.float32).min)
    return (scores + torch.where(seen, torch.zeros(()), lowest)).softmax(-1).to(v.dtype) @ v


def boolean(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return seen


def infinite(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -math.inf)


def lowest(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


MASKS = {
    "bool": (call, boolean), "-inf": (call, infinite), "lowest": (call, lowest), "shared": (call_shared, lowest),
    "filled": (filled, boolean), "added": (added, boolean),
}  # fmt: skip


def numbers(lengths: tuple[int, ...]) -> Tensor:
    """The number of each token's sequence."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def diagonal(lengths: tuple[int, ...]) -> Tensor:
    """The mask of causal attention within each sequence."""
    sequence, places = numbers(lengths), torch.arange(sum(lengths))
    return (sequence[:, None] == sequence) & (places <= places[:, None])


def sample(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(keys)
    q, k, v = (torch.randn(1, 2, n, 32).to(dtype) for n in (queries, keys, keys))
    return q, k, v


def blocks_computed(result: Compiled, inputs: tuple[Tensor, ...], rows: int = BLOCK) -> int:
    """Count the pairs of a block of queries and one of keys whose products are computed.

    NaN among the values of a block reaches the queries whose weights multiply it, zeros too."""
    queries, keys = inputs[0].shape[2], inputs[2].shape[2]
    count = 0
    for first in range(0, keys, BLOCK):
        q, k, v, *rest = inputs
        v = v.clone()
        v[:, :, first : first + BLOCK] = math.nan
        reached = result.program([q, k, v, *rest])[0].isnan().any(-1)[0, 0]
        count += sum(bool(reached[i : i + rows].any()) for i in range(0, queries, rows))
    return count


def blocks_seen(seen: Tensor, rows: int = BLOCK) -> int:
    """Count the pairs of blocks of which a query sees a key."""
    return sum(bool(part.any()) for row in seen.split(rows) for part in row.split(BLOCK, 1))


@pytest.mark.parametrize(
    ("name", "dtype"), rotating(list(MASKS), (torch.float32, torch.bfloat16, torch.float16)), ids=str
)
def test_hidden_blocks_are_left_out(name: str, dtype: torch.dtype) -> None:
    function, made = MASKS[name]
    seen = diagonal(LENGTHS)
    inputs = (*sample(len(seen), len(seen), dtype), made(seen, dtype)[None, None])
    result = compiled(function, inputs)
    assert kernels(result) == ["attention"] and passes(function, result, inputs)
    assert blocks_computed(result, inputs) == blocks_seen(seen) == 21, "of 81"
    assert not any(map(unproven_accesses, result.program.kernels.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_single_tokens_beside_a_prompt_read_their_own_keys(name: str, dtype: torch.dtype) -> None:
    """Of a block of queries only those that see a block of keys are multiplied with it, in whole vectors."""
    function, made = MASKS[name]
    lengths = (*(1,) * 40, 90)
    own, others = numbers(lengths), numbers((*(70,) * 40, 90))
    seen = own[:, None] == others
    inputs = (*sample(len(own), len(others), dtype), made(seen, dtype)[None, None])
    result = compiled(function, inputs)
    assert passes(function, result, inputs)
    lanes = CppTarget().lanes
    assert blocks_computed(result, inputs, lanes) == blocks_seen(seen, lanes) < blocks_seen(seen) * BLOCK / lanes / 2
    seen[torch.arange(0, len(own), 7)] = False  # queries without a key see all, in some of the spellings
    inputs = (*inputs[:3], made(seen, dtype)[None, None])
    assert passes(function, result, inputs)


def of_numbers(q: Tensor, k: Tensor, v: Tensor, own: Tensor, others: Tensor) -> Tensor:
    places = torch.arange(k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(own[:, None] == others) & (places <= places[:, None]))


def of_ends(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, _: Tensor) -> Tensor:
    """From ``cu_seqlens``: a sequence's number is how many have ended before."""
    places = torch.arange(k.shape[2])
    number = (places[:, None] >= ends).sum(-1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=number[:, None] == number)


def of_positions(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, _: Tensor) -> Tensor:
    """A sequence begins where positions start again."""
    starts = torch.arange(k.shape[2]) - positions
    return F.scaled_dot_product_attention(q, k, v, attn_mask=starts[:, None] == starts)


@pytest.mark.parametrize("function", [of_numbers, of_ends, of_positions], ids=lambda f: f.__name__)
def test_masks_that_are_computed(function: Callable[..., Tensor]) -> None:
    """No mask is stored: sequences are told apart by a number of each token."""
    sequence, ends = numbers(LENGTHS), torch.tensor(LENGTHS).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    given = {of_numbers: sequence, of_ends: ends, of_positions: positions}[function]
    inputs = (*sample(len(sequence), len(sequence)), given, sequence)
    result = compiled(function, inputs)
    labels = kernels(result)
    assert labels[-1] == "attention" and passes(function, result, inputs)
    assert not any(v.tensor.numel == len(sequence) ** 2 for n in result.graph.nodes for v in n.results)
    seen = diagonal(LENGTHS) if function is of_numbers else sequence[:, None] == sequence
    assert blocks_computed(result, inputs) == blocks_seen(seen)


@pytest.mark.parametrize(("name", "queries"), rotating(list(MASKS), (70, 5, 1)), ids=str)
def test_a_query_that_sees_no_key(name: str, queries: int) -> None:
    """With the lowest number for each score, it averages all values; with -inf, it is 0, and nothing is read."""
    function, made = MASKS[name]
    seen = torch.zeros(queries, 300, dtype=torch.bool)
    seen[1:, 130:140] = True
    inputs = (*sample(queries, 300), made(seen, torch.float32)[None, None])
    result = compiled(function, inputs)
    assert passes(function, result, inputs)
    if made is not infinite and name != "bool":
        mean = inputs[2].mean(2)[:, :1] if function is call_shared else inputs[2].mean(2)
        torch.testing.assert_close(result.program(list(inputs))[0][:, :, 0], mean.expand(1, 2, 32), atol=1e-5, rtol=0)
    else:
        assert not result.program(list(inputs))[0][:, :, 0].any()


@pytest.mark.parametrize("queries", [1, 5, 70])
def test_lowest_numbers_and_infinities_in_one_mask(queries: int) -> None:
    """A query sees no key, and only some of its scores are -inf; blocks of -inf alone are not read."""
    mask = torch.full((queries, 300), torch.finfo(torch.float32).min)
    mask[:, 128:192] = mask[:, 250:] = -math.inf
    mask[queries // 2 :, 40] = 0
    inputs = (*sample(queries, 300), mask[None, None])
    result = compiled(call, inputs)
    assert passes(call, result, inputs)
    want = result.program(list(inputs))[0]
    for x in inputs[1:3]:
        x[:, :, 128:192] = math.nan
    assert queries < 17 or torch.equal(result.program(list(inputs))[0], want)


@pytest.mark.parametrize("cores", [2, 8])
def test_parts_of_the_keys_that_see_nothing(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are split: one part sees only lowest numbers, and what it averages has no weight in the end."""
    monkeypatch.setattr(CppTarget, "cores", cores)
    seen = torch.zeros(3, 2300, dtype=torch.bool)
    seen[1, 300:310] = seen[2, :10] = seen[2, 2000] = True
    q, k, v = sample(3, 2300)
    inputs = (q[:, :1], k[:, :1], v[:, :1], lowest(seen, torch.float32)[None, None])
    result = compiled(call, inputs)
    assert passes(call, result, inputs)


def test_a_mask_that_is_not_a_number() -> None:
    """NaN hides nothing: it is in the result, as in eager."""
    mask = lowest(diagonal(LENGTHS), torch.float32)
    mask[300, 20] = math.nan
    inputs = (*sample(len(mask), len(mask)), mask[None, None])
    result = compiled(call, inputs)
    got, want = result.program(list(inputs))[0], call(*inputs)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5, equal_nan=True)
    assert got[0, :, 300].isnan().all() and not got[0, :, :300].isnan().any()


def test_a_neighbours_mask_is_found() -> None:
    seen = diagonal(LENGTHS)
    inputs = (*sample(len(seen), len(seen)), seen[None, None])
    result = compiled(call, inputs)
    exact = call(*(x.double() if x.is_floating_point() else x for x in inputs))
    for wrong in (seen.roll(1, 0), seen.roll(1, 1), diagonal((*LENGTHS[1:], LENGTHS[0]))):
        got = result.program([*inputs[:3], wrong[None, None]])[0]
        assert not compare_outputs(call(*inputs), got, exact).passed


@pytest.mark.parametrize("fault", ["the same blocks again", "no second pass"])
def test_a_kernel_that_leaves_out_a_block_too_many_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = torch.zeros(70, 300, dtype=torch.bool)
    seen[1:, 130:140] = True
    inputs = (*sample(70, 300), lowest(seen, torch.float32)[None, None])
    sees_nothing = BlockedAttention._sees_nothing
    if fault == "no second pass":
        inverted = lambda self, least: self.emitter.compute("not", sees_nothing(self, least), dtype=BOOL)  # noqa: E731
        monkeypatch.setattr(BlockedAttention, "_sees_nothing", inverted)
    else:
        monkeypatch.setattr(attention._AlongQueries, "left_out", lambda self, masks: self.seen(masks))
    result = compiled(call, inputs)
    assert not passes(call, result, inputs)


@pytest.mark.parametrize("count", [12, pytest.param(250, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", ["bool", "lowest"])
def test_random_batches_are_padded_ones(name: str, count: int) -> None:
    """Sequences of up to 300 tokens, in one compilation: each is attended to alone, as in a padded batch."""
    torch._dynamo.reset()
    function, made = MASKS[name]
    fast = torch.compile(function, backend=backend, options={"strict": True})
    seeded = random.Random(count)
    for _ in range(count):
        lengths = tuple(seeded.choice([1, 2, 63, 64, 65, seeded.randint(1, 300)]) for _ in range(seeded.randint(2, 5)))
        q, k, v = sample(sum(lengths), sum(lengths))
        mask = made(diagonal(lengths), torch.float32)[None, None]
        for x, dims in ((q, [2]), (k, [2]), (v, [2]), (mask, [2, 3])):
            for dim in dims:
                torch._dynamo.maybe_mark_dynamic(x, dim)
        with torch.no_grad():
            got = fast(q, k, v, mask)
            parts = list(zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True))
            want = torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], 2)
            exact = torch.cat(
                [F.scaled_dot_product_attention(*(x.double() for x in part), is_causal=True) for part in parts], 2
            )
        assert compare_outputs(want, got, exact).passed, lengths
    (result,) = compiled_graphs()
    assert kernels(result) == ["attention"]
