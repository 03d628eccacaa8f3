"""Inline regions: the nodes of a body replace its region."""

from collections.abc import Sequence

from fusec.ir.graph import Graph, Node, Source, Value
from fusec.ir.ops import Trait


def open_regions(graph: Graph) -> dict[Node, str]:
    """Inline all regions; return the outermost fusion's name for each node that came from one."""
    names: dict[Node, str] = {}

    def add(region: Node, operands: Sequence[Value], sources: tuple[Source, ...] = (), name: str = "") -> list[Value]:
        """Copy the nodes of a region and of nested regions; return its results."""
        sources, name = region.sources or sources, name or region.attributes["fusion"]
        to = dict(zip(region.body.inputs, operands, strict=True))
        for node in region.body.nodes:
            if node.has(Trait.REGION):
                to.update(zip(node.results, add(node, [to[v] for v in node.operands], sources, name), strict=True))
            else:
                graph.splice([node], to, sources)
                names[graph.newest(1)[0]] = name
        return [to[v] for v in region.body.outputs]

    order: list[Node] = []
    regions = [n for n in graph.nodes if n.has(Trait.REGION)]
    for node in graph.nodes:
        if not node.has(Trait.REGION):
            order.append(node)
            continue
        count = len(names)
        for old, new in zip(node.results, add(node, node.operands), strict=True):
            graph.replace_value(old, new)
        order += list(names)[count:]
    for region in regions:
        graph.erase(region)
    graph.reorder(order)
    return names
