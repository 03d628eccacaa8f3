"""Masks computed from indices: each kernel recomputes them, since that is cheaper than to load them."""

from fusec.ir.graph import Node, Value, base
from fusec.ir.ops import Trait

_OPS = ("le", "lt", "ge", "gt", "and", "or", "not", "add", "sub")


def is_index_mask(node: Node, few: int) -> bool:
    """Return whether a node computes integers or booleans from indices and values of at most ``few`` elements.

    A node with so few elements itself is none: it is cheap to load.
    """
    return node.is_op(*_OPS) and _is_large(node.result, few) and _depends_on_indices(node.result, few)


def _depends_on_indices(value: Value, few: int) -> bool:
    value = base(value)
    node = value.producer
    if value.dtype.kind not in ("int", "bool"):
        return False
    if node is None or not (node.has(Trait.SOURCE) or node.is_op(*_OPS)):
        return not _is_large(value, few)
    return all(_depends_on_indices(v, few) for v in node.operands)


def _is_large(value: Value, few: int) -> bool:
    numel = value.tensor.numel
    return not isinstance(numel, int) or numel > few
