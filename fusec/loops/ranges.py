"""What loops a value is computed in."""

from fusec.ir.graph import Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import Size


def ranges(node: Node) -> tuple[Value, ...]:
    """The values whose elements a node loops over; an operand that is spread is none of them."""
    if node.has(Trait.WRITE):
        return node.operands[1:2]
    return (node.result,) if node.has(Trait.POINTWISE) else (node.result, node.operands[0])


def loops(value: Value) -> list[Size]:
    """The sizes of its loops."""
    return [n for n in value.shape if n != 1]
