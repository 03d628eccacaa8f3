"""The union of two graphs: the nodes that both have once, and those that only one of them has."""

from collections.abc import Mapping, Sequence

from fusec.ir.graph import Graph, Node, Value


def union(graph: Graph, gone: Sequence[Node], same: Mapping[Value, Value]) -> tuple[Graph, dict[Node, Node]]:
    """Return a copy of a graph that has further nodes too, and the copy of each node; bodies of regions are shared.

    Nothing in ``graph`` reads the further nodes. Each is placed after the last of its operands.

    Args:
        graph: the graph.
        gone: the further nodes, in an order that respects data flow.
        same: values that they read, to the values of ``graph`` that they are; other inputs become inputs.
    """
    out, copies = Graph(graph.name), dict[Node, Node]()
    to = {v: out.add_input(v.type, v.name, v.frozen) for v in graph.inputs}
    place = dict[Node, tuple[int, int]]()

    def copied(node: Node, at: tuple[int, int]) -> None:
        operands = [to[v] for v in node.operands]
        types = [r.type for r in node.results]
        copy = out.add_node(node.op.name, operands, dict(node.attributes), types=types, sources=node.sources)
        for old, new in zip(node.results, copy.results, strict=True):
            new.name, to[old] = old.name, new
        copies[node], place[copy] = copy, at

    for i, node in enumerate(graph.nodes):
        copied(node, (i, 0))
    out.set_outputs([to[v] for v in graph.outputs], graph.output_types)
    to |= {value: to[found] for value, found in same.items()}
    for i, node in enumerate(gone, start=1):
        for v in node.operands:
            if v not in to:  # an input that only the other graph has
                to[v] = out.add_input(v.type, v.name, v.frozen)
        last = max((place[p] for v in node.operands if (p := to[v].producer) is not None), default=(-1, 0))
        copied(node, (last[0], i))
    out.reorder(sorted(place, key=place.__getitem__))
    return out, copies
