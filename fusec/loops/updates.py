"""Legality of writes into storage that the same loop nest reads, and of checks ahead of it."""

from collections.abc import Callable
from dataclasses import dataclass

from fusec.errors import ScheduleError
from fusec.ir.graph import Value
from fusec.ir.types import product
from fusec.loops.indexing import IndexedExpr, LoopNest, Output, walk


@dataclass(frozen=True)
class Move:
    """A load from storage that an output writes, at another index than it is written at, or over other axes."""

    load: IndexedExpr
    reader: Output
    """The output that needs the load."""
    writer: Output


def check_updates(nest: LoopNest, kind: str, moves: Callable[[LoopNest, Move], bool]) -> None:
    """Check that no write of a nest changes what the nest still has to read.

    A pointwise nest has each element in one iteration, so it may replace what it has loaded there. Whether it may also
    move elements depends on the order in which a target runs its loops.

    Args:
        nest: the loops of a region.
        kind: of kernel.
        moves: returns whether a move is legal on the target.

    Raises:
        ScheduleError: where a value would be read after it is written, or a dynamic index is more than arithmetic of
            loads.
    """
    if any(i.kind not in _PLAIN for i in walk(index.value for index in nest.dynamic_indices())):
        raise ScheduleError("a kernel cannot tell beforehand where it stores")
    for output in nest.outputs:
        if output.destination is not None and (loads := loads_of(nest, output.destination)):
            if output.dynamic_index is not None or kind != "pointwise" or any(i.kind == "lookup" for i in loads):
                raise ScheduleError("a kernel reads what it writes", why=f"it is {output.destination.name}")
            for reader in nest.outputs:
                read = [i for i in loads if reads(reader, [i])]
                if not all(_in_time(nest, Move(i, reader, output), moves) for i in read):
                    raise ScheduleError("a kernel reads what it writes", why=f"it is {output.destination.name}")


_ALONE = 4096
"""Elements that one thread may compute by itself: loops have nothing in common with the one that replaces a number."""
_PLAIN = ("load", "constant", "index", "pointwise")


def loads_of(nest: LoopNest, value: Value) -> list[IndexedExpr]:
    """The loads of an input."""
    return [i for i in nest.walk() if i.kind in ("load", "lookup") and i.value is value]


def reads(output: Output, loads: list[IndexedExpr]) -> bool:
    """Whether an output needs any of these loads, for its value or its dynamic index."""
    inside = set(walk([output.root, *([output.dynamic_index.value] if output.dynamic_index is not None else ())]))
    return not inside.isdisjoint(loads)


def _in_time(nest: LoopNest, move: Move, moves: Callable[[LoopNest, Move], bool]) -> bool:
    """Return whether one output reads a value before another replaces it."""
    load, reader, writer = move.load, move.reader, move.writer
    if load.index != writer.index:
        return moves(nest, move)
    if writer.axes:
        return reader.axes == writer.axes
    count = product(tuple(axis.size for axis in reader.axes))  # a number, which is loaded before anything else
    return isinstance(count, int) and count <= _ALONE
