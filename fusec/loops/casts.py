"""Casts that keep every value."""

from fusec.ir.types import holds_all
from fusec.loops.indexing import IndexedExpr
from fusec.loops.intervals import interval

EXACT = 256
"""Integers up to this are exact in every floating-point dtype."""


def keeps_all(item: IndexedExpr) -> bool:
    """Return whether a cast keeps all values that it may get."""
    (narrow,) = item.operands
    values = interval(narrow.value)
    if values is None or holds_all(item.dtype, narrow.dtype):
        return holds_all(item.dtype, narrow.dtype)
    if item.dtype.is_float:
        return max(map(abs, values)) <= EXACT
    return values == interval(item.value)


def uncast(item: IndexedExpr) -> IndexedExpr:
    """Return what an expression casts, as far as each cast keeps all values that it may get."""
    while item.kind == "pointwise" and item.node.is_op("cast") and keeps_all(item):
        (item,) = item.operands
    return item
