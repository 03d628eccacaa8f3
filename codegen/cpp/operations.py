"""Pointwise operations as C++ expressions over the functions of vec.h."""

from collections.abc import Sequence

from fusec.errors import BuildError
from fusec.ir import types as t
from fusec.ir.types import DType

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_BOOL = {
    "add": "{0} | {1}", "mul": "{0} & {1}", "maximum": "{0} | {1}", "minimum": "{0} & {1}", "ne": "{0} ^ {1}",
    "eq": "!({0} ^ {1})", "lt": "!{0} & {1}", "le": "!{0} | {1}", "gt": "{0} & !{1}", "ge": "{0} | !{1}",
    "not": "!{0}", "abs": "{0}", "isnan": "{0} & !{0}", "isinf": "{0} & !{0}", "sign": "{0}",
}  # fmt: skip
"""Arithmetic on booleans, as torch defines it."""
_POWERS = {
    1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 0.5: "sqrt({0})", -0.5: "rsqrt({0})", -1.0: "reciprocal({0})",
    -2.0: "reciprocal({0} * {0})",
}  # fmt: skip
"""Exponents that eager special-cases, in the same way."""
_FUNCTIONS = frozenset(
    "abs sign floor ceil round trunc sqrt rsqrt reciprocal exp exp2 expm1 log log1p log2 tanh sigmoid erf sin cos "
    "isnan isinf maximum minimum atan2 floor_divide remainder fmod shift_left shift_right fma pow".split()
)


def print_operation(op: str, operands: Sequence[str], dtype: DType, exponent: float | None = None) -> str:
    """Return ``op`` of operand texts, computed in ``dtype``; ``exponent`` is that of a power, where it is a literal.

    Raises:
        BuildError: for an operation that has no C++ form.
    """
    if dtype == t.BOOL and op in _BOOL:
        return _BOOL[op].format(*operands)
    if op == "pow" and dtype.is_float and exponent is not None and float(exponent) in _POWERS:
        return _POWERS[float(exponent)].format(*operands)
    if op == "where":
        return f"select({', '.join(operands)})"
    if op == "neg":
        return f"-({operands[0]})" if operands[0].startswith("-") else f"-{operands[0]}"
    if op == "not":
        return f"~{operands[0]}"
    if op == "pow" and not dtype.is_float:
        return f"power({', '.join(operands)})"
    if op in _INFIX:
        return f"{operands[0]} {_INFIX[op]} {operands[1]}"
    if op in _FUNCTIONS:
        return f"{op}({', '.join(operands)})"
    raise BuildError(f"{op} has no C++ form", fix="add it to codegen/cpp/operations.py and codegen/cpp/functions.h")
