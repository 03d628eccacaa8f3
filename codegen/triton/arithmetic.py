"""One pointwise operation of the tile program as one Triton expression."""

import math
from collections.abc import Callable

from fusec.codegen.tile.kernel import Compute, Constant, Operand
from fusec.errors import ScheduleError
from fusec.ir.types import BF16, BOOL, F32, F64, U8, DType, accumulation, wrapped

NAMES: dict[str, str] = {
    "f64": "tl.float64", "f32": "tl.float32", "bf16": "tl.bfloat16", "f16": "tl.float16", "i64": "tl.int64",
    "i32": "tl.int32", "i16": "tl.int16", "i8": "tl.int8", "u8": "tl.uint8", "bool": "tl.int1",
}  # fmt: skip
"""Triton's name of each dtype."""

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_LIBRARY = {
    "exp2": "tl.exp2", "log": "tl.log", "log2": "tl.log2", "sin": "tl.sin", "cos": "tl.cos",
    "erf": "tl.erf", "floor": "tl.floor", "ceil": "tl.ceil", "abs": "tl.abs", "fma": "tl.fma",
    # The error of an attention weight grows with its exponent, but such a weight is negligible beside e^0.
    "exp_of_weight": "tl.exp",
}  # fmt: skip
_PRELUDE = {"exp", "expm1", "log1p", "trunc", "tanh", "atan2"}
_INTEGER_IDENTITY = {"floor", "ceil", "round", "trunc"}
_SQUARINGS = 8
"""Powers up to this exponent are printed as multiplications."""


def literal(value: float | int | bool, dtype: DType) -> str:
    """Return a number as a Python literal of the kind of ``dtype``; integers wrap into its range."""
    if dtype == BOOL:
        return str(bool(value))
    if not dtype.is_float:
        return str(wrapped(int(value), dtype))
    value = float(value)
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def filled(value: float | int | bool, dtype: DType, shape: str = "()") -> str:
    """Return a scalar or tile of one number, of exactly that dtype.

    Triton reads every literal equal to 0 as +0, and computes -x as 0 - x.
    """
    text = f"tl.full({shape}, {literal(value, dtype)}, {NAMES[dtype.name]})"
    return f"({text} * -1.0)" if _is_negative_zero(value, dtype) else text


def _is_negative_zero(value: float | int | bool, dtype: DType) -> bool:
    return dtype.is_float and value == 0 and math.copysign(1.0, value) < 0


def expression(compute: Compute, name: Callable[[str], str]) -> str:
    """Return the right-hand side of a ``Compute``.

    Args:
        compute: the operation.
        name: the text of a defined name.

    Raises:
        ScheduleError: for an operation that has no form in this dtype.
    """
    return _Expression(compute, name).text()


_FORMS: dict[str, dict[str, str]] = {
    "f64": {"div": "{} / {}", "sqrt": "tl.sqrt({})", "rsqrt": "1.0 / tl.sqrt({})"},
    "u8": {"not": f"{{}} ^ {filled(255, U8)}"},  # the interpreter's ~ is x ^ -1, out of range
    "bool": {"not": "{} == 0", "maximum": "{} | {}", "minimum": "{} & {}"},
    "float": {"neg": "{} * -1.0", "isinf": 'tl.abs({}) == float("inf")', "floor_divide": "floor_divide({}, {})"},
    "any": {
        "neg": "-{}", "not": "~{}", "div": "tl.div_rn({}, {})", "sqrt": "tl.sqrt_rn({})", "rsqrt": "tl.rsqrt({})",
        "sigmoid": "1.0 / (1.0 + exp(-{}))", "isnan": "{0} != {0}", "isinf": "{0} != {0}", "fmod": "{} % {}",
        "maximum": "max_or_nan({}, {})", "minimum": "min_or_nan({}, {})", "remainder": "remainder({}, {})",
        "floor_divide": "floor_divide_int({}, {})",
    },
}  # fmt: skip
"""The form of an operation by the name of its dtype, else by its kind, else in any dtype."""


class _Expression:
    def __init__(self, compute: Compute, name: Callable[[str], str]) -> None:
        self.op, self.dtype, self.rounds_to = compute.op, compute.dtype, compute.rounds_to
        self.operands = compute.operands
        self.name = name

    def typed(self, operand: Operand, dtype: DType | None = None) -> str:
        """Return an operand as a value of exactly the compute type."""
        if isinstance(operand, Constant):
            return filled(operand.value, accumulation(dtype or self.dtype))
        return self.name(operand)

    def bare(self) -> list[str]:
        """Return the operands of an infix operator; literals take the type of the other side."""
        numbers = [o for o in self.operands if isinstance(o, Constant)]
        if len(numbers) == len(self.operands) or any(_is_negative_zero(n.value, self.dtype) for n in numbers):
            return [self.typed(o) for o in self.operands]
        return [literal(o.value, self.dtype) if isinstance(o, Constant) else self.name(o) for o in self.operands]

    def text(self) -> str:
        op = self.op
        if op in _INFIX:
            left, right = self.bare()
            return f"{_signed(left)} {_INFIX[op]} {_signed(right)}"
        if op in _INTEGER_IDENTITY and not self.dtype.is_float:
            return self.typed(self.operands[0])
        special = getattr(self, f"_{op}", None)
        if special is not None:
            return str(special(*self.operands))
        if form := self._form(op):
            return form.format(*map(self.typed, self.operands))
        arguments = ", ".join(map(self.typed, self.operands))
        if op in _LIBRARY:
            return f"{_LIBRARY[op]}({arguments})"
        if op in _PRELUDE and not (op == "atan2" and self.dtype == F64):
            return f"{'tanh_f64' if op == 'tanh' and self.dtype == F64 else op}({arguments})"
        raise self._missing()

    def _form(self, op: str) -> str:
        """Return the form of an operation with ``{}`` for operands; empty for one that is not in the table."""
        kinds = (self.dtype.name, self.dtype.kind, "any")
        return next((_FORMS[kind][op] for kind in kinds if op in _FORMS.get(kind, ())), "")

    def _missing(self) -> ScheduleError:
        return ScheduleError(f"{self.op} of {self.dtype} has no Triton form", fix="leave it outside the kernel")

    def _sign(self, x: Operand) -> str:
        x = self.typed(x)
        zero, one = filled(0, self.dtype), filled(1, self.dtype)
        below = zero if self.dtype == U8 else f"tl.where({x} < 0, {filled(-1, self.dtype)}, {zero})"
        return f"tl.where({x} > 0, {one}, {below})"  # 0 of NaN

    def _reciprocal(self, x: Operand) -> str:
        return self._form("div").format(self.typed(Constant(1.0)), self.typed(x))

    def _round(self, x: Operand) -> str:
        return f"round_even({self.typed(x)}, {2.0 ** (52 if self.dtype == F64 else 23)})"

    def _where(self, condition: Operand, x: Operand, y: Operand) -> str:
        return f"tl.where({self.typed(condition, BOOL)}, {self.typed(x)}, {self.typed(y)})"

    def _shift(self, x: Operand, y: Operand) -> str:
        """Shift by 0 to bits - 1, as LLVM defines no others; for those the result is eager's: zero, or the sign."""
        bits = 8 * self.dtype.bytes
        if isinstance(y, Constant) and y.value in range(bits):
            return f"{self.typed(x)} {'<<' if self.op == 'shift_left' else '>>'} {self.typed(y)}"
        return f"{self.op}({self.typed(x)}, {self.typed(y)}, {bits})"

    _shift_left = _shift_right = _shift

    def _pow(self, x: Operand, y: Operand) -> str:
        if isinstance(y, Constant) and float(y.value) in (0.5, -0.5, -1.0) and self.dtype.is_float:
            root = self._form("sqrt" if y.value > 0 else "rsqrt").format(self.typed(x))
            return self._reciprocal(x) if y.value == -1.0 else root
        if isinstance(y, Constant) and not isinstance(x, Constant) and y.value in range(1, _SQUARINGS + 1):
            return " * ".join([self.typed(x)] * int(y.value))
        if self.dtype == F64:
            raise self._missing()
        return f"{'power' if self.dtype.is_float else 'power_int'}({self.typed(x)}, {self.typed(y)})"

    def _bitcast(self, x: Operand) -> str:
        if self.rounds_to == U8:
            return self.typed(x)  # float8 is loaded as its bits
        out = f"{self.typed(x)}.to({NAMES[(self.rounds_to or self.dtype).name]}, bitcast=True)"
        return out if self.rounds_to in (None, self.dtype) else f"{out}.to({NAMES[self.dtype.name]})"

    def _cast(self, x: Operand) -> str:
        to = self.rounds_to or self.dtype
        if isinstance(x, Constant):
            x_text = filled(x.value, F32 if isinstance(x.value, float) and to != F64 else accumulation(to))
        else:
            x_text = self.name(x)
        if to == BOOL:
            return f"{x_text} != 0"
        if to == BF16:
            return rounded(to, x_text)
        out = f"{x_text}.to({NAMES[to.name]})"
        return out if to == self.dtype else f"{out}.to({NAMES[self.dtype.name]})"


def _signed(text: str) -> str:
    return f"({text})" if text.startswith("-") else text


def identity(op: str, dtype: DType) -> float | int | bool:
    """Return the identity of a reduction with ``op`` in ``dtype``."""
    if op in ("sum", "prod"):
        return 0 if op == "sum" else 1
    if dtype.is_float:
        return -math.inf if op == "max" else math.inf
    if dtype == BOOL:
        return op == "min"
    bits = 8 * dtype.bytes
    low, high = (0, 2**bits - 1) if dtype == U8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return low if op == "max" else high


COMBINERS: dict[str, str] = {"sum": "add", "prod": "product", "max": "max_or_nan", "min": "min_or_nan"}
"""The device function that combines two partial results of a reduction."""


def combined(op: str, dtype: DType, left: str, right: str) -> str:
    """Return ``left op right`` for two partial results of a reduction."""
    if dtype == BOOL:
        return f"{left} {'|' if op in ('sum', 'max') else '&'} {right}"
    if op in ("sum", "prod"):
        return f"{left} {'+' if op == 'sum' else '*'} {right}"
    return f"{COMBINERS[op]}({left}, {right})"


def reduced(op: str, dtype: DType, tile: str, dim: int = 0) -> str:
    """Return the reduction of a tile along one of its dimensions, in ``dtype``."""
    if dtype == BOOL:
        combiner = COMBINERS["max" if op in ("max", "sum") else "min"]
        return f"tl.reduce(({tile}).to(tl.int32), {dim}, {combiner}) != 0"
    return f"tl.reduce({tile}, {dim}, {COMBINERS[op]})"


def narrowed(dtype: DType, text: str) -> str:
    """Return a value converted to ``dtype``, for a matrix unit."""
    if accumulation(dtype) == dtype:
        return text
    return f"narrow_bf16({text})" if dtype == BF16 else f"({text}).to({NAMES[dtype.name]})"


def rounded(dtype: DType, text: str) -> str:
    """Return a value of the compute type of ``dtype``, rounded to ``dtype``."""
    if accumulation(dtype) == dtype:
        return text
    if dtype == BF16:
        return f"round_bf16({text})"
    return f"({text}).to({NAMES[dtype.name]}).to({NAMES[accumulation(dtype).name]})"
