"""Whether one loop nest may write into storage that it also reads, and whether it can tell its places beforehand."""

from fusec.analysis.indexing import Located, Nest, Output, walk
from fusec.errors import ScheduleError
from fusec.ir.graph import Value


def check_updates(nest: Nest, kind: str) -> None:
    """See that every write of a nest leaves alone what the nest still has to read.

    A pointwise nest has each element in one iteration, so it may replace what it has loaded there, and only there.

    Raises:
        ScheduleError: where a value would be read after it is written, or a place is found by more than arithmetic.
    """
    if any(i.kind not in _PLAIN for i in walk(place.value for place in nest.places())):
        raise ScheduleError("a kernel cannot tell beforehand where it stores")
    for output in nest.outputs:
        if output.destination is not None and (loads := loads_of(nest, output.destination)):
            if (
                output.place is not None
                or kind != "pointwise"
                or any(i.kind == "lookup" or i.index != output.index for i in loads)
            ):
                raise ScheduleError("a kernel reads what it writes", why=f"it is {output.destination.name}")
            if output.axes and any(o.axes != output.axes for o in nest.outputs if reads(o, loads)):
                raise ScheduleError("a kernel reads what it writes", why="in another loop")


_PLAIN = ("load", "constant", "index", "pointwise")


def loads_of(nest: Nest, value: Value) -> list[Located]:
    """The loads of an input."""
    return [i for i in nest.walk() if i.kind in ("load", "lookup") and i.value is value]


def reads(output: Output, loads: list[Located]) -> bool:
    """Whether an output needs any of these loads, for its value or its place."""
    inside = set(walk([output.root, *([output.place.value] if output.place is not None else ())]))
    return not inside.isdisjoint(loads)
