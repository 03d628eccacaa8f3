"""Casts that keep every value."""

from fusec.ir.graph import Node, Value
from fusec.ir.types import F16, F32, F64, holds_all
from fusec.loops.indexing import IndexedExpr
from fusec.loops.intervals import interval

EXACT = 256
"""Integers up to this are exact in every floating-point dtype."""
_EXACT_IN = {F16: 1 << 11, F32: 1 << 24, F64: 1 << 53}
"""The same for dtypes with longer significands."""


def keeps_all(cast: Node) -> bool:
    """Return whether a cast keeps all values that it may get."""
    (narrow,), wide = cast.operands, cast.result
    values = interval(narrow)
    if values is None or holds_all(wide.dtype, narrow.dtype):
        return holds_all(wide.dtype, narrow.dtype)
    if wide.dtype.is_float:
        return max(map(abs, values)) <= _EXACT_IN.get(wide.dtype, EXACT)
    return values == interval(wide)


def uncast_value(value: Value) -> Value:
    """Return what a value casts, as far as each cast keeps all values that it may get."""
    while value.producer is not None and value.producer.is_op("cast") and keeps_all(value.producer):
        (value,) = value.producer.operands
    return value


def uncast(item: IndexedExpr) -> IndexedExpr:
    """Return what an expression casts, as far as each cast keeps all values that it may get."""
    while item.kind == "pointwise" and item.node.is_op("cast") and keeps_all(item.node):
        (item,) = item.operands
    return item
