"""Writes to storages that a rewrite reads: what they come after, and what must not move across them."""

from collections.abc import Iterable, Sequence

from fusec.ir.graph import Graph, Node, Value, storage, viewed_or_written


def writes_by_storage(graph: Graph) -> dict[Value, list[Node]]:
    """Return the nodes that write to each storage, in the order of the graph."""
    found: dict[Value, list[Node]] = {}
    for node in graph:
        for value in node.written:
            found.setdefault(storage(value), []).append(node)
    return found


def follows(value: Value, write: Node) -> bool:
    """Return whether a value is the result of a write, a view of it, or what later writes make of it."""
    of: Value | None = value
    while of is not None and of.producer is not write:
        of = viewed_or_written(of)
    return of is not None


def behind(graph: Graph, nodes: Iterable[Node]) -> set[Node]:
    """Return nodes and what has to run after them: their readers, and writes to what any of these read."""
    later: dict[Node, list[Node]] = {}
    for node, earlier in graph.order_of_effects().items():
        for first in earlier:
            later.setdefault(first, []).append(node)
    stack = list(nodes)
    found = set(stack)
    while stack:
        node = stack.pop()
        new = [n for n in (*node.users, *later.get(node, ())) if n not in found]
        found.update(new)
        stack += new
    return found


def closes_cycle(graph: Graph, added: Sequence[Node], results: Iterable[Value]) -> bool:
    """Return whether new nodes would depend on what has to run after them.

    A node that reads the old value of a storage must run before the write, and so cannot read what depends on that
    write; nor can a node with several results, one of which is needed for the other.

    Args:
        graph: which holds the new nodes, and what they are to replace.
        added: the new nodes.
        results: the values that the new nodes are to give.
    """
    inside = set(added)
    needed = {v.producer for n in added for v in n.operands if v.producer is not None} - inside
    after = [*added, *(user for value in results for user in value.users)]
    return not needed.isdisjoint(behind(graph, after))
