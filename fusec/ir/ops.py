"""The operations of the IR: name, traits, type rule and meaning of each, in one table."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Flag, auto
from typing import Any, TypeAlias

import sympy

from fusec.ir import types as t
from fusec.ir.types import TensorType, Type

Attributes: TypeAlias = dict[str, Any]
"""Immutable values by name: numbers, strings, sizes, tuples of them, DType, and a Graph for a body."""
TypeRule: TypeAlias = Callable[[tuple[Type, ...], Attributes], tuple[Type, ...]]


class Trait(Flag):
    """Properties of an operation that passes rely on."""

    POINTWISE = auto()
    """Each result element depends on the operand elements at the same (broadcast) position."""
    REDUCTION = auto()
    """Folds the dims in ``dims``; they stay, with length 1."""
    SCAN = auto()
    """Folds the elements along ``dim`` up to each of them."""
    SORT = auto()
    """Orders the elements along the last dim."""
    CONTRACTION = auto()
    CONVOLUTION = auto()
    """Slides a window of weights over the spatial dims, which follow batch and channels."""
    VIEW = auto()
    """Moves elements without computing; ``concat`` is one, although it needs memory."""
    SOURCE = auto()
    """Has no operands."""
    WRITE = auto()
    """Writes to the storage of its first operand."""
    LOOKUP = auto()
    """Reads elements of its first operand at indices in the second."""
    ORDERED = auto()
    """Keeps its order among the ordered nodes; never merged, never dropped."""
    REGION = auto()
    OPAQUE = auto()
    COMMUTATIVE = auto()


@dataclass(frozen=True)
class Op:
    """One operation."""

    name: str
    traits: Trait
    rule: TypeRule
    """Operand types and attributes to result types; raises ValueError or TypeError where they do not fit."""
    meaning: str
    """The formula of one result element, for readers; ``reference.interpreter`` executes it."""
    arity: int | None
    """Number of operands; None where it varies."""
    cost: int = 1
    """Arithmetic per result element, in FLOPs (a transcendental function counts as its polynomial)."""

    def has(self, trait: Trait) -> bool:
        """Return whether the operation has the trait."""
        return self.traits._value_ & trait._value_ != 0  # a tenth of the time of Flag.__and__

    def __repr__(self) -> str:
        return f"Op({self.name})"


def _tensors(types: tuple[Type, ...]) -> list[TensorType]:
    for ty in types:
        if not isinstance(ty, TensorType):
            raise TypeError(f"a tensor is expected, not {ty}")
    return list(types)  # type: ignore[arg-type]


def _pointwise(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    tensors = _tensors(types)
    if len({x.dtype for x in tensors}) != 1:
        raise TypeError(f"operands have different dtypes: {', '.join(map(str, tensors))}")
    shape = t.broadcast(*(x.shape for x in tensors))
    for x in tensors:
        if t.same_shape(x.shape, shape):
            return (replace(x, shape=shape, strides=_dense_like(x)),)
    return (tensors[0].with_shape(shape),)


def _dense_like(x: TensorType) -> tuple[t.Size, ...]:
    """Strides of a fresh result for ``x``: a permutation of row-major is kept, anything else becomes row-major."""
    if x.is_contiguous or not all(isinstance(n, int) for n in x.shape + x.strides):
        return t.contiguous_strides(x.shape)
    order = sorted(range(x.rank), key=lambda d: (-int(x.strides[d]), d))
    dense = t.contiguous_strides(tuple(x.shape[d] for d in order))
    strides = [0] * x.rank
    for d, stride in zip(order, dense, strict=True):
        strides[d] = int(stride)
    kept = all(strides[d] == x.strides[d] for d in range(x.rank) if x.shape[d] != 1)
    return tuple(strides) if kept else t.contiguous_strides(x.shape)


def _compare(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    (result,) = _pointwise(types, attributes)
    assert isinstance(result, TensorType)
    return (result.with_dtype(t.BOOL),)


def _where(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    condition, *branches = _tensors(types)
    if condition.dtype != t.BOOL:
        raise TypeError(f"the condition is {condition}, not bool")
    (result,) = _pointwise((condition.with_dtype(branches[0].dtype), *branches), attributes)
    return (result,)


def _cast(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    (x,) = _tensors(types)
    return (replace(x, dtype=attributes["dtype"], strides=_dense_like(x)),)


def _bitcast(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    (x,) = _tensors(types)
    source, dtype = x.dtype, attributes["dtype"]
    to_float = (source, dtype) in ((t.I32, t.F32), (t.I16, t.F16), (t.I16, t.BF16))
    if not to_float and not (source.kind == "other" and source.bytes == 1 and dtype == t.U8):
        raise TypeError(f"the bits of {source} as {dtype}: a float of as many bits, or u8 for float8, is expected")
    return _cast(types, attributes)


def _reduction(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    (x,) = _tensors(types)
    dims = attributes["dims"]
    if any(not -x.rank <= d < 0 for d in dims) or tuple(sorted(set(dims))) != dims:
        raise ValueError(f"dims {dims} of {x}: negative, sorted and distinct dims are expected")
    return (x.with_shape(tuple(1 if d - x.rank in dims else n for d, n in enumerate(x.shape))),)


def _scan(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    (x,) = _tensors(types)
    if not -x.rank <= attributes["dim"] < 0 or x.dtype == t.BOOL:
        raise ValueError(f"a scan of {x} along {attributes['dim']}: numbers and a negative dim are expected")
    return (x.with_shape(x.shape),)


def _argsort(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    (x,) = _tensors(types)
    count = attributes["count"]
    if not x.rank or (isinstance(count, int) and isinstance(x.shape[-1], int) and not 0 <= count <= x.shape[-1]):
        raise ValueError(f"the first {count} elements of {x} in order: a dim with as many is expected")
    return (x.with_dtype(t.I64).with_shape((*x.shape[:-1], count)),)


def _contraction(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    tensors = _tensors(types)
    terms, out = split_spec(attributes["spec"])
    sizes: dict[str, t.Size] = {}
    if len(terms) != len(tensors):
        raise ValueError(f"spec {attributes['spec']} names {len(terms)} operands, not {len(tensors)}")
    dtype = attributes.get("dtype", tensors[0].dtype)
    of_bytes = multiplies_bytes(attributes)
    if not of_bytes and len({x.dtype for x in tensors}) != 1:
        raise TypeError(f"operands have different dtypes: {', '.join(map(str, tensors))}")
    if of_bytes and (dtype != t.I32 or not all(x.dtype in (t.I8, t.U8) for x in tensors)):
        raise TypeError(f"{', '.join(map(str, tensors))}: bytes, whose products are summed in i32, are expected")
    for term, x in zip(terms, tensors, strict=True):
        if len(term) != x.rank:
            raise ValueError(f"term {term} of spec {attributes['spec']} does not fit {x}")
        for label, n in zip(term, x.shape, strict=True):
            if not t.same_size(sizes.setdefault(label, n), n):
                raise ValueError(f"label {label} of spec {attributes['spec']} is {sizes[label]} and {n}")
    return (tensors[0].with_dtype(dtype).with_shape(tuple(sizes[label] for label in out)),)


def split_spec(spec: str) -> tuple[list[str], str]:
    """Split a contraction's ``spec`` into operand terms and result term: ``ab,cb->ac`` into ``[ab, cb], ac``."""
    left, _, out = spec.partition("->")
    return left.split(","), out


def multiplies_bytes(attributes: Attributes) -> bool:
    """Return whether a contraction multiplies int8 or uint8 and sums in int32."""
    return "dtype" in attributes


def _convolution(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    x, weight = tensors = _tensors(types)
    if x.dtype != weight.dtype or x.rank != weight.rank or x.rank < 3:
        raise TypeError(f"{weight} is no convolution weight for {x}")
    groups, spatial = attributes["groups"], x.rank - 2
    each = tuple(attributes[k] for k in ("stride", "padding", "dilation"))
    if any(len(sizes) != spatial for sizes in each):
        raise ValueError(f"stride, padding and dilation of {x}: {spatial} numbers each are expected")
    if not t.same_size(x.shape[1], weight.shape[1] * groups) or not _divides(groups, weight.shape[0]):
        raise ValueError(f"{groups} groups of {weight} do not fit the channels of {x}")
    shape = (
        t.simplify(t.quotient(n + 2 * padding - dilation * (k - 1) - 1, stride) + 1)
        for n, k, stride, padding, dilation in zip(x.shape[2:], weight.shape[2:], *each, strict=True)
    )
    return (tensors[0].with_shape((x.shape[0], weight.shape[0], *shape)),)


def _divides(count: int, size: t.Size) -> bool:
    return not isinstance(size, int) or size % count == 0


def _same_count(a: t.Size, b: t.Size) -> bool:
    """Return whether two element counts are equal, taking a floored quotient to be exact: eager has checked it."""
    if t.same_size(a, b):
        return True
    exact = (sympy.sympify(n).replace(sympy.floor, lambda quotient: quotient) for n in (a, b))
    return t.same_size(*map(t.simplify, exact))


def _reshape(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    (x,) = _tensors(types)
    shape = attributes["shape"]
    if not _same_count(t.product(shape), x.numel):
        raise ValueError(f"{x} cannot be reshaped to {shape}: the element counts differ")
    return (x.with_shape(shape),)


def _permute(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    (x,) = _tensors(types)
    dims = attributes["dims"]
    if sorted(dims) != list(range(x.rank)):
        raise ValueError(f"{dims} does not permute the dims of {x}")
    return (replace(x, shape=tuple(x.shape[d] for d in dims), strides=tuple(x.strides[d] for d in dims)),)


def _expand(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    (x,) = _tensors(types)
    shape = attributes["shape"]
    if not t.same_shape(t.broadcast(x.shape, shape), shape):
        raise ValueError(f"{x} does not expand to {shape}")
    lead = len(shape) - x.rank
    strides = tuple(
        0 if d < lead or not t.same_size(x.shape[d - lead], n) else x.strides[d - lead] for d, n in enumerate(shape)
    )
    return (replace(x, shape=shape, strides=strides),)


def _slice(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    (x,) = _tensors(types)
    d, start, stop, step = (attributes[k] for k in ("dim", "start", "stop", "step"))
    if not -x.rank <= d < 0 or step < 1:
        raise ValueError(f"slice dim {d} (negative is expected) or step {step} is invalid for {x}")
    known = [n for n in (0, start, stop, x.shape[d]) if isinstance(n, int)]
    if known != sorted(known):
        raise ValueError(f"slice from {start} to {stop} is empty or outside dim {x.shape[d]}")
    shape, strides = list(x.shape), list(x.strides)
    shape[d] = t.simplify(stop - start if step == 1 else -((start - stop) // step))
    strides[d] = strides[d] * step
    return (replace(x, shape=tuple(shape), strides=tuple(strides)),)


def _window(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    (x,) = _tensors(types)
    d, size, step = (attributes[k] for k in ("dim", "size", "step"))
    if not -x.rank <= d < 0:
        raise ValueError(f"windows along dim {d} of {x}: a negative dim is expected")
    shape, strides = [*x.shape, size], [*x.strides, x.strides[d]]
    shape[d - 1] = t.simplify(t.quotient(x.shape[d] - size, step) + 1)
    strides[d - 1] = strides[d - 1] * step
    return (replace(x, shape=tuple(shape), strides=tuple(strides)),)


def _concat(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    tensors = _tensors(types)
    d, first = attributes["dim"], tensors[0]
    if not -first.rank <= d < 0:
        raise ValueError(f"concat dim {d} of {first}: a negative dim is expected")
    for x in tensors[1:]:
        same = x.rank == first.rank and x.dtype == first.dtype
        pairs = zip(x.shape, first.shape, strict=True) if same else ()
        if not same or not all(t.same_size(a, b) for i, (a, b) in enumerate(pairs) if i - x.rank != d):
            raise ValueError(f"{x} does not concatenate with {first} along {d}")
    shape = list(first.shape)
    shape[d] = t.simplify(sum(x.shape[d] for x in tensors))
    return (first.with_shape(tuple(shape)),)


def _constant(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    return (TensorType(attributes["dtype"], (), (), attributes.get("device", "cpu")),)


def _iota(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    return (TensorType(attributes["dtype"], (attributes["size"],), (1,), attributes.get("device", "cpu")),)


def _full(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    shape = attributes["shape"]
    return (TensorType(attributes["dtype"], shape, t.contiguous_strides(shape), attributes.get("device", "cpu")),)


def _write(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    destination, value, *index = _tensors(types)
    if destination.dtype != value.dtype or len(index) > 1 or bool(index) != ("dim" in attributes):
        raise TypeError(f"{value} cannot be written to {destination}")
    if not index and not t.same_shape(destination.shape, value.shape):
        raise ValueError(f"{value} does not have the shape of {destination}")
    return (destination,)


def _scatter(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    destination, value, index = _tensors(types)
    if destination.dtype != value.dtype or index.dtype != t.I64 or not -index.rank <= attributes["dim"] < 0:
        raise TypeError(f"{value} cannot be written to {destination} at {index}")
    if destination.rank != index.rank or not t.same_shape(value.shape, index.shape):
        raise ValueError(f"{value} has not the shape of {index}, or it has not the rank of {destination}")
    combine = attributes.get("combine", "maximum")
    if combine not in COMBINING or (destination.dtype == t.BOOL and combine in ("add", "mul")):
        raise ValueError(f"a scatter into {destination} that combines elements by {combine}")
    return (destination,)


COMBINING = ("add", "mul", "maximum", "minimum")
"""The operations by which a scatter may combine the old element and the new one, instead of replacing it."""


def _take(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    table, index = _tensors(types)
    d = attributes["dim"]
    if not -table.rank <= d < 0 or index.dtype != t.I64:
        raise ValueError(f"take of {index} from {table} along {d}: an i64 index and a negative dim are expected")
    d += table.rank
    return (table.with_shape((*table.shape[:d], *index.shape, *table.shape[d + 1 :])),)


def _gather(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    table, index = _tensors(types)
    if not -table.rank <= attributes["dim"] < 0 or index.dtype != t.I64 or index.rank != table.rank:
        raise ValueError(f"gather of {index} from {table}: an i64 index of equal rank and a negative dim are expected")
    return (table.with_shape(index.shape),)


def _declared(types: tuple[Type, ...], attributes: Attributes) -> tuple[Type, ...]:
    raise TypeError("opaque nodes and regions declare their result types; they are not inferred")


OPS: dict[str, Op] = {}


def _define(traits: Trait, rule: TypeRule, arity: int | None, rows: dict[str, str | tuple[str, int]]) -> None:
    for name, row in rows.items():
        meaning, cost = row if isinstance(row, tuple) else (row, 1)
        OPS[name] = Op(name, traits, rule, meaning, arity, cost)


_define(Trait.POINTWISE, _pointwise, 1, {
    "neg": "-x", "abs": "|x|", "sign": "sign(x), 0 for NaN", "floor": "⌊x⌋", "ceil": "⌈x⌉",
    "round": "nearest integer, halves to even", "trunc": "towards zero",
    "sqrt": ("√x", 8), "rsqrt": ("1/√x", 9), "reciprocal": ("1/x", 4),
    "exp": ("eˣ", 16), "exp2": ("2ˣ", 14), "expm1": ("eˣ-1", 20), "log": ("ln x", 20), "log1p": ("ln(1+x)", 22),
    "log2": ("log₂ x", 20), "tanh": ("tanh x", 24), "sigmoid": ("1/(1+e⁻ˣ)", 20), "erf": ("erf x", 28),
    "sin": ("sin x", 24), "cos": ("cos x", 24), "not": "¬x (bitwise on integers)",
})  # fmt: skip
_define(Trait.POINTWISE, _compare, 1, {"isnan": "x is NaN", "isinf": "x is infinite"})
_define(Trait.POINTWISE | Trait.COMMUTATIVE, _pointwise, 2, {
    "add": "x+y", "mul": "x·y", "maximum": "max(x,y), NaN if either is", "minimum": "min(x,y), NaN if either is",
    "and": "x∧y", "or": "x∨y", "xor": "x⊕y",
})  # fmt: skip
_define(Trait.POINTWISE, _pointwise, 2, {
    "sub": "x-y", "div": ("x/y", 4), "pow": ("xʸ", 40), "atan2": ("angle of (y, x)", 40),
    "floor_divide": ("⌊x/y⌋", 4), "remainder": ("x-y·⌊x/y⌋", 5), "fmod": ("x-y·trunc(x/y)", 5),
    "shift_left": "x·2ʸ", "shift_right": "⌊x/2ʸ⌋",
})  # fmt: skip
_define(Trait.POINTWISE | Trait.COMMUTATIVE, _compare, 2, {"eq": "x=y", "ne": "x≠y"})
_define(Trait.POINTWISE, _compare, 2, {"lt": "x<y", "le": "x≤y", "gt": "x>y", "ge": "x≥y"})
_define(Trait.POINTWISE, _where, 3, {"where": "x if c else y"})
_define(Trait.POINTWISE, _cast, 1, {"cast": "x as dtype, rounded to nearest even"})
_define(Trait.POINTWISE, _bitcast, 1, {"bitcast": "the bits of x as dtype"})
_define(Trait.REDUCTION, _reduction, 1, {
    "sum": "Σ x", "prod": "Π x", "max": "max x, NaN if any is", "min": "min x, NaN if any is",
})  # fmt: skip
_define(Trait.SCAN, _scan, 1, {"cumsum": "Σ of x up to each element", "cumprod": "Π of x up to each element"})
_define(Trait.SORT, _argsort, 1, {
    "argsort": "where the first count elements along the last dim are, smallest or, if descending, largest first; "
    "NaN is the largest, and equal elements keep their order",
})  # fmt: skip
_define(Trait.CONTRACTION, _contraction, 2, {"contraction": ("Σ x·y over the labels that the result lacks", 2)})
_define(Trait.CONVOLUTION, _convolution, 2, {"convolution": ("Σ x·w over a window and the channels of a group", 2)})
_define(Trait.VIEW, _reshape, 1, {"reshape": "the same elements in row-major order"})
_define(Trait.VIEW, _permute, 1, {"permute": "dims reordered; dims[i] is the operand's dim"})
_define(Trait.VIEW, _expand, 1, {"expand": "length-1 and missing leading dims repeated"})
_define(Trait.VIEW, _slice, 1, {"slice": "elements start, start+step, … below stop along dim"})
_define(Trait.VIEW, _window, 1, {"window": "size elements along dim from every step-th on, in a last dim of their own"})
_define(Trait.VIEW, _concat, None, {"concat": "operands one after another along dim"})
_define(Trait.SOURCE | Trait.POINTWISE, _constant, 0, {"constant": "the number in value, kept in full precision"})
_define(Trait.SOURCE, _constant, 0, {"size": "the size in expr, as a number"})
_define(Trait.SOURCE, _iota, 0, {"iota": "0, 1, … size-1"})
_define(Trait(0), _full, 0, {"full": "the number in value for every element, in storage that may be written"})
_define(Trait.WRITE, _write, None, {
    "write": "the first operand's storage takes the second (at the rows in the third along dim); its new value",
})  # fmt: skip
_define(Trait.WRITE, _scatter, 3, {
    "scatter": "the first operand's storage takes each element of the second, with the third as index along dim, in "
    "order, combined with the old one by the operation in combine, if there is one; its new value",
})  # fmt: skip
_define(Trait.LOOKUP, _take, 2, {"take": "the first operand at the indices in the second, of any rank, along dim"})
_define(
    Trait.LOOKUP,
    _gather,
    2,
    {"gather": "the first operand at each position of the second, with its value as index along dim"},
)
_define(Trait.OPAQUE, _declared, None, {"opaque": "a call of the ATen operation in target"})
_define(Trait.OPAQUE | Trait.ORDERED, _declared, None, {"ordered": "an opaque call whose order is kept"})
_define(Trait.REGION, _declared, None, {"region": "the body graph, as one"})
