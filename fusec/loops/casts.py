"""Casts that keep every value."""

from fusec.ir.types import holds_all
from fusec.loops.indexing import IndexedExpr
from fusec.loops.intervals import interval

EXACT = 256
"""Integers up to this are exact in every floating-point dtype."""


def uncast(item: IndexedExpr) -> IndexedExpr:
    """Return what an expression casts, as far as each cast keeps all values that it may get."""
    while item.kind == "pointwise" and item.node.is_op("cast"):
        (narrow,) = item.operands
        values = interval(narrow.value)
        small = values is not None and item.dtype.is_float and max(map(abs, values)) <= EXACT
        if not (holds_all(item.dtype, narrow.dtype) or small or (values and values == interval(item.value))):
            break
        item = narrow
    return item
