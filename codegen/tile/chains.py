"""Blocked summation: long sums as sums of sums, since rounding error grows with the length of a chain of additions."""

from collections.abc import Sequence
from dataclasses import dataclass

from fusec.loops.affine import Axis

# Additions in one chain. Lanes are partial sums already, and are folded at the end of each chain.
_LENGTH = 32
_TILES = 128


@dataclass(frozen=True)
class Run:
    """One loop of a reduction: along an axis, or over the starts of runs along it."""

    axis: Axis
    step: int
    """Elements in one step of the loop over the axis itself: the lanes of a tile."""
    covers: int = 0
    """Elements of a run, where the loop goes over the starts of runs; else 0."""
    within: int = 0
    """Elements of the enclosing run; 0 for the whole axis."""
    ends_chain: bool = False
    """The loops inside have a sum of their own, which is then added."""


def chained(nest: Sequence[tuple[Axis, int]], cuts: int = 4) -> list[Run]:
    """Return the loops of a reduction, outer first, such that no chain of additions is long.

    Args:
        nest: axes, outer first, each with the number of elements in a step.
        cuts: maximum nesting of blocked summation along one axis; each level needs one more set of accumulators.
    """
    loops: list[Run] = []
    """Inner first."""
    room = _LENGTH
    for axis, step in reversed(nest):
        lanes = step > 1
        room = _TILES if lanes else room
        covered, axis_loops = step, [Run(axis, step)]
        if not lanes and room < 4 and _count(axis, 1) > room:
            axis_loops, room = [Run(axis, step, ends_chain=True)], _LENGTH
        while _count(axis, covered) > room and len(axis_loops) <= cuts:
            covered *= room
            axis_loops[-1] = Run(axis, step, axis_loops[-1].covers, covered, axis_loops[-1].ends_chain)
            axis_loops.append(Run(axis, step, covered, ends_chain=True))
            room = _LENGTH
        room = max(1, int(room // max(1, _count(axis, covered))))
        loops += axis_loops
    return loops[::-1]


def _count(axis: Axis, length: int) -> float:
    """Return the number of runs of a length along an axis; infinity for unknown sizes."""
    return -(-axis.size // length) if isinstance(axis.size, int) else float("inf")
