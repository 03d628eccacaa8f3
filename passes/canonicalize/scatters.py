"""Scatters of one number to a few places of each row, as routers mark the groups of experts that are chosen."""

from functools import reduce

from fusec.ir.graph import Graph, Node, Value, storage
from fusec.ir.types import same_shape
from fusec.loops.intervals import interval
from fusec.passes.canonicalize.numbers import number_throughout
from fusec.rewriting.driver import simplifies

_MOST_PLACES = 8
"""The most places that every element is compared with."""


@simplifies("scatter", conditional=True)
def scattered_number(graph: Graph, node: Node) -> Value | None:
    """A scatter of a number along the last dim, to places that are in range, is a choice for each element."""
    (destination, value, places), dim = node.operands, node.attributes["dim"]
    copy, number = destination.producer, number_throughout(value)
    if copy is None or not copy.is_op("full", "write") or number is None or storage(destination).producer is None:
        return None
    if any(node.result in user.written for user in node.result.users):
        return None
    device = destination.tensor.device
    x = copy.operands[1] if copy.is_op("write") else graph.constant(copy.attributes["value"], value.dtype, device)
    lead, (n, count) = destination.shape[:-1], (destination.shape[-1], places.shape[-1])
    values = interval(places)
    if "combine" in node.attributes:
        return None
    if dim != -1 or "dim" in copy.attributes or not same_shape(places.shape[:-1], lead):
        return None
    if not (isinstance(n, int) and isinstance(count, int) and 0 < count <= _MOST_PLACES):
        return None
    if values is None or values[0] < 0 or values[1] >= n:
        return None  # a kernel reports a place out of range
    positions = graph.add_node("iota", [], {"size": n, "dtype": places.dtype, "device": device}).result

    def is_place(i: int) -> Value:
        place = graph.add_node("slice", [places], {"dim": -1, "start": i, "stop": i + 1, "step": 1}).result
        return graph.add_node("eq", [place, positions]).result

    def either(a: Value, b: Value) -> Value:
        return graph.add_node("or", [a, b]).result

    chosen = reduce(either, map(is_place, range(count)))
    return graph.add_node("where", [chosen, graph.constant(number, x.dtype, device), x]).result
