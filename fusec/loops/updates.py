"""Legality of writes into storage that the same loop nest reads, and of checks before it."""

from collections.abc import Callable
from dataclasses import dataclass

from fusec.errors import ScheduleError
from fusec.ir.graph import Value
from fusec.ir.types import product
from fusec.loops.indexing import IndexedExpr, LoopNest, Output, walk


@dataclass(frozen=True)
class Move:
    """A load from storage that an output writes at another index."""

    load: IndexedExpr
    reader: Output
    """The output that depends on the load."""
    writer: Output


def check_updates(nest: LoopNest, kind: str, moves: Callable[[LoopNest, Move], bool]) -> None:
    """Check that no write of a nest overwrites a value that the nest reads later.

    Each iteration of a pointwise nest computes one element and may overwrite what it has loaded. Whether it may also
    move elements depends on the order of a target's iterations.

    Args:
        nest: the loops of a region.
        kind: of kernel.
        moves: returns whether a move is legal on the target.

    Raises:
        ScheduleError: where a value would be read after it is overwritten, or a dynamic index is not arithmetic of
            loads, so that it cannot be checked before the loops.
    """
    if any(i.kind not in _PLAIN for i in walk(index.value for index in nest.dynamic_indices())):
        raise ScheduleError("a dynamic index cannot be checked before the kernel", why="it is not arithmetic of loads")
    for output in nest.outputs:
        if output.destination is not None and (loads := loads_of(nest, output.destination)):
            conflict = ScheduleError("a kernel reads what it writes", why=f"it is {output.destination.name}")
            if output.dynamic_index is not None or kind != "pointwise" or any(i.kind == "lookup" for i in loads):
                raise conflict
            for reader in nest.outputs:
                read = [i for i in loads if reads(reader, [i])]
                if not all(_is_read_first(nest, Move(i, reader, output), moves) for i in read):
                    raise conflict


_MAX_SERIAL = 4096
"""Elements that one thread may compute, where a nest overwrites a number that it reads."""
_PLAIN = ("load", "constant", "index", "pointwise")


def loads_of(nest: LoopNest, value: Value) -> list[IndexedExpr]:
    """Return the loads of an input, lookups included."""
    return [i for i in nest.walk() if i.kind in ("load", "lookup") and i.value is value]


def reads(output: Output, loads: list[IndexedExpr]) -> bool:
    """Return whether an output depends on one of these loads, for its value or its dynamic index."""
    inside = set(walk([output.root, *([output.dynamic_index.value] if output.dynamic_index is not None else ())]))
    return not inside.isdisjoint(loads)


def _is_read_first(nest: LoopNest, move: Move, moves: Callable[[LoopNest, Move], bool]) -> bool:
    """Return whether one output reads a value before another overwrites it."""
    load, reader, writer = move.load, move.reader, move.writer
    if load.index != writer.index:
        return moves(nest, move)
    if writer.axes:
        return reader.axes == writer.axes
    count = product(tuple(axis.size for axis in reader.axes))  # one element, which is loaded before the loops
    return isinstance(count, int) and count <= _MAX_SERIAL
