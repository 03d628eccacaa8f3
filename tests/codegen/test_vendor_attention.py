"""Attention as a call of the library's: what can be said so means the same, all else is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.codegen.triton.autotune.vendor_attention import with_one_call
from fusec.errors import ScheduleError
from fusec.ir.graph import Graph, Node
from fusec.reference.interpreter import evaluate
from tests.codegen.test_attention import (
    SCALE,
    by_hand,
    call,
    call_causal,
    linear_bias,
    one_more,
    only_sinks,
    sample,
    shared_keys,
    softmaxed,
    triangle,
    window,
)
from tests.codegen.triton_regions import regions_of

Spelling = Callable[..., Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return softmaxed(q @ k.transpose(-1, -2) * SCALE, v)


def scaled_with_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """What is added before the scores are scaled is scaled with them."""
    return softmaxed((q @ k.transpose(-1, -2) + torch.arange(k.shape[2]).to(q.dtype)) / 8, v)


def prologue_and_layout(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Queries are computed in the kernel, and rows of the result lie side by side for all heads."""
    q = torch.tanh(q) * q
    return softmaxed(q @ k.transpose(-1, -2) * SCALE, v).transpose(1, 2).flatten(2)


def gated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return plain(q, k, v, mask) * torch.sigmoid(q[..., :1])


def call_plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.3)


def einsum_of_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Heads behind places, as projections leave them."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) * SCALE, -1), v)


def one_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return softmaxed(q[:, 0] @ k[:, 0].transpose(-1, -2) * SCALE, v[:, 0])


def one_for_all(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return softmaxed(q @ k[:, :1].transpose(-1, -2) * SCALE, v[:, :1])


def body_of(spelling: Spelling, inputs: tuple[Tensor, ...]) -> Graph:
    (region,) = [r for r in regions_of(spelling, inputs) if any(n.is_op("contraction") for n in r.body)]
    return region.body


def the_call(body: Graph) -> Node:
    assert not any(n.is_op("contraction", "exp") for n in body)
    (node,) = [n for n in body if n.is_op("opaque")]
    return node


def said(spelling: Spelling, queries: int = 20, keys: int = 30, dtype: torch.dtype = torch.float32) -> Node:
    """The call that a spelling becomes, which computes what the spelling does."""
    body = body_of(spelling, sample(queries, keys, dtype))
    before, one = str(body), with_one_call(body)
    given = [torch.randn([int(n) for n in v.shape], dtype=torch.float64) for v in body.inputs]
    torch.testing.assert_close(evaluate(one, given, dtype=torch.float64), evaluate(body, given, dtype=torch.float64))
    assert str(body) == before
    return the_call(one)


def options(node: Node) -> dict[str, Any]:
    _, _, _, mask, _, causal = node.attributes["args"]
    return {"mask": mask is not None, "causal": causal} | dict(node.attributes["kwargs"])


@pytest.mark.parametrize("spelling", [plain, prologue_and_layout, gated, einsum_of_rows, one_head])
@pytest.mark.parametrize("queries", [1, 20])
def test_without_a_mask(spelling: Spelling, queries: int) -> None:
    found = options(said(spelling, queries))
    assert found == {"mask": False, "causal": False, "scale": SCALE, "enable_gqa": False}


def test_the_scale_of_a_call_is_kept() -> None:
    assert options(said(call_plain))["scale"] == 0.3


@pytest.mark.parametrize("spelling", [triangle, call_causal])
def test_causal(spelling: Spelling) -> None:
    assert options(said(spelling, 30, 30)) | {"scale": 0} == {
        "mask": False, "causal": True, "scale": 0, "enable_gqa": False,
    }  # fmt: skip
    assert options(said(spelling, 20, 30))["causal"]  # row i sees the first i keys, as the call has it


@pytest.mark.parametrize("spelling", [window, linear_bias, scaled_with_bias])
def test_masks_of_positions_are_handed_over(spelling: Spelling) -> None:
    node = said(spelling, 30, 30)
    found = options(node)
    assert found["mask"] and not found["causal"]
    assert len(node.operands[3].shape) == 4


def test_the_mask_has_the_type_of_the_queries() -> None:
    node = the_call(with_one_call(body_of(window, sample(30, 30, torch.bfloat16))))
    assert len({v.dtype for v in node.operands}) == 1


@pytest.mark.parametrize("heads", [1, 2])
def test_heads_that_share_keys_are_not_repeated(heads: int) -> None:
    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:, :, None].expand(-1, -1, 6 // heads, -1, -1).reshape(2, 6, 30, -1) for x in (k, v))
        return softmaxed(q @ k.transpose(-1, -2) * SCALE, v)

    q, k, v = torch.randn(2, 6, 20, 32), torch.randn(2, heads, 30, 32), torch.randn(2, heads, 30, 24)
    body = body_of(shared, (q, k, v))
    one = with_one_call(body)
    given = [x.double() for x in (q, k, v)]
    torch.testing.assert_close(evaluate(one, given, dtype=torch.float64), evaluate(body, given, dtype=torch.float64))
    node = the_call(one)
    assert options(node)["enable_gqa"] and [v.shape[1] for v in node.operands] == [6, heads, heads]


def sees_nothing(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    return softmaxed((q @ k.transpose(-1, -2) * SCALE).masked_fill(j >= i, -math.inf), v)


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return softmaxed(torch.tanh(q @ k.transpose(-1, -2) * SCALE / 30) * 30, v)


def filled_with_little(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A key that every query may still see a little."""
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    return softmaxed((q @ k.transpose(-1, -2) * SCALE).masked_fill(j > i, -3.0), v)


def fine_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return softmaxed((q @ k.transpose(-1, -2)).float() + torch.arange(k.shape[2]) * 0.1, v)


def rows_left_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.transpose(-1, -2) * SCALE, -1)
    return weights.masked_fill(mask[..., :1] == -math.inf, 0.0) @ v


@pytest.mark.parametrize(
    ("spelling", "why"),
    [
        (by_hand, "depends on inputs"),
        (call, "depends on inputs"),
        (shared_keys, "depends on inputs"),
        (sees_nothing, "are masked"),
        (capped, "tanh"),
        (filled_with_little, "where"),
        (one_more, "the maximum of the scores"),
        (only_sinks, "the maximum of the scores"),
        (fine_bias, "in the dtype of its queries"),
        (rows_left_out, "set to 0"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_the_call_cannot_say_is_refused(spelling: Spelling, why: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        with_one_call(body_of(spelling, sample(30, 30, torch.bfloat16)))
    assert why in refused.value.why
