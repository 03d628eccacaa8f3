"""Sorts, and lookups of what was sorted in its order, which a sort has at hand."""

from collections.abc import Iterator

from fusec.ir.graph import Node
from fusec.ir.ops import Trait
from fusec.ir.types import DType, Size, accumulation


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


MAX_SORTED = 2048
"""Elements of the longest row that a program on a GPU sorts. Rows of 4096 were seen to compile without spills too, but
for longer than ten seconds; the length from which a library's sort is faster is not known."""


def tile_objections(length: Size, dtype: DType) -> Iterator[str]:
    """Yield why a program does not sort rows of so many elements in one tile."""
    if not isinstance(length, int):
        yield f"it sorts rows of {length} elements, a number not known at compile time"
    elif not 1 < length <= MAX_SORTED:
        yield f"it sorts rows of {length} elements, and a tile holds 2 to {MAX_SORTED}: ATen sorts the others"
    if accumulation(dtype).bytes > 4:
        yield f"it sorts {dtype}, and keys of a tile have 32 bits"
