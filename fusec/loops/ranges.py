"""The loops around a node, before it is lowered."""

from fusec.ir.graph import Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import Size


def ranges(node: Node) -> tuple[Value, ...]:
    """Return the values whose elements a node loops over: its result, and the operand of a reduction or matmul."""
    if node.has(Trait.WRITE):
        return node.operands[1:2]
    return (node.result,) if node.has(Trait.POINTWISE) else (node.result, node.operands[0])


def loops(value: Value) -> list[Size]:
    """Return the sizes of the loops over a value's elements."""
    return [n for n in value.shape if n != 1]
