"""Affine index expressions over loop axes: what views do to an index, without general algebra."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

import sympy

from fusec.ir.types import Size, simplify

_numbers = count()


@dataclass(frozen=True, eq=False)
class Axis:
    """One loop: a name and how many steps it takes. Identity is equality."""

    size: Size
    label: str = "i"
    serial: int = field(default_factory=lambda: next(_numbers))

    def __repr__(self) -> str:
        return f"{self.label}{self.serial}<{self.size}>"


class Unaligned(Exception):
    """An index that is not affine over the present axes, but would be if ``axis`` were cut in two.

    ``factor``: cut into an outer axis and an inner one of that length; ``segment``: cut the range at that point.
    """

    def __init__(self, axis: Axis, *, factor: Size | None = None, segment: int | None = None) -> None:
        self.axis, self.factor, self.segment = axis, factor, segment
        super().__init__(f"{axis!r} must be cut by {factor if factor is not None else segment}")


class NotAffine(Exception):
    """An index that no cutting of axes makes affine."""


@dataclass(frozen=True)
class Affine:
    """``offset + Σ coefficient · axis``."""

    terms: tuple[tuple[Axis, Size], ...] = ()
    """In the order of the axes' serial numbers; no zero coefficients, no axes of length 1."""
    offset: Size = 0

    @staticmethod
    def of(terms: Iterable[tuple[Axis, Size]], offset: Size = 0) -> "Affine":
        """The normal form: equal axes merged, zeros dropped."""
        merged: dict[Axis, Size] = {}
        for axis, coefficient in terms:
            merged[axis] = merged[axis] + coefficient if axis in merged else coefficient
        kept = sorted(((a, c) for a, c in merged.items() if c != 0 and a.size != 1), key=lambda t: t[0].serial)
        return Affine(tuple((a, simplify(c)) for a, c in kept), simplify(offset))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes it depends on."""
        return tuple(axis for axis, _ in self.terms)

    def __add__(self, other: "Affine") -> "Affine":
        if not other.terms:
            return self if other.offset == 0 else Affine(self.terms, simplify(self.offset + other.offset))
        return Affine.of((*self.terms, *other.terms), self.offset + other.offset)

    def scaled(self, factor: Size) -> "Affine":
        """This times a size."""
        if factor == 1:
            return self
        return Affine.of(((a, c * factor) for a, c in self.terms), self.offset * factor)

    def coefficient(self, axis: Axis) -> Size:
        """What one step along ``axis`` adds."""
        return next((c for a, c in self.terms if a is axis), 0)

    def maximum(self) -> Size:
        """Its largest value, all coefficients being positive."""
        out = self.offset
        for axis, coefficient in self.terms:
            out = out + coefficient * (axis.size - 1)
        return simplify(out)


def at_least(a: Size, b: Size) -> bool:
    """Whether ``a >= b`` is certain, all symbols being at least 1."""
    difference = simplify(a - b)
    if isinstance(difference, int):
        return difference >= 0
    shifted = sympy.expand(difference.subs({s: s + 1 for s in difference.free_symbols}, simultaneous=True))
    poly = shifted.as_coefficients_dict()
    return all(c >= 0 for c in poly.values()) and all(t.is_polynomial() for t in poly)


def divide(a: Size, b: Size) -> Size | None:
    """``a / b`` if that is a size without remainder, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = sympy.cancel(sympy.sympify(a) / b)
    return simplify(quotient) if quotient.is_integer else None


def reindex(index: tuple[Affine, ...], shape: tuple[Size, ...], target: tuple[Size, ...]) -> tuple[Affine, ...]:
    """The index into ``target`` of the element at ``index`` of ``shape``, both holding the same elements row-major.

    Raises:
        Unaligned: where one axis must be cut first.
        NotAffine: where nothing helps.
    """
    if 0 in target:
        # It is never read. Every axis is kept, so that a tile of no lanes masks the load.
        return (*(Affine() for _ in target[1:]), sum(index, Affine()))
    linear = Affine()
    step: Size = 1
    for position, n in zip(reversed(index), reversed(shape), strict=True):
        linear = linear + position.scaled(step)
        step = simplify(step * n)
    out: list[Affine] = []
    rest = linear
    strides: list[Size] = []
    step = 1
    for n in reversed(target):
        strides.append(step)
        step = simplify(step * n)
    for n, stride in zip(target, reversed(strides), strict=True):
        if n == 1:
            out.append(Affine())
            continue
        quotient, rest = _divmod(rest, stride)
        out.append(quotient)
    if rest.terms or rest.offset != 0:
        raise NotAffine(f"{rest} is left over of an index into {target}")
    return tuple(out)


def _divmod(value: Affine, stride: Size) -> tuple[Affine, Affine]:
    if stride == 1:
        return value, Affine()
    whole: list[tuple[Axis, Size]] = []
    part: list[tuple[Axis, Size]] = []
    for axis, coefficient in value.terms:
        quotient = divide(coefficient, stride)
        if quotient is not None:
            whole.append((axis, quotient))
            continue
        part.append((axis, coefficient))
    offset, rest = _divide_offset(value.offset, stride)
    remainder = Affine.of(part, rest)
    if at_least(stride - 1, remainder.maximum()):
        return Affine.of(whole, offset), remainder
    for axis, coefficient in part:
        factor = divide(stride, coefficient)
        if factor is not None and divide(axis.size, factor) not in (None, 1):
            raise Unaligned(axis, factor=factor)
    known = "" if isinstance(stride, int) else ", as far as symbolic sizes are known; with dynamic=False they are"
    raise NotAffine(f"{remainder} does not stay below {stride}{known}")


def _divide_offset(offset: Size, stride: Size) -> tuple[Size, Size]:
    if isinstance(offset, int) and isinstance(stride, int):
        return divmod(offset, stride)
    quotient = divide(offset, stride)
    if quotient is not None:
        return quotient, 0
    return (0, offset)
