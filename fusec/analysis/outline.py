"""The outline of a group of nodes: the piece of its graph that a kernel's body would copy, not yet copied.

Equal layers have outlines of equal structure, so that each distinct body is built once.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from fusec.analysis.uses import Uses
from fusec.ir.graph import Graph, Node, Value, is_written
from fusec.ir.structure import structure_of_piece
from fusec.loops.strides import dense


@dataclass(frozen=True)
class Outline:
    """A group, with the nodes that are inlined into it, as a piece of its graph."""

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]

    def structure(self, spell: Callable[[Node | Value], Hashable]) -> tuple[Hashable, ...]:
        """Return a key that two outlines share exactly if their bodies have the same structure."""
        return structure_of_piece(self.inputs, self.nodes, self.outputs, spell)

    def build(self) -> Graph:
        """Return the body; its outputs are dense, or inputs that it has written to."""
        body = Graph()
        to = {value: body.add_input(value.type, value.name) for value in self.inputs}
        body.splice(self.nodes, to)
        for value in self.outputs:
            if not is_written(value):
                to[value].type = dense(value.tensor)
        body.set_outputs([to[value] for value in self.outputs])
        if any(node.writes for node in self.nodes):
            body.sort()  # inlined loads come before the writes that would change them
        return body


def outline(group: set[Node], uses: Uses) -> Outline:
    """Return the outline of a group of nodes with one result each."""
    inputs: dict[Value, None] = {}
    nodes: dict[Node, None] = {}
    members = uses.ordered(group)
    for member in members:
        for value in uses.inputs(member):
            node = value.producer
            if node in uses.inlined:
                nodes[node] = None
            elif node not in group:
                inputs[value] = None
        nodes[member] = None
    outputs = tuple(n.result for n in members if n.writes or uses.escapes(n, group))
    return Outline(tuple(inputs), tuple(nodes), outputs)
