"""Casts that keep every value."""

import math
from collections.abc import Sequence

from fusec.ir.graph import Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import BF16, F16, F32, F64, holds_all
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


def is_bfloat16(value: Value) -> bool:
    """Return whether every element of a float32 value is a bfloat16 number, as those decoded from float8 are."""
    pending, seen = [value], {value}
    while pending:
        sources = _if_bfloat16(pending.pop())
        if sources is None:
            return False
        new = [source for source in sources if source not in seen]
        seen.update(new)
        pending += new
    return True


def _if_bfloat16(value: Value) -> Sequence[Value] | None:
    """Return the values that have to be bfloat16 numbers so that a value is; None where that is not known."""
    node = value.producer
    if node is None or value.dtype != F32:
        return None
    known = False
    if node.is_op("constant"):
        known = math.isnan(node.attributes["value"])
    elif node.is_op("cast"):
        known = node.operands[0].dtype == BF16
    elif node.is_op("bitcast"):
        bits = node.operands[0].producer
        known = bits is not None and bits.is_op("and") and any(map(_is_upper_mask, bits.operands))
    elif node.is_op("mul"):
        return next(((x,) for factor, x in (node.operands, node.operands[::-1]) if _enlarges(factor)), None)
    elif node.has(Trait.VIEW) or node.is_op("where"):
        return node.operands[node.is_op("where") :]
    return () if known else None


def _enlarges(factor: Value) -> bool:
    """Return whether a factor is a power of two that makes no number denormal, which has fewer bits."""
    node = factor.producer
    number = node.attributes["value"] if node is not None and node.is_op("constant") else 0.0
    return math.isfinite(number) and number >= 1 and math.frexp(number)[0] == 0.5


def _is_upper_mask(value: Value) -> bool:
    node = value.producer
    return node is not None and node.is_op("constant") and node.attributes["value"] & 0xFFFF == 0


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
