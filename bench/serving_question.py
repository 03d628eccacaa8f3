"""A question to a server's step: calls that are compared, and what is asked of their ratio."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Call = Callable[[], object]


@dataclass(frozen=True)
class Question:
    """One workload: the calls that are compared, of which the baseline is the first, and ours begin with ``fusec``."""

    title: str
    kind: str
    """What is required is by kind."""
    calls: dict[str, Call]
    tokens: int = 0
    """That our call processes; 0 where it is a part of a model."""
    flops: int = 0
    """Of its products with weights."""
    dtype: str = "float32"
    most_rounds: int = 1000
    """Rounds that a long call is measured in."""
    figures: Callable[[], dict[str, Any]] = field(default=dict)
    """Further figures of our calls so far."""
