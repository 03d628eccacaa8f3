"""Legality of writes into storage that the same loop nest reads, and of checks ahead of it."""

from fusec.errors import ScheduleError
from fusec.ir.graph import Value
from fusec.ir.types import product
from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr, LoopNest, Output, walk


def check_updates(nest: LoopNest, kind: str, in_order: bool = True) -> None:
    """See that every write of a nest leaves alone what the nest still has to read.

    A pointwise nest has each element in one iteration, so it may replace what it has loaded there. Loops that run one
    iteration after the other, those over axes that not all outputs have, may also move elements towards their start.

    Args:
        nest: the located region.
        kind: of kernel.
        in_order: whether an iteration sees nothing of those that follow in such loops.

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
                if not all(_in_time(nest, i, reader, output, in_order) for i in read):
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


def _in_time(nest: LoopNest, load: IndexedExpr, reader: Output, writer: Output, in_order: bool) -> bool:
    """Whether what one output reads is read before another replaces it."""
    if not writer.axes and load.index == writer.index:  # a number, which is loaded before anything else
        count = product(tuple(axis.size for axis in reader.axes))
        return isinstance(count, int) and count <= _ALONE
    moved = [(a, b) for a, b in zip(load.index, writer.index, strict=True) if a != b]
    if not moved:
        return reader.axes == writer.axes
    ((read, stored), *more) = moved
    spread = {*read.axes, *stored.axes}
    if not in_order or more or not spread.isdisjoint(_parallel(nest)):
        return False
    if reader.axes != writer.axes:
        return _turn(nest, reader) < _turn(nest, writer)
    if read.terms != stored.terms or len(read.terms) > 1:
        return False
    ahead = read.offset - stored.offset
    return isinstance(ahead, int) and ahead > 0


def _parallel(nest: LoopNest) -> frozenset[Axis]:
    """The axes that all outputs have: those of the grid, and of lanes."""
    return frozenset.intersection(*(output.axes for output in nest.outputs))


def _turn(nest: LoopNest, output: Output) -> int:
    """When the loops over an output's axes are run: outputs of the same axes go together."""
    return next(i for i, other in enumerate(nest.outputs) if other.axes == output.axes)
