"""Combinations of parameters: by default so few that every value occurs; the others are thorough."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def rotating(first: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """Return all combinations; by default each value of ``first`` meets one combination of the others, in turn.

    Where there are more of these, ``first`` begins again, so that none of them is left out.
    """
    turns = list(product(*others))
    chosen = {(i % len(first), i % len(turns)) for i in range(max(len(first), len(turns)))}
    return [
        pytest.param(value, *turn, marks=() if (i, j) in chosen else pytest.mark.thorough)
        for (i, value), (j, turn) in product(enumerate(first), enumerate(turns))
    ]


def named(value: Any) -> str:
    """Return the name of a value for the id of a test."""
    return getattr(value, "__name__", str(value))
