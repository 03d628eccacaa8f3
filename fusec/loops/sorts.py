"""Sorts, and lookups of what was sorted in its order, which a sort has at hand."""

from fusec.ir.graph import Node
from fusec.ir.ops import Trait


def sort_of(node: Node) -> Node | None:
    """Return the sort that a node is, or whose elements it returns in their order."""
    if node.is_op("argsort"):
        return node
    if not node.has(Trait.LOOKUP):
        return None
    table, indices = node.operands
    sort, alone = indices.producer, node.is_op("take") and table.tensor.rank == 1
    found = sort is not None and sort.is_op("argsort") and sort.operands[0] is table and node.attributes["dim"] == -1
    return sort if found and (alone or node.is_op("gather")) else None
