"""The operation of a region's body that each name of a kernel belongs to, and so each line of its text."""

import re
from collections.abc import Iterable, Mapping

from fusec.codegen.tile.kernel import Statement, walk
from fusec.ir.graph import Graph, Value

_NAME = re.compile(r"[A-Za-z_]\w*")


def name_origins(body: Graph, named: Mapping[str, Value], statements: Iterable[Statement]) -> dict[str, int]:
    """Return the origin of each name: the number of a node of the body, or -1 - i for its input i.

    A schedule also has names that are no value of the body, such as the rescaled sums of online softmax. They get the
    origin of the statement that reads them, or else of a statement that they read.

    Args:
        body: the graph that the kernel computes.
        named: names of values of the body.
        statements: of the kernel.
    """
    numbers = {node: i for i, node in enumerate(body.nodes)}
    inputs = {value: -1 - i for i, value in enumerate(body.inputs)}
    found = {name: numbers[v.producer] if v.producer else inputs[v] for name, v in named.items()}
    every = list(walk(statements))
    for s in every:
        _share(found, s.reads, s.stores)  # memory belongs to what is stored there, not to its reader
    flat = [(tuple(filter(None, (s.result, *s.stores))), (*s.reads, *s.loads)) for s in every]
    for written, read in reversed(flat):
        _share(found, written, read)
    for written, read in flat:
        _share(found, read, written)
    return found


def line_origins(text: str, origins: Mapping[str, int]) -> list[int | None]:
    """Return the origin of each line of a kernel's text: that of the first name in it which has one."""
    known = {spelled: origin for name, origin in origins.items() for spelled in (name, f"{name}_ptr")}
    names = (_NAME.findall(re.sub(r"^\s*(//|#).*", "", line)) for line in text.splitlines())
    return [next((known[name] for name in line if name in known), None) for line in names]


def _share(found: dict[str, int], known: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Set the origin of names that have none to the first one that is known."""
    origin = next((found[name] for name in known if name in found), None)
    if origin is not None:
        for name in names:
            found.setdefault(name, origin)
