"""Refusals: the results of legality checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusec.errors import FusecError


@dataclass(frozen=True)
class Refusal:
    """The reason that a kernel, a fusion or a move is not legal; legality checks return one, or None.

    Attributes:
        reason: one line, for a remark.
        suggestion: an edit that would make it legal; "" where none is known.
    """

    reason: str
    suggestion: str = ""

    @classmethod
    def of(cls, error: FusecError) -> Refusal:
        """Return the reason and the fix of an error."""
        return cls(error.reason, error.fix)
