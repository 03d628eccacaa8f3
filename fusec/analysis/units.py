"""Nodes that run together as one, and whether joining two such units would close a circle."""

from fusec.analysis.uses import Uses
from fusec.ir.graph import Node


class Units:
    """Disjoint sets of nodes; a unit starts when all that any of its nodes needs is there."""

    def __init__(self, uses: Uses) -> None:
        self.uses = uses
        self.of: dict[Node, set[Node]] = {}
        """The unit of each node; nodes of one unit share the set, nodes without one run alone."""
        self._reach = list(range(len(uses.position)))
        """For each place in the graph, the first place of the units that lie across it."""

    def put(self, unit: set[Node]) -> None:
        """Let nodes run together; the units that they are in must be part of it."""
        self.of.update(dict.fromkeys(unit, unit))
        places = [self.uses.position[n] for n in unit]
        first, end = min(places), max(places) + 1
        self._reach[first:end] = [first if first < place else place for place in self._reach[first:end]]

    def distinct(self) -> list[set[Node]]:
        """Each unit once."""
        return list({id(unit): unit for unit in self.of.values()}.values())

    def closes_cycle(self, first: set[Node], second: set[Node]) -> bool:
        """Whether a path leads from ``first`` to ``second`` through another unit, so that they cannot be one."""
        place = self.uses.position.__getitem__
        start = min(map(place, first))
        while self._reach[start] < start:  # no unit ahead of the last place reads one behind it
            start = self._reach[start]
        pending = self._before(second) - first - second
        seen: set[Node] = set()
        while pending:  # backwards: what is made once for all layers is read by the last one, too
            node = pending.pop()
            unit = self.of.get(node) or {node}
            seen |= unit
            if max(map(place, unit)) < start:
                continue
            before = self._before(unit)
            if not first.isdisjoint(before):
                return True
            pending |= before - second - seen
        return False

    def _before(self, unit: set[Node]) -> set[Node]:
        return set[Node]().union(*map(self.uses.before, unit))
