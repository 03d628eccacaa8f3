"""Masks of positions: what is computed of indices and a few numbers is less than to load it."""

from fusec.ir.graph import Node, Value, base
from fusec.ir.ops import Trait

_OPS = ("le", "lt", "ge", "gt", "and", "or", "not", "add", "sub")


def is_of_positions(node: Node, few: int) -> bool:
    """Whether a node computes many integers or truth values of indices and of values with few elements."""
    return node.is_op(*_OPS) and _is_large(node.result, few) and _is_made_of_indices(node.result, few)


def _is_made_of_indices(value: Value, few: int) -> bool:
    value = base(value)
    node = value.producer
    if value.dtype.kind not in ("int", "bool"):
        return False
    if node is None or not (node.has(Trait.SOURCE) or node.is_op(*_OPS)):
        return not _is_large(value, few)
    return all(_is_made_of_indices(v, few) for v in node.operands)


def _is_large(value: Value, few: int) -> bool:
    numel = value.tensor.numel
    return not isinstance(numel, int) or numel > few
