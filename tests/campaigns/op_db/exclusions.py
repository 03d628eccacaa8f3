"""What is not compared, and why."""

UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Operators whose results hold whatever memory held; everything but the values is compared."""
EXCLUDED: dict[str, str] = {}
"""Operators by name, each with the reason."""


def undefined(op: str) -> bool:
    """Whether the values that an operator gives are not defined."""
    return op in UNDEFINED


def excluded(op: str, dtype: str, variant: str) -> str:
    """Why a case is left out; "" where it is not."""
    return EXCLUDED.get(op, "")
