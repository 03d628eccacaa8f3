"""Structural equality of graphs: names are ignored, and constants are compared by value, not by node."""

import math
from typing import Any

import sympy

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.printer import is_inline
from fusec.ir.types import ScalarType, Size, TensorType, same_shape, same_size


def equal_graphs(a: Graph, b: Graph, *, order: bool = False, sources: bool = False) -> bool:
    """Return whether two graphs compute the same outputs by the same nodes.

    Args:
        a: one graph.
        b: the other.
        order: nodes must also come in the same order, dead ones included; otherwise only ordered nodes and
            writes must, and nodes that no output and no effect needs are ignored.
        sources: the source locations must be equal too.
    """
    return difference(a, b, order=order, sources=sources) is None


def difference(a: Graph, b: Graph, *, order: bool = False, sources: bool = False) -> str | None:
    """Return the first difference between two graphs, in one line; None where they are equal."""
    return _Comparison(a, b, order, sources).run()


class _Comparison:
    """Pairs the nodes of two graphs, from the outputs and effects upwards."""

    def __init__(self, a: Graph, b: Graph, order: bool, sources: bool) -> None:
        self.a, self.b, self.order, self.sources = a, b, order, sources
        self.pairs: dict[Node, Node] = {}
        self.reverse: dict[Node, Node] = {}
        self.pending: list[tuple[Node, Node]] = []

    def run(self) -> str | None:
        """Compare the graphs and return the first difference; None where they are equal."""
        a, b = self.a, self.b
        if len(a.inputs) != len(b.inputs) or len(a.outputs) != len(b.outputs):
            return "the numbers of inputs or outputs differ"
        for i, (x, y) in enumerate(zip(a.inputs, b.inputs, strict=True)):
            if not same_attribute(x.type, y.type):
                return f"input {i} is {x.type} and {y.type}"
            if x.frozen != y.frozen:
                return f"only one input {i} is frozen"
        if not same_attribute(tuple(a.output_types), tuple(b.output_types)):
            return "the declared output types differ"
        roots_a, roots_b = self._roots(a), self._roots(b)
        if len(roots_a) != len(roots_b):
            return f"{len(roots_a)} and {len(roots_b)} nodes to compare in order"
        for i, (x, y) in enumerate(zip(a.outputs, b.outputs, strict=True)):
            if found := self._values(x, y):
                return f"output {i}: {found}"
        for m, n in zip(roots_a, roots_b, strict=True):
            if found := self._pair(m, n):
                return found
        while self.pending:
            if found := self._nodes(*self.pending.pop()):
                return found
        return None

    def _roots(self, graph: Graph) -> list[Node]:
        outputs = set(graph.outputs)
        if self.order:
            return [n for n in graph.nodes if not is_inline(n, outputs)]
        return [n for n in graph.nodes if n.has_effect]

    def _values(self, x: Value, y: Value) -> str | None:
        m, n = x.producer, y.producer
        if m is None or n is None:
            return None if m is n and x.index == y.index else f"{x!r} against {y!r}"
        if m.op.name == n.op.name == "constant":
            same = same_attribute(_number(m), _number(n))
            return None if same else f"the numbers {_number(m)} and {_number(n)} differ"
        return f"{x!r} against {y!r}" if x.index != y.index else self._pair(m, n)

    def _pair(self, m: Node, n: Node) -> str | None:
        if m in self.pairs or n in self.reverse:
            return None if self.pairs.get(m) is n else f"{m!r} is shared in one graph and repeated in the other"
        self.pairs[m], self.reverse[n] = n, m
        self.pending.append((m, n))
        return None

    def _nodes(self, m: Node, n: Node) -> str | None:
        where = f"{m.op.name} {m.results[0].name if m.results else ''}".rstrip()
        if m.op is not n.op or len(m.operands) != len(n.operands):
            return f"{where} against {n.op.name}"
        if m.attributes.keys() != n.attributes.keys():
            return f"{where}: attributes {sorted(m.attributes)} and {sorted(n.attributes)}"
        for key, value in m.attributes.items():
            other = n.attributes[key]
            if isinstance(value, Graph) and isinstance(other, Graph):
                inner = difference(value, other, order=self.order, sources=self.sources)
                if inner or value.name != other.name:
                    return f"{where}: {key}: {inner or 'the names differ'}"
            elif not same_attribute(value, other):
                return f"{where}: {key} is {value} and {other}"
        if not same_attribute(tuple(r.type for r in m.results), tuple(r.type for r in n.results)):
            return f"{where}: the result types differ"
        if self.sources and m.sources != n.sources:
            return f"{where}: the sources differ"
        for i, (x, y) in enumerate(zip(m.operands, n.operands, strict=True)):
            if found := self._values(x, y):
                return f"{where}, operand {i}: {found}"
        return None


def same_attribute(a: Any, b: Any) -> bool:
    """Return whether two attribute values or types are equal; sizes are equal if they are so for all symbols."""
    if isinstance(a, TensorType) and isinstance(b, TensorType):
        return (
            (a.dtype, a.device) == (b.dtype, b.device) and same_shape(a.shape, b.shape) and _same(a.strides, b.strides)
        )
    if isinstance(a, ScalarType) and isinstance(b, ScalarType):
        return a.kind == b.kind and same_attribute(a.expr, b.expr)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same_attribute, a, b))
    a, b = _plain(a), _plain(b)
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        return same_size(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


def _same(a: tuple[Size, ...], b: tuple[Size, ...]) -> bool:
    return a == b or same_shape(a, b)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, sympy.Integer) else value


def _number(node: Node) -> tuple[Any, ...]:
    return tuple(
        node.attributes.get(key, default) for key, default in (("value", None), ("dtype", None), ("device", "cpu"))
    )
