"""Bounds of visible keys: exactly the keys that a mask of indices shows, and none where a mask is something else."""

import math
from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor

from fusec.analysis.attention import find_attention
from fusec.analysis.indexing import locate
from fusec.analysis.visible import visible_keys
from fusec.frontend import trace
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


def bounds(mask: Mask, loaded: bool = False) -> tuple[list[sympy.Expr], list[sympy.Expr]]:
    def attention(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
        rows = places if loaded else torch.arange(QUERIES)
        scores = mask(q @ k.transpose(-1, -2), rows[:, None], torch.arange(KEYS))
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return (weights / weights.sum(-1, keepdim=True)) @ v

    inputs = [torch.randn(2, n, 8) for n in (QUERIES, KEYS, KEYS)]
    graph = trace(attention, [*inputs, torch.arange(QUERIES)], symbolic=False)
    normalize(graph)
    parts = find_attention(locate(graph))
    assert parts is not None and parts.keys.size == KEYS
    names = {parts.keys: sympy.Symbol("j"), parts.queries[-1]: sympy.Symbol("i")}
    return visible_keys(parts.scores, parts.keys, lambda axis: names.get(axis, sympy.Symbol("other")))


@pytest.mark.parametrize("mask", EXACT.values(), ids=EXACT)
def test_the_bounds_are_the_mask(mask: Mask) -> None:
    lower, upper = bounds(mask)
    scores = mask(torch.zeros(QUERIES, KEYS), torch.arange(QUERIES)[:, None], torch.arange(KEYS))
    for i in range(QUERIES):
        first = max([0, *(bound.subs("i", i) for bound in lower)])
        last = min([KEYS - 1, *(bound.subs("i", i) for bound in upper)])
        assert [j for j in range(KEYS) if first <= j <= last] == (scores[i] == 0).nonzero().flatten().tolist(), i


@pytest.mark.parametrize("mask", LOOSE.values(), ids=LOOSE)
def test_what_is_not_proven_bounds_nothing(mask: Mask) -> None:
    assert bounds(mask) == ([], [])


def test_positions_that_are_loaded_bound_nothing() -> None:
    assert bounds(EXACT["at most"], loaded=True) == ([], [])
    assert bounds(EXACT["window of offsets"], loaded=True) == ([], [])
