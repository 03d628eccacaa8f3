"""Common subexpression elimination; outputs with storage of their own keep it."""

from collections.abc import Hashable

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.structure import operation

_KEPT = Trait.OPAQUE | Trait.ORDERED | Trait.WRITE | Trait.REGION


def merge_equal(graph: Graph) -> int:
    """Merge the nodes with equal computations; return how many were erased."""
    seen: dict[Hashable, Node] = {}
    position: dict[Value, int] = {v: i for i, v in enumerate(graph.inputs)}
    written, returned = _written(graph), _returned(graph)
    count = 0
    for node in graph.nodes:
        for r in node.results:
            position[r] = len(position)
        if node.has(_KEPT) or node in written:
            continue
        key = _key(node, position)
        first = seen.setdefault(key, node)
        if first is node:
            continue
        if node in returned:
            if first in returned:
                continue
            returned.add(first)
        graph.replace_value(node.result, first.result)
        first.sources = tuple(dict.fromkeys((*first.sources, *node.sources)))[:8]
        graph.erase(node)
        count += 1
    return count


def _key(node: Node, position: dict[Value, int]) -> Hashable:
    operands = [position[v] for v in node.operands]
    if node.has(Trait.COMMUTATIVE):
        operands.sort()
    return (operation(node), tuple(operands))


def _roots(values: list[Value]) -> set[Node]:
    found = set()
    for value in values:
        while value.producer is not None:
            found.add(value.producer)
            if not value.producer.is_alias:
                break
            value = value.producer.operands[0]
    return found


def _written(graph: Graph) -> set[Node]:
    """Return the nodes whose results are written later: they must not share storage."""
    return _roots([n.operands[0] for n in graph.nodes if n.has(Trait.WRITE)])


def _returned(graph: Graph) -> set[Node]:
    """Return the nodes that produce the storage of outputs."""
    return {n for n in _roots(graph.outputs) if not n.is_alias}
