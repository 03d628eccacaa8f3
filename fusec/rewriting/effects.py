"""Effects and rewriting: which nodes a write precedes, and which replacements would leave no valid order."""

from collections.abc import Iterable, Mapping, Sequence

from fusec.ir.graph import Graph, Node, Value, base, readers, storage, viewed_or_written


def writes_by_storage(nodes: Iterable[Node]) -> dict[Value, list[Node]]:
    """Return the nodes that write to each storage, in order."""
    found: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in node.written:
            found.setdefault(storage(value), []).append(node)
    return found


def breaks_order(
    graph: Graph, added: Sequence[Node], replaced: Mapping[Value, Value], writes: Mapping[Value, Sequence[Node]]
) -> bool:
    """Return whether a replacement would leave no order of nodes that respects data flow and writes.

    The old content of a storage must be read before the write, so its reader cannot depend on that write; graph
    outputs are read after all writes. A new node with several results cannot depend on a reader of one of them.

    Args:
        graph: contains the new nodes and the values that are still to be replaced.
        added: the new nodes.
        replaced: each old value with the new one.
        writes: of the graph, by storage.
    """
    if not writes:
        return False
    reads: list[tuple[Node | None, Value]] = [(node, value) for node in added for value in node.operands]
    for old, new in replaced.items():
        reads += [(reader, new) for reader in readers(old)]
        reads += [(None, new)] if any(base(v) is base(old) for v in graph.outputs) else []
    for reader, read in reads:
        for write in writes.get(storage(read), ()):
            if not _includes(read, write) and (reader is None or reader in _behind(graph, [write])):
                return True
    return len(replaced) > 1 and _depends_on_readers(graph, added, replaced)


def _includes(value: Value, write: Node) -> bool:
    """Return whether a value is the result of a write, a view of it, or the result of a later write to it."""
    of: Value | None = value
    while of is not None and of.producer is not write:
        of = viewed_or_written(of)
    return of is not None


def _depends_on_readers(graph: Graph, added: Sequence[Node], replaced: Iterable[Value]) -> bool:
    """Return whether new nodes need a node that has to run after them."""
    needed = {v.producer for n in added for v in n.operands if v.producer is not None} - set(added)
    after = [*added, *(user for value in replaced for user in value.users)]
    return not needed.isdisjoint(_behind(graph, after))


def _behind(graph: Graph, nodes: Iterable[Node]) -> set[Node]:
    """Return nodes and all that have to run after them: their readers, and writes to what any of these read."""
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
