"""Uses of values in a graph, and dependences between its nodes, with some nodes inlined into their readers."""

import heapq
from collections.abc import Iterable
from functools import cache

from fusec.ir.graph import Graph, Node, Value


class Uses:
    """Readers, inputs and predecessors of the nodes of a graph that does not change.

    Inlined nodes are recomputed by each reader: uses and dependences are looked up through them.
    """

    def __init__(self, graph: Graph, inlined: Iterable[Node]) -> None:
        self.inlined = set(inlined)
        self.returned = {v.producer for v in graph.outputs}
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.effects = graph.order_of_effects()
        self.readers = cache(self._readers)
        self.predecessors = cache(self._predecessors)
        self.inputs = cache(self._inputs)
        self._order_nodes()

    def _order_nodes(self) -> None:
        """Sort the nodes so that each follows its predecessors.

        The readers of an inlined node must run before its operand is overwritten. Where one of them depends on that
        write, the node is materialized before it.
        """
        if not any(reader in self.inlined for readers in self.effects.values() for reader in readers):
            return
        while len(order := self._topological_order()) < len(self.position):
            stuck = self.position.keys() - set(order)
            self.materialize(
                next(
                    reader
                    for node in self.ordered(stuck)
                    for reader in self.effects.get(node, ())
                    if reader in self.inlined and not stuck.isdisjoint(self.readers(reader))
                )
            )
        self.position = {node: i for i, node in enumerate(order)}

    def _topological_order(self) -> list[Node]:
        """Return the nodes, without those on a cycle, as near to their present order as dependences allow."""
        nodes = list(self.position)
        waiting = {node: len(self.predecessors(node)) for node in nodes}
        after: dict[Node, list[Node]] = {}
        for node in nodes:
            for earlier in self.predecessors(node):
                after.setdefault(earlier, []).append(node)
        ready = [i for i, node in enumerate(nodes) if not waiting[node]]
        order: list[Node] = []
        while ready:
            node = nodes[heapq.heappop(ready)]
            order.append(node)
            for later in after.get(node, ()):
                waiting[later] -= 1
                if not waiting[later]:
                    heapq.heappush(ready, self.position[later])
        return order

    def materialize(self, *nodes: Node) -> None:
        """Stop inlining nodes, so that each is computed once."""
        self.inlined.difference_update(nodes)
        self._clear()

    def inline(self, *nodes: Node) -> None:
        """Inline nodes into their readers."""
        self.inlined.update(nodes)
        self._clear()

    def _clear(self) -> None:
        for cached in (self.readers, self.predecessors, self.inputs):
            cached.cache_clear()

    def ordered(self, nodes: Iterable[Node]) -> list[Node]:
        """Sort nodes by their positions."""
        return sorted(nodes, key=self.position.__getitem__)

    def escapes(self, node: Node, nodes: set[Node]) -> bool:
        """Return whether a node's result is used outside of these nodes."""
        return node in self.returned or not nodes.issuperset(self.readers(node))

    def _readers(self, node: Node) -> tuple[Node, ...]:
        """Return the nodes that read a node's result, and inlined ones only where the graph returns their results."""
        found: dict[Node, None] = {}
        for user in node.users:
            if user in self.inlined:
                found.update(dict.fromkeys(self.readers(user)))
            if user not in self.inlined or user in self.returned:
                found[user] = None
        return tuple(found)

    def _predecessors(self, node: Node) -> tuple[Node, ...]:
        """Return the nodes that must run before a node: producers of its inputs, and those before its side effects."""
        found = dict.fromkeys(v.producer for v in self.inputs(node))
        for reader in self.effects.get(node, ()):
            found.update(dict.fromkeys(self.readers(reader) if reader in self.inlined else (reader,)))
        found.pop(node, None)
        return tuple(n for n in found if n is not None and n not in self.inlined)

    def _inputs(self, node: Node) -> tuple[Value, ...]:
        """Return the values that a node reads, each after the inputs of its producer where that is inlined."""
        found: dict[Value, None] = {}
        for value in node.operands:
            if value.producer in self.inlined:
                found.update(dict.fromkeys(self.inputs(value.producer)))
            found[value] = None
        return tuple(found)
