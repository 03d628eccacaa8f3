"""The edit that completes a match: its root is computed as the pattern does, from what that was aligned with.

It is made in a copy of the graph, to find out whether the fusion matches then, and whether the values are the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import Size
from fusec.rewriting.application import substituted
from fusec.rewriting.driver import cut
from fusec.rewriting.match import Pattern

_THROUGH = Trait.POINTWISE | Trait.REDUCTION | Trait.SOURCE | Trait.VIEW
_MOST_NODES = 200


@dataclass(frozen=True, eq=False)
class Substitution:
    """A pattern, and the values of a graph that it is aligned with."""

    pattern: Pattern
    root: Value
    """The value that the pattern would compute, scaled by the factors."""
    values: Mapping[Value, Value]
    """By parameter and number of the pattern, as far as they are aligned."""
    factors: tuple[tuple[Node, Value], ...] = ()
    """Operations inside that scale the result, and the operand of each that leads to the pattern; the first is read by
    the second."""

    @property
    def is_possible(self) -> bool:
        """True where all parameters are aligned, and the pattern has no regions of other fusions."""
        numbers = (n.result for n in self.pattern.graph.nodes if n.is_op("constant") and self._is_scalar(n))
        needed = [*self.pattern.tensors, *numbers]
        return all(v in self.values for v in needed) and not any(n.is_op("region") for n in self.pattern.computing)

    def made(self, graph: Graph, to: Mapping[Value, Value]) -> tuple[Value, Value]:
        """Add the operations of the pattern, then the factors, to a graph; return the results of both.

        Args:
            graph: takes the operations.
            to: the values of the original graph, there.
        """
        found = {p: to[self.values[p]] for p in self.pattern.tensors}
        sizes = self._sizes()
        for node in self.pattern.graph.nodes:
            if node.has(Trait.SOURCE):
                found[node.result] = self._number(node, graph, to, sizes)
                continue
            attributes = {k: substituted(v, sizes) for k, v in node.attributes.items()}
            copy = graph.add_node(node.op.name, [found[v] for v in node.operands], attributes, sources=self._sources())
            found.update(zip(node.results, copy.results, strict=True))
        inner = outer = found[self.pattern.root]
        for node, path in self.factors:
            operands = [outer if v is path else to[v] for v in node.operands]
            outer = graph.add_node(node.op.name, operands, dict(node.attributes), sources=node.sources).result
        return inner, outer

    def sides(self) -> tuple[Graph, Graph]:
        """Return the operations before and after the edit as graphs of the same inputs."""
        known = {self.values[p]: None for p in self.pattern.tensors}
        nodes: dict[Node, None] = {}

        def collect(value: Value) -> None:
            node = value.producer
            if value in known or node is None or node in nodes or not node.has(_THROUGH) or len(nodes) > _MOST_NODES:
                return
            for operand in node.operands:
                collect(operand)
            nodes[node] = None

        for value in (self.root, *self.values.values(), *(v for node, _ in self.factors for v in node.operands)):
            collect(value)
        leaves = {v: None for node in nodes for v in node.operands if v.producer not in nodes}
        inputs = list({**known, **leaves})
        after = Graph()
        to = {v: after.add_input(v.type, v.name) for v in inputs}
        after.splice([n for n in nodes if not any(r in to for r in n.results)], to)
        after.set_outputs([self.made(after, to)[1]])
        after.erase_dead()
        return cut(inputs, list(nodes), [self.root]), after

    def _is_scalar(self, node: Node) -> bool:
        value = node.attributes.get("value")
        return isinstance(value, float) and abs(value) in self.pattern.scalars

    def _number(self, node: Node, graph: Graph, to: Mapping[Value, Value], sizes: Mapping[Any, Any]) -> Value:
        """Return a number of the pattern in a graph: that of a scalar parameter, its own, or a size."""
        dtype = node.result.dtype
        if self._is_scalar(node):
            value = self.values[node.result]
            known = value.producer.attributes.get("value") if value.producer else None
            return to[value] if known is None else graph.constant(known, dtype)
        if node.is_op("size"):
            number = substituted(node.attributes["expr"], dict(sizes))
            if isinstance(number, int):
                return graph.constant(float(number) if dtype.is_float else number, dtype)
            return graph.add_node("size", [], {**node.attributes, "expr": number}).result
        return graph.add_node(node.op.name, [], dict(node.attributes)).result

    def _sizes(self) -> dict[sympy.Symbol, Size]:
        """Return the sizes that the symbols of the pattern have here, from its parameters."""
        pairs = (
            (a, b)
            for p in self.pattern.tensors
            for a, b in zip(p.shape[::-1], self.values[p].shape[::-1], strict=False)
        )
        return {a: b for a, b in pairs if isinstance(a, sympy.Symbol)}

    def _sources(self) -> Any:
        return self.root.producer.sources if self.root.producer else ()
