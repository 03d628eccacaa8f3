"""A partition of nodes into groups that each run as one kernel, and the cycles that merging two would close."""

from fusec.analysis.uses import Uses
from fusec.ir.graph import Node


class Partition:
    """Disjoint groups of nodes; a group runs when the inputs of all its nodes are there."""

    def __init__(self, uses: Uses) -> None:
        self.uses = uses
        self.group_of: dict[Node, set[Node]] = {}
        """The group of each node, one set for all its members; a node without one runs alone."""
        self._reach = list(range(len(uses.position)))
        """For each position in the graph, the first position of the groups that extend across it."""

    def put(self, group: set[Node]) -> None:
        """Make a group; the groups that its nodes are in must be part of it."""
        self.group_of.update(dict.fromkeys(group, group))
        positions = [self.uses.position[n] for n in group]
        first, end = min(positions), max(positions) + 1
        self._reach[first:end] = [first if first < reach else reach for reach in self._reach[first:end]]

    def groups(self) -> list[set[Node]]:
        """Return each group once."""
        return list({id(group): group for group in self.group_of.values()}.values())

    def closes_cycle(self, first: set[Node], second: set[Node]) -> bool:
        """Return whether a path leads from ``first`` to ``second`` through another group, so that they cannot merge."""
        position = self.uses.position.__getitem__
        start = min(map(position, first))
        while self._reach[start] < start:  # no group before this position reads one after it
            start = self._reach[start]
        pending = self._predecessors(second) - first - second
        seen: set[Node] = set()
        while pending:  # backwards: values that all layers read have few predecessors and many readers
            node = pending.pop()
            group = self.group_of.get(node) or {node}
            seen |= group
            if max(map(position, group)) < start:
                continue
            before = self._predecessors(group)
            if not first.isdisjoint(before):
                return True
            pending |= before - second - seen
        return False

    def is_convex(self, group: set[Node]) -> bool:
        """Return whether no path leaves nodes that are to be a group and comes back, so that they may be one kernel."""
        return not self.closes_cycle(group, group)

    def _predecessors(self, group: set[Node]) -> set[Node]:
        return set[Node]().union(*map(self.uses.predecessors, group))
