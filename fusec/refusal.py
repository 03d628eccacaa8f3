"""Why something does not apply: legality as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusec.errors import FusecError


@dataclass(frozen=True)
class Refusal:
    """Why a kernel, a fusion or a move is not made; functions that check legality return one, or None.

    Attributes:
        reason: what is in the way and why, in one line, as a remark says it.
        suggestion: an edit that would remove the reason; "" where none is known.
    """

    reason: str
    suggestion: str = ""

    @classmethod
    def of(cls, error: FusecError) -> Refusal:
        """Return the reason and the fix of an error."""
        return cls(error.reason, error.fix)
