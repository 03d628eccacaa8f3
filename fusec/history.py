"""The history of a pass: every node that its graph ever had, and the applications that added and removed it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.printer import positions_as_read
from fusec.ir.union import union

Reference: TypeAlias = tuple[int, int]
"""The position of a node and the index of its result; the node is -1 for an input."""


@dataclass(frozen=True)
class History:
    """The graph after each application of a pass: step 0 is the graph before it, step ``i`` that after ``i``."""

    graph: Graph
    """All nodes, with the operands that they had last."""
    numbers: tuple[int, ...]
    """The applications, in order."""
    lives: tuple[tuple[int, int], ...]
    """For each node the first step that has it, and the first that no longer does."""
    operands: tuple[tuple[int, int, tuple[Reference, ...]], ...]
    """Earlier operands: the position of a node, the first step that no longer has them, and the operands."""
    before: tuple[int, ...]
    """For each node its position in the graph before the pass; -1 for one that is not there."""
    after: tuple[int, ...]
    """The same for the graph after the pass."""
    as_read: "History | None" = None
    """The same with the positions that nodes have in graphs that are written and read; None for one that was read."""

    def to_json(self) -> dict[str, Any]:
        """Return the history as JSON data, with the graph as text."""
        known = {k: v for k, v in vars(self.as_read or self).items() if k not in ("graph", "as_read")}
        return {**known, "graph": str(self.graph)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "History":
        """Return the history of JSON data."""
        from fusec.ir.parser import parse_graph

        def tuples(value: Any) -> Any:
            return tuple(map(tuples, value)) if isinstance(value, list) else value

        return cls(parse_graph(data["graph"]), **{k: tuples(v) for k, v in data.items() if k != "graph"})


class Recorder:
    """Records what changes in a graph from now on, until it is stopped."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._first, self._first_as_read = graph, graph.nodes, positions_as_read(graph)
        self._events: list[Any] = []
        graph.journal = self._events

    def application(self, number: int) -> None:
        """Note that an application is about to be made."""
        self._events.append(number)

    def stop(self) -> None:
        """Record no more changes."""
        self._graph.journal = None

    def history(self) -> History | None:
        """Return what was recorded; None for fewer than two applications, which the graphs before and after show."""
        lives = _Lives(self._first, self._events)
        return lives.history(self._graph, self._first_as_read) if len(lives.numbers) > 1 else None


class _Lives:
    """The lives of nodes, from events.

    A rule adds nodes before its application has a number, but nothing reads them yet: they live from the change that
    follows. Changes outside of applications, as of equal nodes that are merged, belong to the one before.
    """

    def __init__(self, first: Sequence[Node], events: Sequence[Any]) -> None:
        self.first, self.numbers = first, list[int]()
        self.born, self.died = dict.fromkeys(first, 0), dict[Node, int]()
        self.replaced = dict[tuple[Node, int], tuple[Value, ...]]()
        added: list[Node] = []
        for event in events:
            if isinstance(event, int):
                self.numbers.append(event)
                continue
            kind, node, operands = event
            if kind == "add":
                added.append(node)
                continue
            step = max(len(self.numbers), 1)
            self.born |= dict.fromkeys(added, step)
            added.clear()
            if kind == "erase":
                self.died[node] = step
            else:
                self.replaced.setdefault((node, step), operands)
        self.born |= dict.fromkeys(added, max(len(self.numbers), 1))

    def history(self, graph: Graph, first_as_read: Mapping[Node, int]) -> History:
        """Return the history that ended with a graph."""
        gone: list[Node] = []
        read = {v for node in graph for v in node.operands}
        for node in reversed(self.died):  # what a node reads when it dies lives longer
            if self.born[node] < self.died[node] or any(r in read for r in node.results):
                gone.append(node)
                read.update(node.operands)
        whole, copies = union(graph, gone, {})
        origins = {copy: node for node, copy in copies.items()}

        def at(place: Mapping[Node, int], first: Mapping[Node, int], last: Mapping[Node, int]) -> History:
            return self.numbered(whole, {origins[copy]: i for copy, i in place.items()}, first, last)

        live = at(*map(_positions, (whole.nodes, self.first, graph.nodes)))
        return replace(live, as_read=at(positions_as_read(whole), first_as_read, positions_as_read(graph)))

    def numbered(
        self, whole: Graph, place: Mapping[Node, int], first: Mapping[Node, int], last: Mapping[Node, int]
    ) -> History:
        """Return the history with these positions of nodes: in it, and in the graphs before and after."""
        same: list[list[Node]] = [[] for _ in range(len({*place.values()}))]
        for node, position in place.items():
            same[position].append(node)
        end = len(self.numbers) + 1
        earlier = (
            (place[node], step, tuple((place[v.producer] if v.producer else -1, v.index) for v in operands))
            for (node, step), operands in self.replaced.items()
            if node in place
            and self.born[node] < step
            and all(v.producer is None or v.producer in place for v in operands)
        )
        lives = ((min(self.born[n] for n in nodes), max(self.died.get(n, end) for n in nodes)) for nodes in same)
        before, after = (tuple(max(known.get(n, -1) for n in nodes) for nodes in same) for known in (first, last))
        return History(whole, tuple(self.numbers), tuple(lives), tuple(earlier), before, after)


def _positions(nodes: Sequence[Node]) -> dict[Node, int]:
    return {node: i for i, node in enumerate(nodes)}
