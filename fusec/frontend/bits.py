"""Reinterpretation of bits, as arithmetic: bytes as wider numbers, and float8 as other floats."""

from functools import reduce

from fusec.errors import ImportFailure
from fusec.frontend.lowering import Call, Lowering, lowers
from fusec.ir.graph import Value
from fusec.ir.types import BF16, E4M3, E5M2, F16, F32, I8, I16, I32, U8, DType

_INTEGER = {F16: I16, BF16: I16, F32: I32, I16: I16, I32: I32}
"""The integer with the bits of a number."""


@lowers("aten.view.dtype")
def _view(low: Lowering, call: Call) -> Value:
    """The same bytes as another type: of as many bytes each, or from bytes to something wider."""
    x, dtype = call["self"], call.out.dtype
    if x.dtype == dtype:
        return x
    if x.dtype in (E4M3, E5M2) and dtype in (U8, I8):
        return low.cast(low.emit("bitcast", x, dtype=U8), dtype)
    if x.dtype in (I8, U8) and dtype in (I8, U8):
        return low.cast(x, dtype)
    if x.dtype in (I8, U8) and dtype in _INTEGER:
        x = _joined(low, low.cast(x, U8), _INTEGER[dtype])
    if x.dtype != _INTEGER.get(dtype):
        raise ImportFailure(f"the bits of {x.dtype} as {dtype}", why="they are read from bytes and integers alone")
    return x if x.dtype == dtype else low.emit("bitcast", x, dtype=dtype)


def _joined(low: Lowering, x: Value, dtype: DType) -> Value:
    """Neighbouring bytes along the last dim as one integer, the first byte lowest."""
    count = x.shape[-1]
    if not isinstance(count, int) or count % dtype.bytes:
        raise ImportFailure(f"{count} bytes as {dtype}", why="only whole numbers of a known length are joined")
    length, parts = count // dtype.bytes, []
    for i in range(dtype.bytes):
        part = low.cast(low.slice(x, -1, i, length, dtype.bytes), I32)
        parts.append(low.pointwise("shift_left", part, 8 * i, dtype=I32) if i else part)
    return low.cast(reduce(lambda a, b: low.pointwise("or", a, b, dtype=I32), parts), dtype)


def from_float8(low: Lowering, x: Value, dtype: DType) -> Value:
    """A float8 as a wider float, which is exact.

    E5M2 is the upper half of a float16. The bits of E4M3 are moved to where a float32 has sign, exponent and fraction,
    and its exponent, which is biased by 7 instead of 127, is corrected by a product.
    """
    byte = low.emit("bitcast", x, dtype=U8)
    if x.dtype == E5M2:
        bits = low.cast(byte, I32)
        half = low.cast(low.pointwise("shift_left", bits, 8, dtype=I32), I16)
        return low.cast(low.emit("bitcast", half, dtype=F16), dtype)
    moved = low.pointwise("shift_left", low.cast(low.cast(byte, I8), I32), 20, dtype=I32)  # the sign fills the rest
    rest = low.pointwise("and", moved, 0x07F00000, dtype=I32)
    signed = low.pointwise("and", moved, 0x87F00000 - (1 << 32), dtype=I32)
    value = low.pointwise("mul", low.emit("bitcast", signed, dtype=F32), 2.0**120, dtype=F32)
    nan = low.emit("eq", rest, low.number(0x07F00000, I32))
    return low.cast(low.emit("where", nan, low.number(float("nan"), F32), value), dtype)
