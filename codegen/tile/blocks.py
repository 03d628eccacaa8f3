"""Ranges of the blocks and parts that a size is divided into, and loops around statements."""

from collections.abc import Sequence
from typing import Literal

import sympy

from fusec.codegen.tile.kernel import Loop, Statement
from fusec.ir.types import Size


def block_range(start: sympy.Expr, length: int, stop: Size) -> tuple[sympy.Expr, Size]:
    """Return the range of one of the blocks that cover all elements before ``stop``; the last block may be shorter.

    Args:
        start: its first element, a multiple of the length.
        length: of a whole block, in elements.
        stop: the end of the range that all blocks cover.
    """
    whole = sympy.sympify(stop).is_Integer and stop % length == 0
    return start, start + length if whole else sympy.Min(start + length, stop)


def block_count(size: Size, length: Size) -> Size:
    """Return the number of blocks of a length that cover a size."""
    if isinstance(size, int) and isinstance(length, int):
        return -(-size // length)
    return sympy.floor((size + length - 1) / sympy.sympify(length))


def part_range(part: sympy.Expr, parts: int, block: int, size: Size) -> tuple[sympy.Expr, Size]:
    """Return the range of one of the parts of a size, in whole blocks; empty where there are too few blocks."""
    span = -(-size // (block * parts)) * block
    start = part * span
    return start, start + span if span * parts == size else sympy.Min(start + span, size)


def grid(
    statements: list[Statement], loops: Sequence[tuple[str, Size]], kind: Literal["grid", "serial"] = "grid"
) -> tuple[Statement, ...]:
    """Wrap statements in loops, outermost first."""
    body = tuple(statements)
    for name, size in reversed(loops):
        body = (Loop(name, 0, size, 1, kind, body),)
    return body
