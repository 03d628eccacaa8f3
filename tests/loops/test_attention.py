"""Attention in a loop nest: found in every form, its parts named, and refused where the computation differs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusec.errors import ScheduleError
from fusec.frontend import trace
from fusec.loops.attention import FEW_QUERIES, Attention, find_attention
from fusec.loops.indexing import lower_to_loops
from fusec.passes.canonicalize import normalize

QUERIES, KEYS, DEPTH, COLUMNS = 18, 19, 8, 10
SHAPES = {"q": (2, QUERIES, DEPTH), "k": (2, KEYS, DEPTH), "v": (2, KEYS, COLUMNS), "m": (2, QUERIES, KEYS)}
Write = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def weights(scores: Tensor) -> Tensor:
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def product(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2)


def by_reciprocal(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    e = torch.exp((s := product(q, k) + m) - s.amax(-1, keepdim=True))
    return (e * e.sum(-1, keepdim=True).reciprocal()) @ v


def undivided(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    s = product(q, k) + m
    return torch.exp(s - s.amax(-1, keepdim=True)) @ v


def divided_later(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    e = torch.exp((s := product(q, k) + m) - s.amax(-1, keepdim=True))
    return (e @ v) / e.sum(-1, keepdim=True)


def emptied(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    s = product(q, k) + m
    return torch.where(s.amax(-1, keepdim=True) == -torch.inf, 0.0, weights(s)) @ v


FOUND: dict[str, Write] = {
    "as usual": lambda q, k, v, m: weights(product(q, k) + m) @ v,
    "by reciprocal": by_reciprocal,
    "not divided": undivided,
    "divided later": divided_later,
    "empty rows": emptied,
    "scores the other way round": lambda q, k, v, m: weights((k @ q.transpose(-1, -2)).transpose(-1, -2) + m) @ v,
    "scaled key": lambda q, k, v, m: weights(product(q, k * 3.0) + m) @ v,
    "divided key": lambda q, k, v, m: weights(product(q, k / 3.0) + m) @ v,
    "computed query": lambda q, k, v, m: weights(product(torch.sin(q), k)) @ v,
    "capped": lambda q, k, v, m: weights(torch.tanh(product(q, k) / 5) * 5 + m) @ v,
    "weights scaled by row": lambda q, k, v, m: (weights(product(q, k)) * m[:, :, :1]) @ v,
}


def squares(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    e = torch.exp((s := product(q, k)) - s.amax(-1, keepdim=True))
    return (e / (e * e).sum(-1, keepdim=True)) @ v


def twice_summed(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    e = torch.exp((s := product(q, k)) - s.amax(-1, keepdim=True))
    return (e / (e.sum(-1, keepdim=True) + torch.tanh(e).sum(-1, keepdim=True))) @ v


def least(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return torch.exp((s := product(q, k)) - s.amin(-1, keepdim=True)) @ v


def another_maximum(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    s = product(q, k)
    return weights(s) @ v + torch.sin(s).amax(-1, keepdim=True)


def of_others(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return torch.exp((s := product(q, k)) - (s + m).amax(-1, keepdim=True)) @ v


REFUSED: dict[str, tuple[Write, str]] = {
    "three products": (lambda q, k, v, m: weights(product(product(q, k) @ k, k)) @ v, "it has 4 matmuls"),
    "of itself": (
        lambda q, k, v, m: weights(s := product(q, k)) @ torch.sin(s).transpose(-1, -2),
        "its first matmul is read at several indices",
    ),
    "no softmax": (lambda q, k, v, m: torch.tanh(product(q, k)) @ v, "its weights are not a softmax"),
    "not shifted": (lambda q, k, v, m: torch.exp(product(q, k) + m) @ v, "does not subtract the maximum"),
    "least": (least, "does not subtract the maximum"),
    "largest of others": (of_others, "does not subtract the maximum"),
    "another maximum": (another_maximum, "does not subtract the maximum"),
    "summed over queries too": (
        lambda q, k, v, m: torch.einsum("bqk,bqkc->bc", weights(product(q, k)), m[..., None] * v[:, None]),
        "its first matmul is read at several indices",
    ),
    "squares": (squares, "does not divide by the sum"),
    "two sums": (twice_summed, "does not divide by the sum"),
    "along queries": (
        lambda q, k, v, m: weights(product(q, k).transpose(-1, -2)).transpose(-1, -2) @ v,
        "is not over the keys",
    ),
    "masked after": (lambda q, k, v, m: (weights(product(q, k)) * m) @ v, "changed after the softmax"),
    "added after": (lambda q, k, v, m: (weights(product(q, k)) + 1.0) @ v, "changed after the softmax"),
    "squared": (lambda q, k, v, m: torch.square(weights(product(q, k))) @ v, "changed after the softmax"),
    "divided by weights": (
        lambda q, k, v, m: (weights(product(q, k)) / (m + 3.0)) @ v,
        "changed after the softmax",
    ),
    "chosen": (
        lambda q, k, v, m: torch.where(m > 0, weights(product(q, k)), 0.0) @ v,
        "changed after the softmax",
    ),
    "chosen by row, not zero": (
        lambda q, k, v, m: torch.where(m[:, :, :1] > 0, weights(product(q, k)), 1.0) @ v,
        "changed after the softmax",
    ),
    "computed keys": (lambda q, k, v, m: weights(product(q, torch.sin(k))) @ v, "keys or values are computed"),
    "computed values": (lambda q, k, v, m: weights(product(q, k)) @ torch.sin(v), "keys or values are computed"),
    "scaled values": (lambda q, k, v, m: weights(product(q, k)) @ (v * 2.0), "keys or values are computed"),
}


def parts(write: Callable[..., object]) -> Attention | None:
    graph = trace(write, [torch.randn(shape) for shape in SHAPES.values()], symbolic=False)
    normalize(graph)
    return find_attention(lower_to_loops(graph))


SCALES = {FOUND["scaled key"]: ["mul"], FOUND["divided key"]: ["div"]}


@pytest.mark.parametrize("write", FOUND.values(), ids=FOUND)
def test_parts_are_found(write: Write) -> None:
    found = parts(write)
    assert found is not None
    assert (found.key_count, found.depth.count, found.columns.count) == (KEYS, DEPTH, COLUMNS)
    assert [a.size for a in found.batch] == [2] and [a.size for a in found.queries] == [QUERIES]
    (query,), (key,), (value,), (depth,) = found.query, found.key, found.value, found.depth.axes
    assert key.value.shape == SHAPES["k"] and value.value.shape == SHAPES["v"]
    assert query.axes.isdisjoint(found.keys) and depth in query.axes
    assert [scale for scale, _ in found.factors] == SCALES.get(write, [])
    assert (found.total is None) == (write is undivided)
    assert {a.size for a in found.loops} == {2, QUERIES, KEYS, DEPTH}


@pytest.mark.parametrize(("write", "why"), REFUSED.values(), ids=REFUSED)
def test_other_computations_are_refused(write: Write, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        parts(write)


def transposed_values(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """Attention to values that are not contiguous."""
    return weights(product(q, k)) @ m[:, :COLUMNS].transpose(-1, -2)


def test_few_queries_need_contiguous_values() -> None:
    assert parts(lambda q, k, v, m: transposed_values(q[:, : FEW_QUERIES + 1], k, v, m)) is not None
    with pytest.raises(ScheduleError, match="keys or values are not contiguous"):
        parts(lambda q, k, v, m: transposed_values(q[:, :FEW_QUERIES], k, v, m))


def test_without_a_matmul_of_a_matmul_there_is_no_attention() -> None:
    assert parts(lambda q, k, v, m: product(q, k)) is None
    assert parts(lambda q, k, v, m: (product(q, k), m @ v)) is None
    assert parts(lambda q, k, v, m: weights(m)) is None


def test_further_outputs_are_computed_from_the_result() -> None:
    with pytest.raises(ScheduleError, match="an output is not computed from its result"):
        parts(lambda q, k, v, m: (weights(product(q, k)) @ v, torch.sin(q)))
    found = parts(lambda q, k, v, m: (y := weights(product(q, k)) @ v, torch.sin(y)))
    assert found is not None
