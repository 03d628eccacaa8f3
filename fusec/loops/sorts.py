"""Lookups that read sorted elements in their order, which a sort has at hand."""

from fusec.ir.graph import Node


def sort_read_in_order(lookup: Node) -> Node | None:
    """Return the sort whose elements, in order, a lookup returns."""
    table, indices = lookup.operands
    sort, alone = indices.producer, lookup.is_op("take") and table.tensor.rank == 1
    found = sort is not None and sort.is_op("argsort") and sort.operands[0] is table and lookup.attributes["dim"] == -1
    return sort if found and (alone or lookup.is_op("gather")) else None
