"""Bounds of visible keys: exactly the keys that a mask of indices shows, and none where a mask is something else."""

import math
from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor

from fusec.frontend import trace
from fusec.loops.attention import find_attention
from fusec.loops.indexing import IndexedExpr, lower_to_loops
from fusec.loops.visible import Bound, loaded_masks, visible_keys
from fusec.passes.canonicalize import normalize

QUERIES, KEYS = 11, 13
Mask = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Scores of which some are masked, from scores and the indices of queries and keys."""


def kept(scores: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen, scores, -math.inf)


EXACT: dict[str, Mask] = {
    "at most": lambda s, i, j: kept(s, j <= i),
    "below": lambda s, i, j: kept(s, j < i + 1),
    "at least": lambda s, i, j: kept(s, i >= j),
    "above": lambda s, i, j: kept(s, i + 1 > j),
    "from the end": lambda s, i, j: kept(s, j <= i + (KEYS - QUERIES)),
    "later ones": lambda s, i, j: kept(s, i <= j),
    "strictly later ones": lambda s, i, j: kept(s, i - 1 < j),
    "window": lambda s, i, j: kept(s, (j <= i) & (i - j < 4)),
    "window of offsets": lambda s, i, j: kept(s, (i - j >= 0) & (j - i > -4)),
    "one of three": lambda s, i, j: kept(s, (j <= i) & (j >= 0) & (i - j <= 3)),
    "hidden": lambda s, i, j: s.masked_fill(j > i, -math.inf),
    "hidden on either side": lambda s, i, j: s.masked_fill((j > i) | (i - j >= 4), -math.inf),
    "added": lambda s, i, j: s + kept(torch.zeros(()), j <= i),
    "added first": lambda s, i, j: kept(torch.zeros(()), j <= i) + s,
    "one after the other": lambda s, i, j: kept(kept(s, j <= i), i - j < 4),
    "one after the other, hidden": lambda s, i, j: s.masked_fill(i - j >= 4, -math.inf).masked_fill(j > i, -math.inf),
    "the same for all": lambda s, i, j: kept(s, (j < 9) & (i >= 0)),
    "in other integers": lambda s, i, j: kept(s, j.int() <= i.int()),
    "backwards": lambda s, i, j: kept(s, j <= 10 - i),
}
LOOSE: dict[str, Mask] = {
    "one of two": lambda s, i, j: kept(s, (j <= i) | (j > 9)),
    "not both": lambda s, i, j: s.masked_fill((j > i) & (i > 3), -math.inf),
    "every other": lambda s, i, j: kept(s, 2 * j <= i),
    "a large number": lambda s, i, j: torch.where(j <= i, s, -1e9),
    "the wrong side": lambda s, i, j: torch.where(j <= i, s, math.inf),
    "of numbers": lambda s, i, j: kept(s, j.float() <= i.float()),
    "of scores": lambda s, i, j: kept(s, s <= 0),
    "equal": lambda s, i, j: kept(s, i == j),
    "multiplied": lambda s, i, j: s * kept(torch.ones(()), j <= i),
}


def bounds(mask: Mask, loaded: torch.dtype | None = None) -> list[Bound]:
    def attention(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
        rows = places if loaded is not None else torch.arange(QUERIES)
        scores = mask(q @ k.transpose(-1, -2), rows[:, None], torch.arange(KEYS))
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return (weights / weights.sum(-1, keepdim=True)) @ v

    inputs = [torch.randn(2, n, 8) for n in (QUERIES, KEYS, KEYS)]
    graph = trace(attention, [*inputs, torch.arange(QUERIES, dtype=loaded)], symbolic=False)
    normalize(graph)
    parts = find_attention(lower_to_loops(graph))
    assert parts is not None and parts.key_count == KEYS
    names = {parts.keys[0]: sympy.Symbol("j"), parts.queries[-1]: sympy.Symbol("i")}
    return visible_keys(parts.scores, parts.keys, lambda axis: names.get(axis, sympy.Symbol("other")))


def check_that_bounds_are_the_mask(found: list[Bound], mask: Mask, positions: Tensor) -> None:
    scores = mask(torch.zeros(QUERIES, KEYS), positions[:, None], torch.arange(KEYS))
    for i, position in enumerate(positions.tolist()):
        values = [
            b.value.subs({"i": i, **{n: evaluated(item, position) for n, item in b.numbers.items()}}) for b in found
        ]
        first = max([0, *(value for value, b in zip(values, found, strict=True) if not b.upper)])
        last = min([KEYS - 1, *(value for value, b in zip(values, found, strict=True) if b.upper)])
        assert [j for j in range(KEYS) if first <= j <= last] == (scores[i] == 0).nonzero().flatten().tolist(), i


def evaluated(item: IndexedExpr, loaded: int) -> int:
    """An integer that is computed from one that was loaded."""
    if item.kind == "load":
        return loaded
    if item.kind == "constant":
        return int(item.node.attributes["value"])
    first, *rest = (evaluated(operand, loaded) for operand in item.operands)
    name = item.node.op.name
    return first if name == "cast" else {"add": int.__add__, "sub": int.__sub__, "mul": int.__mul__}[name](first, *rest)


@pytest.mark.parametrize("mask", EXACT.values(), ids=EXACT)
def test_the_bounds_are_the_mask(mask: Mask) -> None:
    check_that_bounds_are_the_mask(bounds(mask), mask, torch.arange(QUERIES))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("mask", EXACT.values(), ids=EXACT)
def test_the_bounds_of_loaded_positions_are_the_mask(mask: Mask, dtype: torch.dtype) -> None:
    check_that_bounds_are_the_mask(bounds(mask, dtype), mask, torch.tensor([3, 0, 12, 7, 7, 1, 20, 1, 2, 5, 11]))


@pytest.mark.parametrize("mask", LOOSE.values(), ids=LOOSE)
def test_unproven_masks_have_no_bounds(mask: Mask) -> None:
    assert bounds(mask) == []
    assert bounds(mask, torch.int64) == []


LOWEST = torch.finfo(torch.float32).min
MASKS: dict[str, tuple[Mask, list[tuple[bool | float, float]]]] = {
    "infinite": (lambda s, i, j: kept(s, i == j), [(False, -math.inf)]),
    "lowest": (lambda s, i, j: torch.where(i == j, s, LOWEST), [(False, LOWEST)]),
    "lowest, by position": (lambda s, i, j: s.masked_fill(j > i, LOWEST), [(True, LOWEST)]),
    "added": (lambda s, i, j: s + torch.where(i == j, torch.zeros(()), torch.full((), LOWEST)), [(False, LOWEST)]),
    "loaded numbers": (lambda s, i, j: s + i.float() * j, []),
    "nearly as low": (lambda s, i, j: torch.where(i == j, s, LOWEST / 2), []),
    "a bound": (lambda s, i, j: kept(s, j <= i), []),
    "both": (lambda s, i, j: kept(s.masked_fill(i == j, LOWEST), i * 2 == j), [(False, -math.inf), (True, LOWEST)]),
}


@pytest.mark.parametrize(("mask", "found"), MASKS.values(), ids=MASKS)
def test_masks_that_are_known_before_the_scores(mask: Mask, found: list[tuple[bool | float, float]]) -> None:
    """Each with the value that hides, and the score that it leaves; bounds are left out."""

    def attention(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
        return torch.softmax(mask(q @ k.transpose(-1, -2), places[:, None], torch.arange(KEYS)), -1) @ v

    inputs = [torch.randn(2, n, 8) for n in (QUERIES, KEYS, KEYS)]
    graph = trace(attention, [*inputs, torch.arange(QUERIES)], symbolic=False)
    normalize(graph)
    parts = find_attention(lower_to_loops(graph))
    assert parts is not None
    assert [(m.hidden, m.least) for m in loaded_masks(parts.scores, parts.keys)] == found


def test_arithmetic_that_may_overflow_is_a_run_time_number() -> None:
    """Of 8 bits, 100 more than a loaded 100 is -56: no sum of the two."""

    def behind(s: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return kept(s, j <= (i + 100).long())

    def beside(s: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return kept(s, (j.to(torch.int8) + i).long() <= 7)

    ((bound,), (number,)) = (found := bounds(behind, torch.int8)), found[0].numbers
    assert bound.value == number
    assert bounds(beside, torch.int8) == []


def test_a_position_that_differs_between_keys_is_no_bound() -> None:
    assert bounds(lambda s, i, j: kept(s, (j + i.reshape(-1)[0] * j) <= 7), torch.int64) == []
