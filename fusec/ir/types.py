"""Types of values: dtype, shape, strides and device, all immutable."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy

from fusec.errors import GraphError

Size: TypeAlias = int | sympy.Expr
"""A length: an int, or a sympy expression over the symbols of the graph."""

ASSUMED_SIZE = 97
"""Value of a size symbol in estimates where it is unknown: medium, and unlikely to be a real size."""


@dataclass(frozen=True)
class DType:
    """A dtype."""

    name: str
    """As printed: ``bf16``."""
    kind: str
    """``float``, ``int``, ``bool`` or ``other`` (complex, float8, quantised: data that only opaque nodes touch)."""
    bytes: int
    """Size of one element in memory."""

    def __str__(self) -> str:
        return self.name

    @property
    def is_float(self) -> bool:
        """True where arithmetic on it rounds."""
        return self.kind == "float"


F64, F32 = DType("f64", "float", 8), DType("f32", "float", 4)
BF16, F16 = DType("bf16", "float", 2), DType("f16", "float", 2)
I64, I32, I16, I8 = DType("i64", "int", 8), DType("i32", "int", 4), DType("i16", "int", 2), DType("i8", "int", 1)
U8, BOOL = DType("u8", "int", 1), DType("bool", "bool", 1)
E4M3, E5M2 = DType("float8_e4m3fn", "other", 1), DType("float8_e5m2", "other", 1)
"""Without arithmetic, but for casts, which the frontend imports as arithmetic on their bits."""
DTYPES = {d.name: d for d in (F64, F32, BF16, F16, I64, I32, I16, I8, U8, BOOL)}


_WIDER: dict[DType, tuple[DType, ...]] = {
    BF16: (F32, F64),
    F16: (F32, F64),
    F32: (F64,),
    BOOL: (BF16, F16, F32, F64, I64, I32, I16, I8, U8),
    I8: (I16, I32, I64, BF16, F16, F32, F64),
    U8: (I16, I32, I64, BF16, F16, F32, F64),
    I16: (I32, I64, F32, F64),
    I32: (I64, F64),
}


def holds_all(wide: DType, narrow: DType) -> bool:
    """Return whether ``wide`` represents every number of ``narrow``."""
    return wide == narrow or wide in _WIDER.get(narrow, ())


def accumulation(dtype: DType) -> DType:
    """Return the dtype in which arithmetic on ``dtype`` accumulates: f32 for half types."""
    return F32 if dtype in (BF16, F16) else dtype


def wrapped(number: int, dtype: DType) -> int:
    """Return an integer wrapped to the range of an integer dtype."""
    least = 0 if dtype == U8 else -(1 << 8 * dtype.bytes - 1)
    return (number - least) % (1 << 8 * dtype.bytes) + least


@dataclass(frozen=True)
class TensorType:
    """A tensor: dtype, shape, strides (in elements) and device (``cpu``, ``cuda:0``)."""

    dtype: DType
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    device: str = "cpu"

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def numel(self) -> Size:
        """Number of elements."""
        return product(self.shape)

    @property
    def nbytes(self) -> Size:
        """Bytes of its elements (not of its storage)."""
        return self.numel * self.dtype.bytes

    @property
    def is_contiguous(self) -> bool:
        """True where the elements are row-major without gaps; strides of length-1 dims do not count."""
        dense = contiguous_strides(self.shape)
        return all(a == b or n == 1 for a, b, n in zip(self.strides, dense, self.shape, strict=True))

    def with_shape(self, shape: tuple[Size, ...]) -> "TensorType":
        """Return the type with a contiguous ``shape``."""
        return replace(self, shape=shape, strides=contiguous_strides(shape))

    def with_dtype(self, dtype: DType) -> "TensorType":
        """Return the type with another dtype."""
        return replace(self, dtype=dtype)

    def same_values(self, other: "Type") -> bool:
        """Return whether a value of ``other`` may replace one of this type: all but the strides are equal."""
        return (
            isinstance(other, TensorType)
            and (self.dtype, self.device) == (other.dtype, other.device)
            and same_shape(self.shape, other.shape)
        )

    def same_memory(self, other: "TensorType") -> bool:
        """Return whether elements of equal shapes have equal places; strides of length-1 dims do not count."""
        along = zip(self.shape, self.strides, other.strides, strict=True)
        return all(n == 1 or same_size(a, b) for n, a, b in along) or self.numel == 0

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.shape))
        layout = "" if self.is_contiguous else f" @({', '.join(map(str, self.strides))})"
        device = "" if self.device == "cpu" else f" {self.device}"
        return f"{self.dtype}[{dims}]{layout}{device}"


@dataclass(frozen=True)
class ScalarType:
    """A Python number that is passed at run time; an ``int`` may define a size symbol."""

    kind: str
    """``int``, ``float`` or ``bool``."""
    expr: Size | None = None
    """Its value as an expression of size symbols, where known."""

    def __str__(self) -> str:
        return self.kind if self.expr is None else f"{self.kind}({self.expr})"


@dataclass(frozen=True)
class OtherType:
    """Anything else that only opaque nodes exchange: None, a tensor list, a complex tensor."""

    name: str

    def __str__(self) -> str:
        return f"other<{self.name}>"


Type: TypeAlias = TensorType | ScalarType | OtherType


def contiguous_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Return row-major strides in elements, as torch computes them (a length of 0 counts as 1)."""
    strides: list[Size] = []
    step: Size = 1
    for n in reversed(shape):
        strides.append(step)
        step = step * (n if n != 0 else 1)
    return tuple(reversed(strides))


def product(sizes: tuple[Size, ...]) -> Size:
    """The product of sizes; 1 for none."""
    out: Size = 1
    for n in sizes:
        out = out * n
    return simplify(out)


def simplify(size: Size) -> Size:
    """A normal form: expanded, and an int where it is one."""
    if isinstance(size, int):
        return size
    if isinstance(size, sympy.Expr) and size.is_Symbol:
        return size
    size = sympy.expand(size)
    if size.has(sympy.floor):
        size = sympy.expand(_with_plain_quotients(size))
    return int(size) if size.is_Integer else size


def _with_plain_quotients(size: sympy.Expr) -> sympy.Expr:
    """Each quotient in its one form, innermost first."""
    if not size.args:
        return size
    args = map(_with_plain_quotients, size.args)
    return _floor(*args) if isinstance(size, sympy.floor) else size.func(*args)


def _floor(exact: sympy.Expr) -> sympy.Expr:
    """The one form of a quotient: ⌊x - 3/2⌋ is ⌊x + 1/2⌋ - 2, ⌊3x/2⌋ is x + ⌊x/2⌋, and ⌊-x/4⌋ is -⌊x/4 + 3/4⌋."""
    exact = sympy.expand(exact)
    number, terms = exact.as_coeff_add()
    whole = sympy.floor(number)
    parts = [term.as_coeff_Mul() for term in terms]
    if all(factor.is_Rational and count.is_integer for factor, count in parts):
        # Take the nearest multiple out of each count, so that the remainder is at most a half.
        whole += sum(sympy.ceiling(factor - sympy.S.Half) * count for factor, count in parts)
        rest = sympy.expand(exact - whole)
        number, terms = rest.as_coeff_add()
        if terms and min(terms, key=sympy.default_sort_key).as_coeff_Mul()[0] < 0:
            units = sympy.ilcm(number.q, *(term.as_coeff_Mul()[0].q for term in terms))
            return whole - _floor(sympy.Rational(units - 1, units) - rest)
    return sympy.floor(exact - whole) + whole


def quotient(a: Size, b: Size) -> Size:
    """Return ``a / b`` rounded down, for positive ``b``; nested quotients are merged into one."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    terms = sympy.Add.make_args(sympy.expand(a))
    inner = [term for term in terms if isinstance(term, sympy.floor)]
    if len(inner) == 1:
        a = a - inner[0] + inner[0].args[0]
    return simplify(sympy.floor(a / b))


def same_size(a: Size, b: Size) -> bool:
    """Return whether two sizes are equal for every value of their symbols."""
    return bool(a == b) or (not (isinstance(a, int) and isinstance(b, int)) and simplify(a - b) == 0)


def same_shape(a: tuple[Size, ...], b: tuple[Size, ...]) -> bool:
    """Return whether two shapes are equal for every value of their symbols."""
    return a == b or (len(a) == len(b) and all(map(same_size, a, b)))


def broadcast(*shapes: tuple[Size, ...]) -> tuple[Size, ...]:
    """The shape that pointwise operands of these shapes broadcast to.

    Raises:
        ValueError: where two lengths differ and neither is 1.
    """
    rank = max(map(len, shapes), default=0)
    out: list[Size] = [1] * rank
    for shape in shapes:
        for i, n in enumerate(shape, start=rank - len(shape)):
            if out[i] == 1:
                out[i] = n
            elif n != 1 and not same_size(out[i], n):
                raise ValueError(f"shapes do not broadcast: {shapes}")
    return tuple(out)


def symbol(name: str) -> sympy.Symbol:
    """The symbol of that name, with the assumptions every size symbol has: a positive integer."""
    return sympy.Symbol(name, integer=True, positive=True)


def evaluate_size(expr: Size, symbols: Mapping[str, int]) -> int:
    """The value of a size.

    Raises:
        GraphError: where a symbol is unknown, or the value is not an integer.
    """
    if isinstance(expr, int):
        return expr
    if expr.is_Symbol and expr.name in symbols:
        return symbols[expr.name]
    value = expr.subs({s: symbols[s.name] for s in expr.free_symbols if s.name in symbols})
    if not value.is_Integer:
        unknown = ", ".join(sorted(map(str, value.free_symbols)))
        raise GraphError(f"size {expr} is not an integer", why=f"{unknown} is unknown" if unknown else f"it is {value}")
    return int(value)


def evaluate_sizes(sizes: Sequence[Size], symbols: Mapping[str, int]) -> tuple[int, ...]:
    """The values of several sizes."""
    return tuple(n if isinstance(n, int) else evaluate_size(n, symbols) for n in sizes)


def estimate(size: Size, symbols: Mapping[str, int] | None = None) -> int:
    """Return the approximate value of a size, for costs and display: unknown symbols count as ``ASSUMED_SIZE``.

    So does a size that has no value then, such as a quotient by a quotient that is 0.
    """
    if isinstance(size, int):
        return size
    known = symbols or {}
    found = size.subs({s: known.get(s.name, ASSUMED_SIZE) for s in size.free_symbols})
    return int(found) if found.is_finite else ASSUMED_SIZE


def storage_numel(type: TensorType) -> Size:
    """Return the number of elements from the first to the last of a tensor of this type."""
    out: Size = 1
    for n, stride in zip(type.shape, type.strides, strict=True):
        if n == 0:
            return 0
        out = out + (n - 1) * stride
    return out
