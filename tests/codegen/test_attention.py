"""Generated attention: every way to write it, at every length, gives what eager gives, and no scores reach memory."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.codegen.tile.kernel import Load, Loop, Store, index_symbol, walk
from fusec.compiler import Compiled, compile_graph
from fusec.config import Config
from fusec.dynamo import backend, compiled_graphs
from fusec.frontend import trace
from fusec.ir.graph import Graph, Node
from fusec.passes import decompose_sdpa
from fusec.reference.contract import compare_outputs
from tests.combinations import named, rotating

SCALE = 0.125


def softmaxed(scores: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype) @ value


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return softmaxed(q @ k.transpose(-1, -2) * SCALE + mask, v)


def scaled_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return softmaxed((q * SCALE) @ k.transpose(-1, -2) + mask, v)


def scaled_both(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return softmaxed((q * SCALE**0.5) @ (k * SCALE**0.5).transpose(-1, -2) + mask, v)


def divided_key(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return softmaxed(q @ (k / 5.65).transpose(-1, -2) + mask, v)


def einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * SCALE + mask, -1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def softmax_by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * SCALE + mask
    exponential = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (exponential / exponential.sum(-1, keepdim=True)) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return softmaxed((q @ k.transpose(-1, -2) * SCALE).masked_fill(mask < -1, -math.inf), v)


def soft_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return softmaxed(torch.tanh(q @ k.transpose(-1, -2) * SCALE / 30) * 30 + mask, v)


def linear_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    slopes = torch.exp2(-torch.arange(1, 3).to(q.dtype)).reshape(2, 1, 1)
    return softmaxed(q @ k.transpose(-1, -2) * SCALE + slopes * torch.arange(k.shape[2]).to(q.dtype), v)


def triangle(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return softmaxed((q @ k.transpose(-1, -2) * SCALE).masked_fill(~seen, -math.inf), v)


def window(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    return softmaxed(torch.where((j <= i) & (i - j < 17), q @ k.transpose(-1, -2) * SCALE, -math.inf), v)


def shared_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x[:, :1, None].expand(-1, -1, 2, -1, -1).reshape(x.shape) for x in (k, v))
    return by_hand(q, k, v, mask)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A logit per head joins the scores, and what it takes of the weights is dropped."""
    sinks = k[0, :, 0, 0].reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    scores = torch.cat([q @ k.transpose(-1, -2) * SCALE + mask, sinks], -1)
    scores = scores - scores.max(-1, keepdim=True).values
    return torch.softmax(scores, -1, dtype=scores.dtype)[..., :-1].to(v.dtype) @ v


def sinks_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    sinks = k[0, :, 0, 0].reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    scores = torch.cat([sinks, q @ k.transpose(-1, -2) * SCALE + mask], -1)
    return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)[..., 1:] @ v


def one_more(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A softmax with 1 added to the sum, so that a row may look at nothing."""
    scores = (q @ k.transpose(-1, -2) * SCALE + mask).float()
    shift = scores.amax(-1, keepdim=True).clamp(min=0)
    exponential = torch.exp(scores - shift)
    return (exponential / (torch.exp(-shift) + exponential.sum(-1, keepdim=True))).to(v.dtype) @ v


def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def call_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask > -1, scale=0.3)


def call_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def call_shared(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], attn_mask=mask, enable_gqa=True)


SPELLINGS: list[Callable[..., Tensor]] = [
    by_hand, scaled_query, scaled_both, divided_key, einsum, softmax_by_hand, filled, soft_capped, linear_bias,
    triangle, window, shared_keys, with_sinks, sinks_first, one_more,
    call, call_masked, call_causal, call_shared,
]  # fmt: skip


def sample(queries: int, keys: int, dtype: torch.dtype = torch.float32, width: int = 32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, queries, width), torch.randn(2, 2, keys, width)
    return tuple(x.to(dtype) for x in (q, k, torch.randn(2, 2, keys, 48), torch.randn(2, 1, queries, keys)))


def compiled(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Compiled:
    return compile_graph(trace(function, inputs, symbolic=False), Config(strict=True))


def passes(function: Callable[..., Tensor], result: Compiled, inputs: tuple[Tensor, ...]) -> bool:
    got = result.program(list(inputs))[0]
    exact = function(*(x.double() if x.is_floating_point() else x for x in inputs))
    return compare_outputs(function(*inputs), got, exact).passed


def kernels(result: Compiled) -> list[str]:
    return [step.name for step in result.program.steps]


@pytest.mark.parametrize(
    ("spelling", "lengths", "dtype"),
    rotating(SPELLINGS, ((70, 70), (3, 130)), (torch.bfloat16, torch.float32)),
    ids=named,
)
def test_every_spelling_is_one_kernel_with_the_numbers_of_eager(
    spelling: Callable[..., Tensor], lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    inputs = sample(*lengths, dtype)
    result = compiled(spelling, inputs)
    assert kernels(result) == ["attention"]
    assert passes(spelling, result, inputs)


@pytest.mark.parametrize(("queries", "keys"), rotating((1, 7, 1000, 128), (1000, 7, 128)))
def test_every_length(queries: int, keys: int) -> None:
    inputs = sample(queries, keys)
    result = compiled(by_hand, inputs)
    assert kernels(result) == ["attention"]
    assert passes(by_hand, result, inputs)


@pytest.mark.parametrize(
    ("queries", "dtype"),
    [
        (1, torch.bfloat16),
        (7, torch.float32),
        *(pytest.param(*p, marks=pytest.mark.thorough) for p in ((1, torch.float32), (7, torch.bfloat16))),
    ],
    ids=str,
)
def test_a_single_key_is_one_kernel_without_products(queries: int, dtype: torch.dtype) -> None:
    inputs = sample(queries, 1, dtype)
    for spelling in (by_hand, call, call_masked, call_shared, shared_keys, with_sinks):
        result = compiled(spelling, inputs)
        assert len(kernels(result)) == 1 and not any(s.name in ("bmm", "mm") for s in result.program.steps)
        assert passes(spelling, result, inputs)
    q, k, v, mask = inputs
    mask[0] = -math.inf
    mask[1, 0, 0] = math.nan
    torch._dynamo.reset()
    for spelling in (by_hand, call, call_masked):
        with torch.no_grad():
            got = torch.compile(spelling, backend=backend, options={"strict": True})(q, k, v, mask)
        torch.testing.assert_close(got, spelling(q, k, v, mask), equal_nan=True)
    assert all(len(kernels(result)) == 1 for result in compiled_graphs())


def only_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return with_sinks(q, k, v, q.new_zeros(()))


@pytest.mark.parametrize("spelling", [triangle, only_sinks], ids=lambda f: f.__name__)
def test_lengths_that_change_share_a_kernel(spelling: Callable[..., Tensor]) -> None:
    check_that_lengths_share_a_kernel(spelling, ((40, 50), (7, 130), (200, 3), (64, 64)), "cpp")


def check_that_lengths_share_a_kernel(
    spelling: Callable[..., Tensor], lengths: Sequence[tuple[int, int]], target: str
) -> None:
    """Of queries and keys, both of which the first compile leaves open."""
    torch._dynamo.reset()
    fast = torch.compile(spelling, backend=backend, options={"strict": True, "target": target})
    for queries, keys in lengths:
        inputs = sample(queries, keys)
        for x in inputs[:3]:
            torch._dynamo.mark_dynamic(x, 2)
        want, exact = spelling(*inputs), spelling(*(x.double() for x in inputs))
        with torch.no_grad():
            assert compare_outputs(want, fast(*inputs), exact).passed
    (result,) = compiled_graphs()
    assert kernels(result) == ["attention"]


def test_as_many_keys_as_a_head_is_wide() -> None:
    inputs = sample(32, 32)
    result = compiled(by_hand, inputs)
    assert kernels(result) == ["attention"]
    assert passes(by_hand, result, inputs)


@pytest.mark.parametrize(
    ("spelling", "lengths"),
    rotating((by_hand, filled, call, call_masked, triangle, with_sinks, one_more), ((5, 100), (70, 200), (40, 40))),
    ids=named,
)
def test_masked_rows_infinities_and_nan(spelling: Callable[..., Tensor], lengths: tuple[int, int]) -> None:
    check_masked_rows_infinities_and_nan(compiled, spelling, *lengths)


def check_masked_rows_infinities_and_nan(
    compiler: Callable[..., Compiled], spelling: Callable[..., Tensor], queries: int, keys: int
) -> None:
    """Rows of which nothing is seen, half, or all at the lowest number; special values in the mask and in a key."""
    q, k, v, mask = sample(queries, keys)
    mask[0, 0, 1] = -math.inf
    mask[1, 0, 2, : keys // 2] = -math.inf
    mask[1, 0, 3] = torch.finfo(torch.float32).min
    mask[1, 0, 0, 3], mask[0, 0, 2, 5] = math.nan, math.inf
    k[0, 1, 2, 3] = math.inf
    (got,) = compiler(spelling, (q, k, v, mask)).program([q, k, v, mask])
    torch.testing.assert_close(got, spelling(q, k, v, mask), atol=2e-6, rtol=1e-5, equal_nan=True)


def with_large_sinks(queries: int, keys: int) -> tuple[Tensor, ...]:
    """One sink above all scores, and one far below; scores whose exponentials overflow, and such that vanish."""
    q, k, v, mask = sample(queries, keys)
    k[0, :, 0, 0] = torch.tensor([150.0, -150.0])
    mask[1] += 120
    mask[1, :, 1] -= 240
    return q, k, v, mask


@pytest.mark.parametrize(
    ("spelling", "lengths"), rotating((with_sinks, sinks_first, one_more), ((40, 40), (5, 100))), ids=named
)
def test_sinks_above_and_far_below_all_scores(spelling: Callable[..., Tensor], lengths: tuple[int, int]) -> None:
    inputs = with_large_sinks(*lengths)
    assert passes(spelling, compiled(spelling, inputs), inputs)


BOUNDED = pytest.mark.parametrize(
    ("spelling", "start", "stop"),
    [(by_hand, False, False), (triangle, False, True), (call_causal, False, True), (window, True, True)],
    ids=lambda x: getattr(x, "__name__", ""),
)
"""Whether a mask of indices bounds the first key that a block of queries sees, and the last."""


@pytest.mark.usefixtures("nothing_is_built")
@BOUNDED
def test_blocks_of_keys_that_no_query_sees_are_left_out(
    spelling: Callable[..., Tensor], start: bool, stop: bool
) -> None:
    ((kernel,),) = [compiled(spelling, sample(1000, 1000)).program.kernels.values()]
    loops = [s for s in walk(kernel.body) if isinstance(s, Loop) and s.axis == "key_block"]
    assert len(loops) == (2 if spelling is by_hand else 1), "the second is for lowest numbers in a mask"
    for loop in loops:
        assert bool(sympy.sympify(loop.start).free_symbols) == start
        assert bool(sympy.sympify(loop.stop).free_symbols) == stop


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("queries", [3, 70], ids=["few", "many"])
def test_lanes_of_queries_and_results_lie_side_by_side(queries: int) -> None:
    """Of heads as projections leave them, whose rows are far apart."""
    inputs = tuple(torch.randn(2, n, 3, 32).transpose(1, 2) for n in (queries, 70, 70))
    ((kernel,),) = [compiled(F.scaled_dot_product_attention, inputs).program.kernels.values()]
    query, result = kernel.buffers[0].name, next(b.name for b in kernel.buffers if b.role == "output")
    tiles = [loop for loop in walk(kernel.body) if isinstance(loop, Loop) and loop.kind == "tile"]
    steps = {
        s.buffer: s.offset.coeff(index_symbol(tile.axis), 1)
        for tile in tiles
        for s in walk(tile.body)
        if isinstance(s, (Load, Store)) and s.buffer in (query, result)
    }
    assert steps == {query: 1, result: 1}


@pytest.mark.parametrize(
    ("edges", "queries"),
    rotating(((17, -1), (1, 0), (64, 1), (65, 63), (300, 64), (-60, 65)), (130, 1, 65, 5)),
    ids=str,
)
def test_windows_that_end_at_the_edge_of_a_block(edges: tuple[int, int], queries: int) -> None:
    behind, ahead = edges

    def model(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None] + 128, torch.arange(k.shape[2])
        return softmaxed(torch.where((j <= i + ahead) & (i - j < behind), q @ k.transpose(-1, -2), -math.inf), v)

    inputs = sample(queries, 330)
    result = compiled(model, inputs)
    assert kernels(result) == ["attention"]
    assert passes(model, result, inputs)


def relative_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scores that a second product is added to, of the queries and what their distance from a key is known by."""
    distance = torch.arange(q.shape[2])[:, None, None] - torch.arange(k.shape[2])[:, None]
    known = torch.cos(distance * 0.01 * torch.arange(q.shape[3])).to(q.dtype)
    return softmaxed((q @ k.transpose(-1, -2) + torch.einsum("bhid,ijd->bhij", q, known)) * SCALE, v)


def windows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Keys and values of a window that lie in a square, as arithmetic before left them."""
    q, k, v = (torch.tanh(x.reshape(2, 2, 4, 5, -1)).reshape(2, 2, 20, -1) for x in (q, k, v))
    return softmaxed(q @ k.transpose(-1, -2) * SCALE, v)


def single_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (torch.tanh(x[0, 0]) for x in (q, k, v))
    return softmaxed(q @ k.transpose(-1, -2) * SCALE, v)


@pytest.mark.parametrize(
    ("function", "dtype"),
    rotating((relative_keys, windows, single_head), (torch.float32, torch.bfloat16)),
    ids=named,
)
def test_what_is_computed_before_stays_outside(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    inputs = sample(20, 20, dtype)
    result = compiled(function, inputs)
    assert kernels(result)[-1] == "attention"
    assert passes(function, result, inputs)


def test_a_layer_with_a_softmax_in_it_is_none() -> None:
    def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return torch.softmax(x @ first, -1) @ second

    inputs = (torch.randn(20, 32), torch.randn(32, 40), torch.randn(40, 8))
    result = compiled(layer, inputs)
    assert "attention" not in kernels(result)
    reasons = [r.reason for r in result.remarks.of("missed") if r.subject == "attention"]
    assert reasons == ["its keys or values are weights"]


def check_that_nothing_is_seen(compiler: Callable[..., Compiled], queries: int, keys: int) -> None:
    """Where all is hidden, by -inf, a truth or the lowest number, each spelling gives what eager's does."""
    q, k, v, _ = sample(queries, keys)
    shape, lowest = (2, 1, queries, keys), torch.finfo(torch.float32).min
    hidden, minimum = torch.full(shape, -math.inf), torch.full(shape, lowest)
    for spelling, mask in ((call, hidden), (call, hidden > 0), (by_hand, hidden), (call, minimum), (by_hand, minimum)):
        (got,) = compiler(spelling, (q, k, v, mask)).program([q, k, v, mask])
        torch.testing.assert_close(got, spelling(q, k, v, mask), atol=2e-6, rtol=1e-5, equal_nan=True)


def with_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(q @ k.transpose(-1, -2) + mask, -1)
    return weights @ v, weights


def twice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.transpose(-1, -2), -1)
    return torch.softmax(weights @ k @ k.transpose(-1, -2), -1) @ v


def plus_one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (torch.softmax(q @ k.transpose(-1, -2), -1) + 1) @ v


def other_maximum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    exponential = torch.exp(scores - (scores + mask).amax(-1, keepdim=True))
    return (exponential / exponential.sum(-1, keepdim=True)) @ v


def other_sum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    exponential = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (exponential / (exponential + mask.abs()).sum(-1, keepdim=True)) @ v


def softmax_of_doubles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) + mask, -1, dtype=torch.float64).to(v.dtype) @ v


@pytest.mark.parametrize(
    "function",
    [with_weights, twice, plus_one, other_maximum, other_sum, softmax_of_doubles],
    ids=lambda f: f.__name__,
)
def test_what_is_no_attention_stays_right(function: Callable[..., Any]) -> None:
    inputs = sample(20, 40)
    result = compiled(function, inputs)
    assert "attention" not in kernels(result) or function is twice
    if function is not twice:
        assert [r.reason for r in result.remarks.of("missed") if r.subject == "attention"]
    given = function(*inputs)
    for got, want in zip(result.program(list(inputs)), given if isinstance(given, tuple) else (given,), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_call_that_drops_weights_stays_one() -> None:
    def dropping(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(dropping, backend=backend, options={"strict": True})(*sample(20, 40, width=48))
    assert "attention" not in kernels(compiled_graphs()[-1])


def test_a_call_with_heads_of_unknown_size_stays_one() -> None:
    graph = trace(call, sample(20, 40, width=48))
    result = compile_graph(graph, Config(strict=True))
    assert "attention" not in kernels(result)
    assert [r.reason for r in result.remarks.of("missed") if r.subject == "attention"]


def call_of_one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("planted", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("spelling", [call, call_masked, call_causal, call_of_one], ids=lambda f: f.__name__)
def test_a_call_and_its_decomposition_are_compared(
    spelling: Callable[..., Tensor], planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if planted:
        right = decompose_sdpa.decompose

        def wrong(node: Node) -> Graph:
            body = right(node)
            scale = next(n for n in body.nodes if n.is_op("mul")).operands[1].producer
            assert scale is not None
            scale.attributes = scale.attributes | {"value": 1.01 * scale.attributes["value"]}
            return body

        monkeypatch.setattr(decompose_sdpa, "decompose", wrong)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(spelling, backend=backend, options={"strict": True, "verify": True})(*sample(20, 40, width=48))
    (result,) = compiled_graphs()
    assert ("attention" in kernels(result)) != planted
    assert bool(result.remarks.of("failure")) == planted


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 18, 32), (2, 19, 32), (2, 19, 48)),
        ((3, 2, 4, 18, 32), (3, 2, 4, 19, 32), (3, 2, 4, 19, 48)),
    ],
    ids=["no heads", "two batches"],
)
def test_calls_of_any_rank(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    inputs = (torch.randn(q), torch.randn(k), torch.randn(v))
    result = compiled(F.scaled_dot_product_attention, inputs)
    assert kernels(result)[-1] == "attention" and not any(step.kind == "aten" for step in result.program.steps)
    assert passes(F.scaled_dot_product_attention, result, inputs)


def test_nothing_is_verified_unless_it_is_asked_for() -> None:
    inputs = sample(18, 19)
    graph = trace(call, inputs, symbolic=False)
    for verify in (False, True):
        records = compile_graph(graph, Config(strict=True, verify=verify)).records
        assert sum(record.applications for record in records) > 0
        assert sum(record.verified for record in records) == verify * sum(record.applications for record in records)
