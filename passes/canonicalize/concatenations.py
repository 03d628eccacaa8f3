"""A softmax over scores and a few more columns, as attention sinks are written: each part for itself."""

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import Size, same_size
from fusec.rewriting.driver import simplifies

_COMBINED = {"max": "maximum", "sum": "add"}


class _Parts:
    """Arithmetic on a concatenation along one dim is done on each part; all parts but one are single columns."""

    def __init__(self, graph: Graph, dim: int) -> None:
        self.graph, self.dim = graph, dim
        self.sizes: list[Size] = []
        self.made: dict[tuple[Value, int], Value] = {}

    def find(self, value: Value) -> bool:
        """Return whether there is such a concatenation, with only arithmetic in between."""
        pending, seen = [value], set[Value]()
        while pending:
            value = pending.pop()
            node = value.producer
            if value in seen or self.is_column(value):
                continue
            seen.add(value)
            if node is None:
                return False
            if node.is_op("concat") and node.attributes["dim"] == self.dim:
                sizes = [v.shape[self.dim] for v in node.operands]
                wide = [n for n in sizes if n != 1]
                if len(wide) > 1 or (self.sizes and not _same(sizes, self.sizes)):
                    return False
                self.sizes = sizes
            elif node.has(Trait.POINTWISE) and not node.has(Trait.SOURCE):
                pending += node.operands
            else:
                return False
        return len(self.sizes) > 1

    def is_column(self, value: Value) -> bool:
        """Return whether a value is the same along the dim."""
        return len(value.shape) < -self.dim or value.shape[self.dim] == 1

    def of(self, value: Value, part: int) -> Value:
        """Return one part of a value."""
        node = value.producer
        if self.is_column(value):
            return value
        assert node is not None
        if node.is_op("concat"):
            return node.operands[part]
        if (value, part) not in self.made:
            operands = [self.of(v, part) for v in node.operands]
            self.made[value, part] = self.graph.add_node(node.op.name, operands, dict(node.attributes)).result
        return self.made[value, part]


@simplifies("max", "sum", exact=False)
def softmax_of_parts(graph: Graph, node: Node) -> Value | None:
    """The maximum of scores and single columns, or the sum of their exponentials, is that of each part, combined.

    So is the sum of a few columns, such as of the scores that are selected.
    """
    (x,), dims = node.operands, node.attributes["dims"]
    if len(dims) != 1:
        return None
    parts = _Parts(graph, dims[0])
    if not parts.find(x) or (node.is_op("sum") and not _is_exponential(x) and any(n != 1 for n in parts.sizes)):
        return None
    out: Value | None = None
    for i, n in enumerate(parts.sizes):
        part = parts.of(x, i)
        part = part if n == 1 else graph.add_node(node.op.name, [part], dict(node.attributes)).result
        out = part if out is None else graph.add_node(_COMBINED[node.op.name], [out, part]).result
    return out


def _is_exponential(value: Value) -> bool:
    node = value.producer
    while node is not None and node.is_op("cast"):
        node = node.operands[0].producer
    return node is not None and node.is_op("exp")


def _same(a: list[Size], b: list[Size]) -> bool:
    return len(a) == len(b) and all(same_size(m, n) for m, n in zip(a, b, strict=True))
