"""Forward whole-tensor writes: readers of a written value read it from the destination, so that one copy suffices."""

from fusec.errors import GraphError
from fusec.ir.graph import Graph, Node, Value, readers, storage


def forward_writes(graph: Graph, least: int) -> int:
    """Let readers of a value that overwrites a whole input read the input instead; return how many values moved.

    A value keeps its own storage where it is also returned, or where the old content is still read after its readers.

    Args:
        graph: changed in place.
        least: values with at most so many elements are left alone: a second copy is cheap, waiting for it is not.
    """
    returned = {storage(v) for v in graph.outputs}
    count = 0
    for node in graph.nodes:
        if not node.is_op("write") or "dim" in node.attributes:
            continue
        value, numel = node.operands[1], node.operands[1].tensor.numel
        large = not isinstance(numel, int) or numel > least
        if large and len(value.users) > 1 and value.producer is not None and value not in returned:
            count += _forward(graph, node, value)
    return count


def _forward(graph: Graph, write: Node, value: Value) -> bool:
    """Redirect the readers of a written value to the write's result; return False where the order forbids it."""
    if value.producer is None or value.producer.is_alias:
        return False
    storages = {storage(write.result), storage(value)}
    if any(not storages.isdisjoint(map(storage, node.written)) for node in readers(value) if node is not write):
        return False  # one of the two is written later
    users = [user for user in value.users if user is not write]
    for user in users:
        graph.replace_operands(user, [write.result if v is value else v for v in user.operands])
    try:
        graph.sort()
    except GraphError:  # a reader of the old content depends on one of the users
        for user in users:
            graph.replace_operands(user, [value if v is write.result else v for v in user.operands])
        return False
    return True
