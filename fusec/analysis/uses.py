"""Who reads what, and what must come before what."""

import heapq
from collections.abc import Iterable
from functools import cache

from fusec.ir.graph import Graph, Node, Value


class Uses:
    """Who reads what in a graph that does not change, where some nodes are free: they are looked through."""

    def __init__(self, graph: Graph, free: Iterable[Node]) -> None:
        self.free = set(free)
        self.returned = {v.producer for v in graph.outputs}
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.effects = graph.order_of_effects()
        self.readers = cache(self._readers)
        self.before = cache(self._before)
        self.taken = cache(self._taken)
        self._settle_order()

    def _settle_order(self) -> None:
        """Order the nodes so that each follows what must come before it.

        The readers of a free node have to run before its operand is overwritten. Where one of them depends on that
        write, the node is not free: its own copy is made before the write.
        """
        if not any(reader in self.free for readers in self.effects.values() for reader in readers):
            return
        while len(order := self._topological_order()) < len(self.position):
            stuck = self.position.keys() - set(order)
            self.stop_at(
                next(
                    reader
                    for node in self.ordered(stuck)
                    for reader in self.effects.get(node, ())
                    if reader in self.free and not stuck.isdisjoint(self.readers(reader))
                )
            )
        self.position = {node: i for i, node in enumerate(order)}

    def _topological_order(self) -> list[Node]:
        """Return the nodes as near to their present order as dependences allow, without those on a cycle."""
        nodes = list(self.position)
        waiting = {node: len(self.before(node)) for node in nodes}
        after: dict[Node, list[Node]] = {}
        for node in nodes:
            for earlier in self.before(node):
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

    def stop_at(self, *nodes: Node) -> None:
        """Let nodes no longer be free."""
        self.free.difference_update(nodes)
        self._forget()

    def pass_through(self, *nodes: Node) -> None:
        """Let nodes be free again."""
        self.free.update(nodes)
        self._forget()

    def _forget(self) -> None:
        for answers in (self.readers, self.before, self.taken):
            answers.cache_clear()

    def ordered(self, nodes: Iterable[Node]) -> list[Node]:
        """Nodes in the order of the graph."""
        return sorted(nodes, key=self.position.__getitem__)

    def escapes(self, node: Node, nodes: set[Node]) -> bool:
        """Whether anything but these nodes reads what a node gives."""
        return node in self.returned or not nodes.issuperset(self.readers(node))

    def _readers(self, node: Node) -> tuple[Node, ...]:
        """The nodes that read what a node gives; of free ones, those that are returned."""
        found: dict[Node, None] = {}
        for user in node.users:
            if user in self.free:
                found.update(dict.fromkeys(self.readers(user)))
            if user not in self.free or user in self.returned:
                found[user] = None
        return tuple(found)

    def _before(self, node: Node) -> tuple[Node, ...]:
        """What must come before a node: the makers of what it reads, and what the order of effects demands."""
        found = dict.fromkeys(v.producer for v in self.taken(node))
        for reader in self.effects.get(node, ()):
            found.update(dict.fromkeys(self.readers(reader) if reader in self.free else (reader,)))
        found.pop(node, None)
        return tuple(n for n in found if n is not None and n not in self.free)

    def _taken(self, node: Node) -> tuple[Value, ...]:
        """The values that a node reads, each behind those that are read to make it where a free node does."""
        found: dict[Value, None] = {}
        for value in node.operands:
            if value.producer in self.free:
                found.update(dict.fromkeys(self.taken(value.producer)))
            found[value] = None
        return tuple(found)
