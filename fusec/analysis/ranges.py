"""What loops a value is computed in."""

from fusec.ir.graph import Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import Size


def ranges(node: Node) -> tuple[Value, ...]:
    """The values whose elements a node loops over: whichever operand comes first."""
    if node.has(Trait.WRITE):
        return node.operands[1:2]
    if not node.has(Trait.POINTWISE):
        return node.result, node.operands[0]
    return node.result, *(v for v in node.operands if len(v.shape) == len(node.result.shape))


def loops(value: Value) -> list[Size]:
    """The sizes of its loops."""
    return [n for n in value.shape if n != 1]
