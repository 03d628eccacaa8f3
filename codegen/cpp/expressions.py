"""Sizes, literals, names and types as C++ text."""

import math

from fusec.codegen.tile.kernel import Constant
from fusec.codegen.tile.sizes import Language
from fusec.ir import types as t
from fusec.ir.types import DType

MEMORY_TYPES = {
    t.F64: "double", t.F32: "float", t.BF16: "bf16", t.F16: "f16", t.I64: "int64_t", t.I32: "int32_t",
    t.I16: "int16_t", t.I8: "int8_t", t.U8: "uint8_t", t.BOOL: "bool", t.E4M3: "uint8_t", t.E5M2: "uint8_t",
}  # fmt: skip
"""C++ type of one element in memory."""

_RESERVED = frozenset(
    "and or xor not auto bool break case catch char class const continue default delete do double else enum explicit "
    "export extern false float for friend goto if inline int long mutable namespace new operator private protected "
    "public register return short signed sizeof static struct switch template this throw true try typedef typename "
    "union unsigned using virtual void volatile while abs sign round floor ceil trunc sqrt rsqrt reciprocal exp exp2 "
    "expm1 log log1p log2 tanh sigmoid erf sin cos isnan isinf maximum minimum fma select cast load store keep fold "
    "pow fmod remainder floor_divide shift_left shift_right power atan2 copysign clamp scale split iota map all any "
    "read put group permute bitcast buffers symbols lanes team own fusec malloc free bf16 f16 compare by_halves widen "
    "narrow lowest highest".split()
)


def identifier(name: str) -> str:
    """Return the C++ identifier of a name; reserved words of C++ and the header get a suffix."""
    return f"{name}_" if name in _RESERVED else name


def scalar_type(dtype: DType) -> str:
    """Return the C++ type of one element in a register."""
    return MEMORY_TYPES[t.accumulation(dtype)]


def print_constant(constant: Constant, dtype: DType) -> str:
    """Return a literal in the compute type."""
    value = constant.value
    if dtype == t.BOOL:
        return "true" if value else "false"
    if not dtype.is_float:
        return f"{scalar_type(dtype)}({_integer(t.wrapped(int(value), dtype))})"
    suffix = "" if dtype == t.F64 else "f"
    value = float(value)
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(value) or (suffix and abs(value) >= 2.0**128 * (1 - 2.0**-25)):
        return f"{'-' if value < 0 else ''}__builtin_inf{suffix}()"
    text = repr(value)
    return (text if any(c in text for c in ".en") else text + ".0") + suffix


def _integer(value: int) -> str:
    if value == -(2**63):
        return "(-9223372036854775807LL - 1)"
    return str(value) if abs(value) < 2**31 else f"{value}LL"


CPP = Language(
    "C++", "{} / {}", "floor_divide<int64_t>({}, {})", "remainder<int64_t>({}, {})",
    "minimum<int64_t>({}, {})", "maximum<int64_t>({}, {})", _integer, identifier,
)  # fmt: skip
"""Sizes and offsets, in 64-bit arithmetic."""
