"""Attention over caches: hidden blocks are not read, keys are dealt out where heads are few, lengths may grow."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental import _config as config
from torch.nn import functional as F

from fusec.codegen.cpp.target import CppTarget
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.kernel import Loop, When, walk
from fusec.dynamo import backend, compiled_graphs
from fusec.reference.contract import compare_outputs
from tests.codegen.test_attention import (
    SCALE,
    by_hand,
    call,
    call_shared,
    check_that_nothing_is_seen,
    compiled,
    kernels,
    passes,
    sample,
    softmaxed,
    with_sinks,
)
from tests.combinations import named, rotating


def filled_where_false(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return softmaxed((q @ k.transpose(-1, -2) * SCALE).masked_fill(mask.logical_not(), -math.inf), v)


def call_up_to_a_position(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    last = mask.sum(-1, dtype=torch.int64).amax((0, 1)) - 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(k.shape[2]) <= last[:, None])


@pytest.mark.parametrize(
    ("queries", "dtype", "spelling"),
    rotating((70, 5, 1), (torch.bool, torch.float32), (call, call_shared)),
    ids=named,
)
def test_blocks_that_a_loaded_mask_hides_are_not_read(
    spelling: Callable[..., Tensor], dtype: torch.dtype, queries: int
) -> None:
    q, k, v, _ = sample(queries, 1000)
    places = torch.arange(1000)
    seen = ((places > 130) & (places <= torch.arange(queries)[:, None] + 200)).expand(2, 1, -1, -1).contiguous()
    mask = seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
    check_that_hidden_blocks_are_not_read(spelling, (q, k, v, mask), 128 if queries == 70 else 0)


@pytest.mark.parametrize(
    ("queries", "spelling"), rotating((1, 5, 70), (filled_where_false, call_up_to_a_position)), ids=named
)
def test_blocks_beyond_a_position_are_not_read(spelling: Callable[..., Tensor], queries: int) -> None:
    q, k, v, _ = sample(queries, 1000)
    seen = torch.arange(1000) <= torch.arange(queries)[:, None] + 200
    check_that_hidden_blocks_are_not_read(spelling, (q, k, v, seen.expand(2, 1, -1, -1).contiguous()))


def up_to(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Positions of each query, or one that the first has and the others count on from."""
    last = position if position.ndim else position + torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(k.shape[2]) <= last[:, None])


def window_up_to(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    last = (position if position.ndim else position + torch.arange(q.shape[2]))[:, None]
    places = torch.arange(k.shape[2])
    seen = (places <= last) & (places > last - WINDOW)
    return softmaxed((q @ k.transpose(-1, -2) * SCALE).masked_fill(~seen, -math.inf), v)


WINDOW = 50


POSITIONS = [
    (1, True, torch.float32),
    (1, False, torch.bfloat16),
    (5, True, torch.bfloat16),
    (70, False, torch.float32),
    (70, True, torch.bfloat16),
]


@pytest.mark.parametrize(("setting", "spelling"), rotating(POSITIONS, (up_to, window_up_to)), ids=named)
def test_the_loop_over_keys_ends_at_a_position_that_is_loaded(
    spelling: Callable[..., Tensor], setting: tuple[int, bool, torch.dtype]
) -> None:
    queries, each, dtype = setting
    check_that_a_position_ends_the_loop(spelling, dtype, queries, each, 700, {}, 256 if queries < 70 else 64)


def check_that_a_position_ends_the_loop(
    spelling: Callable[..., Tensor], dtype: torch.dtype, queries: int, each: bool, keys: int, options: dict[str, str],
    block: int,
) -> None:  # fmt: skip
    """Each query has a position, or only the first, and the others count on from it.

    Whatever the position is, and though keys in blocks that it hides are not even numbers."""
    torch._dynamo.reset()
    fast = torch.compile(spelling, backend=backend, options={"strict": True, **options})
    q, k, v, _ = sample(queries, keys, dtype)
    for first in (keys // 2, 0, keys + 3000, -queries // 2):
        places = torch.tensor(first) + (torch.arange(queries) if each else 0)
        with torch.no_grad():
            want, exact = spelling(q, k, v, places), spelling(q.double(), k.double(), v.double(), places)
            got = fast(q, k, v, places)
            assert compare_outputs(want, got, exact).passed, first
            count = queries if each or queries <= 16 else -(-queries // 64) * 64  # as many as there is place for
            begin, end = first - WINDOW + 1 if spelling is window_up_to else 0, first + count
            hidden = k.clone()
            hidden[:, :, max(0, -(-end // block) * block) :] = math.nan
            hidden[:, :, : max(0, begin // block * block)] = math.nan
            assert torch.equal(fast(q, hidden, v, places).isnan(), got.isnan()), first
    (result,) = compiled_graphs()
    (kernel,) = [kernel for kernel in result.program.kernels.values() if kernel.kind == "attention"]
    assert not any(isinstance(s, When) for s in walk(kernel.body)) and unproven_accesses(kernel) == []


@pytest.mark.parametrize(("dtype", "target"), rotating((torch.float32, torch.bfloat16), ("cpp", "triton")), ids=str)
def test_layers_that_share_a_mask_of_positions_each_end_their_loop_by_it(dtype: torch.dtype, target: str) -> None:
    """The mask is no tensor then; and the counter that it comes from is changed behind both."""

    def layers(q: Tensor, k: Tensor, v: Tensor, count: Tensor) -> Tensor:
        mask = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None] + count
        first = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        count.add_(q.shape[2])
        return F.scaled_dot_product_attention(first @ k[0, 0, :32], k, v, attn_mask=mask)

    torch._dynamo.reset()
    fast = torch.compile(layers, backend=backend, options={"strict": True, "target": target})
    q, k, *_ = sample(5, 300, dtype)
    v, counts = k.roll(1, 2), [torch.tensor(70) for _ in range(3)]
    with torch.no_grad():
        want, exact = layers(q, k, v, counts[0]), layers(q.double(), k.double(), v.double(), counts[1])
        k[:, :, 256:] = v[:, :, 256:] = math.nan
        assert compare_outputs(want, fast(q, k, v, counts[2]), exact).passed
    assert counts == [75, 75, 75]
    (result,) = compiled_graphs()
    assert sorted(n for n in kernels(result) if n not in ("mm", "linear")) == ["add", "add_write", *["attention"] * 2]


def check_that_hidden_blocks_are_not_read(
    spelling: Callable[..., Tensor], inputs: tuple[Tensor, ...], start: int = 0
) -> None:
    torch._dynamo.reset()
    fast = torch.compile(spelling, backend=backend, options={"strict": True})
    with torch.no_grad():
        want = fast(*inputs)
        exact = spelling(*(x.double() if x.is_floating_point() else x for x in inputs))
        assert compare_outputs(spelling(*inputs), want, exact).passed
        for x in inputs[1:3]:
            x[:, :, 512:] = x[:, :, :start] = math.nan
        assert torch.equal(fast(*inputs), want)
    (result,) = compiled_graphs()
    assert kernels(result)[-1] == "attention"


def one_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("heads, queries, cores, shares", [(1, 1, 2, 2), (1, 3, 8, 4), (3, 2, 4, 4), (3, 1, 6, 2)])
def test_keys_are_dealt_out_where_heads_are_few(
    heads: int, queries: int, cores: int, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CppTarget, "cores", cores)
    q, k, v, mask = sample(queries, 2300)
    q, k, v, mask = q[:1].repeat(1, heads, 1, 1), k[:1, :1], v[:1, :1], mask[:1]
    k, v = (x * torch.arange(1, heads + 1).reshape(1, heads, 1, 1) for x in (k, v))
    mask[..., 600:1100] = mask[..., 2050:] = mask[..., 0, :300] = -math.inf
    torch._dynamo.reset()
    fast = torch.compile(one_head, backend=backend, options={"strict": True})
    with torch.no_grad():
        got = fast(q, k, v, mask)
        exact = one_head(q.double(), k.double(), v.double(), mask.double())
        assert compare_outputs(one_head(q, k, v, mask), got, exact).passed
        for special in (-math.inf, math.nan, math.inf):
            mask[..., 0, 256 if special == special else 2000] = special
            mask[..., -1, :] = -math.inf
            want = one_head(q, k, v, mask)
            torch.testing.assert_close(fast(q, k, v, mask), want, atol=2e-6, rtol=1e-5, equal_nan=True)
    ((kernel,),) = [result.program.kernels.values() for result in compiled_graphs()]
    assert [s.stop for s in walk(kernel.body) if isinstance(s, Loop) and s.axis == "share"] == [shares, shares]


def test_keys_stay_together_where_heads_keep_the_cores_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CppTarget, "cores", 3)
    inputs = sample(1, 2300)  # four heads
    result = compiled(by_hand, inputs)
    (kernel,) = result.program.kernels.values()
    assert not any(isinstance(s, Loop) and s.axis == "share" for s in walk(kernel.body))


def test_sinks_join_what_was_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CppTarget, "cores", 4)
    inputs = tuple(x[:1, :1] for x in sample(2, 2300))
    result = compiled(with_sinks, inputs)
    assert kernels(result) == ["attention"] and passes(with_sinks, result, inputs)
    (kernel,) = result.program.kernels.values()
    assert any(isinstance(s, Loop) and s.axis == "share" for s in walk(kernel.body))


def test_keys_that_grow_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CppTarget, "cores", 4)
    torch._dynamo.reset()
    fast = torch.compile(by_hand, backend=backend, options={"strict": True})
    for length in (300, 2300, 7):
        q, k, v, mask = (x[:1, :1] for x in sample(1, length))
        for x, dim in ((k, 2), (v, 2), (mask, 3)):
            torch._dynamo.mark_dynamic(x, dim)
        want, exact = by_hand(q, k, v, mask), by_hand(q.double(), k.double(), v.double(), mask.double())
        with torch.no_grad():
            assert compare_outputs(want, fast(q, k, v, mask), exact).passed
    ((kernel,),) = [result.program.kernels.values() for result in compiled_graphs()]
    assert any(isinstance(s, Loop) and s.axis == "share" for s in walk(kernel.body))


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_a_growing_cache_is_read_where_it_is_put_together(masked: bool) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, caches: list[Tensor], mask: Tensor | None) -> tuple[Tensor, ...]:
        k, v = (torch.cat([old, new], 2) for old, new in zip(caches, (k, v), strict=True))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask), k, v

    torch._dynamo.reset()
    fast = torch.compile(step, backend=backend, options={"strict": True})
    for length in (20, 21, 300):
        q, k, v, mask = sample(1, length + 1)
        v = v[..., :32]  # ATen does not compare the lengths of keys and values of one width
        inputs = q, k[:, :, :1], v[:, :, :1], [k[:, :, 1:], v[:, :, 1:]], mask if masked else None
        with torch.no_grad(), config.patch(use_duck_shape=False):  # or equal lengths would be one symbol to Dynamo
            got = fast(*inputs)
        for a, b in zip(got, step(*inputs), strict=True):
            torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)
    for result in compiled_graphs():
        assert kernels(result)[-1] == "attention" and len(kernels(result)) == 3


@pytest.mark.parametrize("queries", [1, 5, 70])
def test_nothing_is_seen_at_all(queries: int) -> None:
    check_that_nothing_is_seen(compiled, queries, 600)


@pytest.mark.parametrize(("drafts", "dtype"), rotating((2, 7, 16), (torch.bfloat16, torch.float32)), ids=str)
def test_drafts_of_a_tree_are_one_kernel(drafts: int, dtype: torch.dtype) -> None:
    """Speculative decoding: each draft sees the cache up to a place, its ancestors in the tree, and itself."""
    q, k, v, _ = sample(drafts, 100, dtype)
    parents = [max(0, (i - 1) // 2) for i in range(drafts)]
    tree = torch.eye(drafts, dtype=torch.bool)
    for draft, parent in enumerate(parents):
        tree[draft] |= tree[parent]
    mask = torch.zeros(2, 1, drafts, 100, dtype=torch.bool)
    mask[..., :60], mask[..., 60 : 60 + drafts] = True, tree
    inputs = (q, k, v, mask)
    result = compiled(call_shared, inputs)
    assert kernels(result) == ["attention"] and passes(call_shared, result, inputs)


def test_pages_of_a_cache_are_gathered_by_kernels() -> None:
    """A table says which page of the pool holds which keys: they are put together, and no call of ATen is needed."""

    def paged(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: Tensor) -> Tensor:
        k = keys[table].flatten(0, 1).transpose(0, 1)[None]
        v = values[table].flatten(0, 1).transpose(0, 1)[None]
        mask = (torch.arange(k.shape[2]) < length)[None, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    q, keys, values = torch.randn(1, 8, 1, 32), torch.randn(20, 16, 2, 32), torch.randn(20, 16, 2, 32)
    inputs = (q, keys, values, torch.tensor([3, 7, 1, 9]), torch.tensor(50))
    result = compiled(paged, inputs)
    assert {step.kind for step in result.program.steps} == {"kernel"} and "attention" in kernels(result)
    assert passes(paged, result, inputs)


@pytest.mark.parametrize("made", [lambda x: x, lambda x: x.softmax(-1)], ids=["given", "computed"])
@pytest.mark.parametrize("turned", [False, True])
def test_heads_are_not_repeated_in_memory_where_keys_were_flattened(made: Callable[..., Tensor], turned: bool) -> None:
    """The view that a loop cannot follow stays outside, and those that repeat heads do not."""

    def shared(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        k, v = made(keys), made(values)
        if turned:
            k, v = k.flatten(0, 1).transpose(0, 1)[None], v.flatten(0, 1).transpose(0, 1)[None]
        else:
            k, v = k.reshape(1, 2, 64, 32), v.reshape(1, 2, 64, 32)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    inputs = (torch.randn(1, 8, 5, 32), torch.randn(4, 16, 2, 32), torch.randn(4, 16, 2, 32))
    result = compiled(shared, inputs)
    assert {step.kind for step in result.program.steps} == {"kernel"} and kernels(result).count("attention") == 1
    assert passes(shared, result, inputs)
