"""Scatters of one number to a few places of each row, as routers mark the groups of experts that are chosen."""

from functools import reduce

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.types import same_shape
from fusec.loops.intervals import interval
from fusec.rewriting.driver import simplifies

_MOST_PLACES = 8
"""The most places that every element is compared with."""


@simplifies("opaque", conditional=True)
def scattered_number(graph: Graph, node: Node) -> Value | None:
    """A scatter of a number along the last dim, to places that are in range, is a choice for each element."""
    if node.attributes["target"] != "aten.scatter.value" or node.attributes["kwargs"] or len(node.operands) != 2:
        return None
    (x, places), (_, dim, _, number) = node.operands, node.attributes["args"]
    lead, (n, count) = x.shape[:-1], (x.shape[-1], places.shape[-1])
    values = interval(places)
    if dim not in (-1, x.tensor.rank - 1) or not same_shape(places.shape[:-1], lead):
        return None
    if not (isinstance(n, int) and isinstance(count, int) and 0 < count <= _MOST_PLACES):
        return None
    if values is None or values[0] < 0 or values[1] >= n:
        return None  # ATen reports a place out of range
    if not isinstance(number, int | float) or (isinstance(number, float) and not x.dtype.is_float):
        return None
    positions = graph.add_node("iota", [], {"size": n, "dtype": places.dtype, "device": x.tensor.device}).result

    def is_place(i: int) -> Value:
        place = graph.add_node("slice", [places], {"dim": -1, "start": i, "stop": i + 1, "step": 1}).result
        return graph.add_node("eq", [place, positions]).result

    def either(a: Value, b: Value) -> Value:
        return graph.add_node("or", [a, b]).result

    chosen = reduce(either, map(is_place, range(count)))
    return graph.add_node("where", [chosen, graph.constant(number, x.dtype, x.tensor.device), x]).result
