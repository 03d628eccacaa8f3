"""Memory planning: offsets in one block for buffers that live from one launch to another."""

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from fusec.ir.types import Size


@dataclass(frozen=True)
class LiveRange:
    """A buffer, and the first and last launch between which it is live."""

    nbytes: int
    """In units of the symbolic factor that all buffers of the block share."""
    first: int
    last: int


def plan(buffers: Sequence[LiveRange], alignment: int) -> tuple[list[int], int]:
    """Return offsets at which no two live buffers overlap, and the length of the block.

    Greedy by size: the largest first, each at the lowest offset that is free. Not optimal in general, but close for
    repeated layers. Offsets are multiples of ``alignment``.
    """
    placed: list[tuple[int, int, LiveRange]] = []
    offsets = [0] * len(buffers)
    for i in sorted(range(len(buffers)), key=lambda i: -buffers[i].nbytes):
        buffer, offset = buffers[i], 0
        length = -(-buffer.nbytes // alignment) * alignment
        for start, stop, other in sorted(placed, key=lambda p: p[0]):
            overlap = buffer.first <= other.last and other.first <= buffer.last
            if overlap and start < offset + length and offset < stop:
                offset = stop
        offsets[i] = offset
        placed.append((offset, offset + length, buffer))
    return offsets, max((stop for _, stop, _ in placed), default=0)


def split_size(nbytes: Size) -> tuple[int, sympy.Expr]:
    """Return an integer and a symbolic factor whose product is a size; the factor of a constant is 1."""
    count, factor = sympy.sympify(nbytes).as_content_primitive()
    return (int(count), factor) if count.is_Integer else (1, sympy.sympify(nbytes))
