"""What is written as a whole is read where it was written: it lies in one place, not in two."""

from fusec.errors import GraphError
from fusec.ir.graph import Graph, Node, Value, readers, storage


def read_where_written(graph: Graph, least: int) -> int:
    """Let readers of a value that becomes all of an input take it from there; how many values that was.

    A value stays apart where it is returned as well, or where the old value is still needed after its readers.

    Args:
        graph: what is changed.
        least: elements below which a value is left alone: a second copy costs nothing, waiting does.
    """
    returned = {storage(v) for v in graph.outputs}
    count = 0
    for node in graph.nodes:
        if not node.is_op("write") or "dim" in node.attributes:
            continue
        value, numel = node.operands[1], node.operands[1].tensor.numel
        large = not isinstance(numel, int) or numel > least
        if large and len(value.users) > 1 and value.producer is not None and value not in returned:
            count += _moved(graph, node, value)
    return count


def _moved(graph: Graph, write: Node, value: Value) -> bool:
    if value.producer is None or value.producer.is_alias:
        return False
    places = {storage(write.result), storage(value)}
    if any(not places.isdisjoint(map(storage, node.written)) for node in readers(value) if node is not write):
        return False  # one of the two is written later
    users = [user for user in value.users if user is not write]
    for user in users:
        graph.replace_operands(user, [write.result if v is value else v for v in user.operands])
    try:
        graph.sort()
    except GraphError:  # they come before something that reads the old value
        for user in users:
            graph.replace_operands(user, [value if v is write.result else v for v in user.operands])
        return False
    return True
