"""Constant folding, only where it yields exactly the bits of eager."""

import math
import operator
import struct
from collections.abc import Callable

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.types import BOOL, F16, F32, F64, DType, wrapped
from fusec.rewriting.driver import simplifies

Number = float | int | bool

_FLOAT_OPS: dict[str, Callable[..., float]] = {
    "neg": operator.neg, "abs": abs, "add": operator.add, "sub": operator.sub, "mul": operator.mul,
}  # fmt: skip
_ROUNDED_OPS: dict[str, Callable[..., float]] = {"div": operator.truediv, "sqrt": math.sqrt}
_INT_OPS: dict[str, Callable[..., int]] = _FLOAT_OPS | {  # type: ignore[assignment]
    "floor_divide": operator.floordiv, "maximum": max, "minimum": min,
}  # fmt: skip
_COMPARE: dict[str, Callable[..., bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


def number_of(value: Value) -> Number | None:
    """Return the number of a constant, in full precision; None for any other value."""
    node = value.producer
    return node.attributes["value"] if node is not None and node.op.name == "constant" else None


def number_throughout(value: Value) -> Number | None:
    """Return the number that all elements of a value are, as far as views of a constant tell."""
    while value.producer is not None and value.producer.is_op("expand", "reshape", "permute"):
        (value,) = value.producer.operands
    return number_of(value)


def rounded(value: Number, dtype: DType) -> Number:
    """Return the nearest number of the dtype, halves to even; out of range infinity, or for integers the remainder."""
    if dtype == BOOL:
        return bool(value)
    if dtype.kind == "int":
        return wrapped(int(value), dtype)
    value = float(value)
    if dtype == F64 or not math.isfinite(value):
        return value
    try:
        if dtype == F16:
            return float(struct.unpack("e", struct.pack("e", value))[0])
        single = float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)
    if dtype == F32:
        return single
    bits = struct.unpack("I", struct.pack("f", single))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("f", struct.pack("I", bits & 0xFFFFFFFF))[0])


@simplifies("neg", "abs", "add", "sub", "mul", "div", "sqrt", "floor_divide", "maximum", "minimum", *_COMPARE)
def constant_folding(graph: Graph, node: Node) -> Value | None:
    """An operation on numbers is a number."""
    numbers = [number_of(v) for v in node.operands]
    if any(n is None for n in numbers):
        return None
    dtype = node.operands[0].dtype
    value = _fold(node.op.name, [rounded(n, dtype) for n in numbers if n is not None], dtype)
    if value is None:
        return None
    return graph.constant(value, node.result.dtype, node.result.tensor.device)


def _fold(op: str, numbers: list[Number], dtype: DType) -> Number | None:
    if op in _COMPARE:
        return _COMPARE[op](*numbers)
    if dtype.kind == "int" and op in _INT_OPS:
        if op == "floor_divide" and numbers[1] == 0:
            return None
        value = _INT_OPS[op](*numbers)
        least = -(1 << 8 * dtype.bytes - 1)  # which has no literal in C
        return value if value == rounded(value, dtype) and value != least else None
    # A double holds sums and products of two f32 numbers closely enough for the second rounding to be harmless.
    if dtype in (F32, F64) and op in _FLOAT_OPS:
        return rounded(_FLOAT_OPS[op](*numbers), dtype)
    if dtype in (F32, F64) and op in _ROUNDED_OPS and all(n > 0 and math.isfinite(n) for n in numbers):
        return rounded(_ROUNDED_OPS[op](*numbers), dtype)
    return None


@simplifies("cast")
def cast_of_number(graph: Graph, node: Node) -> Value | None:
    """A cast number is the number, where no rounding changes it."""
    (x,) = node.operands
    n = number_of(x)
    dtype = node.result.dtype
    if n is None or dtype.kind == "other" or (not dtype.is_float and not math.isfinite(n)):
        return None
    if dtype.kind == "int" and x.dtype.is_float:
        return None
    # From f64 to f32 the number keeps its precision: its reader rounds it to f32.
    if rounded(rounded(n, x.dtype), dtype) != n and (x.dtype, dtype) != (F64, F32):
        return None
    return graph.constant(n if dtype.is_float else rounded(n, dtype), dtype, x.tensor.device)
