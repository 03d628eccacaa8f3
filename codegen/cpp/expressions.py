"""Index expressions, literals and type names as C++ text."""

import math

import sympy

from fusec.codegen.kernel import Constant
from fusec.errors import BuildError
from fusec.ir import types as t
from fusec.ir.types import DType, Size

MEMORY_TYPES = {
    t.F64: "double", t.F32: "float", t.BF16: "bf16", t.F16: "f16", t.I64: "int64_t", t.I32: "int32_t",
    t.I16: "int16_t", t.I8: "int8_t", t.U8: "uint8_t", t.BOOL: "bool",
}  # fmt: skip
"""C++ type of one element in memory."""

_FLOOR_DIVISIONS = ("FloorDiv", "CleanDiv")
_REMAINDERS = ("Mod", "PythonMod")


def scalar_type(dtype: DType) -> str:
    """C++ type of one element in a register."""
    return MEMORY_TYPES[t.accumulation(dtype)]


def print_size(size: Size) -> str:
    """An integer expression over loop axes and symbols, in 64-bit arithmetic."""
    if isinstance(size, int):
        return _integer(size)
    return _print(sympy.sympify(size))


def print_constant(constant: Constant, dtype: DType) -> str:
    """A literal in the type that the operation computes in."""
    value = constant.value
    if dtype == t.BOOL:
        return "true" if value else "false"
    if not dtype.is_float:
        return f"{scalar_type(dtype)}({_integer(_wrap(int(value), dtype))})"
    suffix = "" if dtype == t.F64 else "f"
    value = float(value)
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(value) or (suffix and abs(value) >= 2.0**128 * (1 - 2.0**-25)):
        return f"{'-' if value < 0 else ''}__builtin_inf{suffix}()"
    text = repr(value)
    return (text if any(c in text for c in ".en") else text + ".0") + suffix


def _wrap(value: int, dtype: DType) -> int:
    bits = 8 * dtype.bytes
    value &= (1 << bits) - 1
    return value if dtype == t.U8 or value < 1 << (bits - 1) else value - (1 << bits)


def _integer(value: int) -> str:
    if value == -(2**63):
        return "(-9223372036854775807LL - 1)"
    return str(value) if abs(value) < 2**31 else f"{value}LL"


def _print(e: sympy.Expr) -> str:
    if e.is_Integer:
        return _integer(int(e))
    if e.is_Symbol:
        return str(e)
    name = type(e).__name__
    if e.is_Add:
        return _sum(e)
    if e.is_Mul:
        return _product(e)
    if e.is_Pow and e.exp.is_Integer and int(e.exp) > 0:
        return " * ".join([_factor(e.base)] * int(e.exp))
    if isinstance(e, sympy.floor) or isinstance(e, sympy.ceiling):
        return _rounded(e)
    if name in _FLOOR_DIVISIONS or name in _REMAINDERS:
        function = "floor_divide" if name in _FLOOR_DIVISIONS else "remainder"
        return f"{function}<int64_t>({_print(e.args[0])}, {_print(e.args[1])})"
    if name == "ModularIndexing":
        base, divisor, modulus = (_print(a) for a in e.args)
        return f"remainder<int64_t>(floor_divide<int64_t>({base}, {divisor}), {modulus})"
    if isinstance(e, sympy.Min) or isinstance(e, sympy.Max) or name in ("Min", "Max"):
        function = "minimum" if name == "Min" else "maximum"
        text = _print(e.args[0])
        for argument in e.args[1:]:
            text = f"{function}<int64_t>({text}, {_print(argument)})"
        return text
    raise BuildError(f"the size {e} has no C++ form", why=f"{name} is not an integer operation that the printer knows")


def _sum(e: sympy.Expr) -> str:
    if any(c.is_Rational and not c.is_Integer for c in e.atoms(sympy.Number)):
        numerator, denominator = sympy.fraction(sympy.together(e))
        if denominator != 1:
            return f"({_print(numerator)}) / {_factor(denominator)}"
    text = ""
    for term in sorted(e.args, key=lambda a: (a.is_Number, str(a))):
        negative = term.could_extract_minus_sign()
        part = _print(-term if negative else term)
        text += (" - " if text else "-") + f"{part}" if negative else (" + " if text else "") + part
    return text


def _product(e: sympy.Expr) -> str:
    numerator, denominator = sympy.fraction(e)
    if denominator != 1:
        return f"({_print(numerator)}) / {_factor(denominator)}"
    return " * ".join(_factor(a) for a in sorted(e.args, key=lambda a: (not a.is_Number, str(a))))


def _factor(e: sympy.Expr) -> str:
    bare = (not e.is_Add and not e.is_Number) or (e.is_Integer and int(e) >= 0)
    return _print(e) if bare else f"({_print(e)})"


def _rounded(e: sympy.Expr) -> str:
    numerator, denominator = sympy.fraction(sympy.together(e.args[0]))
    if isinstance(e, sympy.ceiling):
        return f"-floor_divide<int64_t>(-({_print(numerator)}), {_print(denominator)})"
    return f"floor_divide<int64_t>({_print(numerator)}, {_print(denominator)})"
