"""Keys of what nodes and graphs compute: equal keys, equal computations."""

from collections.abc import Callable, Hashable, Iterable
from functools import cache

from fusec.ir.graph import Graph, Node, Value


def operation(node: Node) -> tuple[Hashable, ...]:
    """Return a key of a node's operation, independent of its operands."""
    return (node.op.name, *((key, _exactly(value)) for key, value in sorted(node.attributes.items())))


def spelling(thing: Node | Value) -> Hashable:
    """Return the part of a graph's key that one node or input contributes."""
    if isinstance(thing, Value):
        return (thing.type, "frozen") if thing.frozen else thing.type
    return operation(thing), tuple(r.type for r in thing.results)


def structure(body: Graph) -> tuple[Hashable, ...]:
    """A key that two graphs share exactly if they compute the same on the same types."""
    return structure_of_piece(body.inputs, body.nodes, body.outputs)


def structure_of_piece(
    inputs: Iterable[Value],
    nodes: Iterable[Node],
    outputs: Iterable[Value],
    spell: Callable[[Node | Value], Hashable] = spelling,
) -> tuple[Hashable, ...]:
    """The same of a piece of a graph.

    Args:
        inputs: the values that the piece reads.
        nodes: its nodes, operands before users.
        outputs: the values that it produces.
        spell: ``spelling``, or an abbreviation of it.
    """
    inputs, nodes = tuple(inputs), tuple(nodes)
    number = {v: i for i, v in enumerate([*inputs, *[r for n in nodes for r in n.results]])}.__getitem__
    read = [(spell(n), *map(number, n.operands)) for n in nodes]
    return (*map(spell, inputs), *read, tuple(map(number, outputs)))


def abbreviations() -> Callable[[Node | Value], Hashable]:
    """Return numbers for keys, quick to compare; keys are comparable only under the same abbreviations."""
    numbers: dict[Hashable, int] = {}
    return cache(lambda thing: numbers.setdefault(spelling(thing), len(numbers)))


def _exactly(value: object) -> Hashable:
    """Return a key that distinguishes 1, 1.0, True, 0.0 and -0.0, in tuples too; all NaNs are equal."""
    if isinstance(value, tuple):
        return tuple(map(_exactly, value))
    if isinstance(value, float | int):
        return (type(value).__name__, repr(value))
    assert isinstance(value, Hashable)
    return value
