"""Affine index expressions over loop axes, and how views transform them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

import sympy

from fusec.ir.types import Size, product, same_size, simplify

_numbers = count()


@dataclass(frozen=True, eq=False)
class Axis:
    """One loop: its number of iterations and a label. Compared by identity."""

    size: Size
    label: str = "i"
    serial: int = field(default_factory=lambda: next(_numbers))

    def __repr__(self) -> str:
        return f"{self.label}{self.serial}<{self.size}>"


class Unaligned(Exception):
    """An index that is not affine over the axes as they are, but would be if ``axis`` were split.

    ``factor``: split it into an outer axis and an inner one of that length; ``segment``: split its range there.
    """

    def __init__(self, axis: Axis, *, factor: Size | None = None, segment: int | None = None) -> None:
        self.axis, self.factor, self.segment = axis, factor, segment
        super().__init__(f"{axis!r} must be split {f'by {factor}' if factor is not None else f'at {segment}'}")


class NotAffine(Exception):
    """An index that is not affine, however axes are split."""


@dataclass(frozen=True)
class Affine:
    """The index ``offset + Σ coefficient · axis``."""

    terms: tuple[tuple[Axis, Size], ...] = ()
    """Sorted by the axes' serial numbers; without zero coefficients and axes of length 1."""
    offset: Size = 0

    @staticmethod
    def of(terms: Iterable[tuple[Axis, Size]], offset: Size = 0) -> "Affine":
        """Return the normal form of a sum: equal axes merged, zeros dropped."""
        merged: dict[Axis, Size] = {}
        for axis, coefficient in terms:
            merged[axis] = merged[axis] + coefficient if axis in merged else coefficient
        kept = sorted(((a, c) for a, c in merged.items() if c != 0 and a.size != 1), key=lambda t: t[0].serial)
        return Affine(tuple((a, simplify(c)) for a, c in kept), simplify(offset))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that it depends on."""
        return tuple(axis for axis, _ in self.terms)

    def __add__(self, other: "Affine") -> "Affine":
        if not other.terms:
            return self if other.offset == 0 else Affine(self.terms, simplify(self.offset + other.offset))
        return Affine.of((*self.terms, *other.terms), self.offset + other.offset)

    def scaled(self, factor: Size) -> "Affine":
        """Return the index times a size."""
        if factor == 1:
            return self
        return Affine.of(((a, c * factor) for a, c in self.terms), self.offset * factor)

    def coefficient(self, axis: Axis) -> Size:
        """Return the coefficient of an axis; 0 where it has none."""
        return next((c for a, c in self.terms if a is axis), 0)

    def maximum(self) -> Size:
        """Return its largest value; all coefficients must be positive."""
        out = self.offset
        for axis, coefficient in self.terms:
            out = out + coefficient * (axis.size - 1)
        return simplify(out)


def at_least(a: Size, b: Size) -> bool:
    """Return whether ``a >= b`` is proven for all symbols of at least 1."""
    difference = simplify(a - b)
    if isinstance(difference, int):
        return difference >= 0
    shifted = sympy.expand(difference.subs({s: s + 1 for s in difference.free_symbols}, simultaneous=True))
    poly = shifted.as_coefficients_dict()
    return all(c >= 0 for c in poly.values()) and all(t.is_polynomial() for t in poly)


def divide(a: Size, b: Size) -> Size | None:
    """Return ``a / b`` where the division is proven to be exact, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    return _divide_symbols(a, b)


@lru_cache(maxsize=4096)  # every index asks it of the few sizes of a graph
def _divide_symbols(a: Size, b: Size) -> Size | None:
    quotient = sympy.cancel(sympy.sympify(a) / b)
    return simplify(quotient) if quotient.is_integer else None


def reindex(index: tuple[Affine, ...], shape: tuple[Size, ...], target: tuple[Size, ...]) -> tuple[Affine, ...]:
    """Return the index into ``target`` of the element at ``index`` of ``shape``, as a row-major reshape maps it.

    Raises:
        Unaligned: where an axis must be split first.
        NotAffine: where no split makes the index affine.
    """
    if 0 in target:
        # Dead load: all axes are kept, so that its mask still applies.
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
        raise NotAffine(f"an index into {target} exceeds it by {rest}")
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
    symbolic = "" if isinstance(stride, int) else " for symbolic sizes; dynamic=False makes sizes constants"
    raise NotAffine(f"{remainder} is not proven to be less than {stride}{symbolic}")


def _divide_offset(offset: Size, stride: Size) -> tuple[Size, Size]:
    if isinstance(offset, int) and isinstance(stride, int):
        return divmod(offset, stride)
    quotient = divide(offset, stride)
    if quotient is not None:
        return quotient, 0
    return (0, offset)


def merged_dims(source: tuple[Size, ...], shape: tuple[Size, ...]) -> list[list[int]]:
    """Return the neighbouring dims of ``source`` that each dim of ``shape`` merges; empty where it merges none."""
    groups, rest = list[list[int]](), list(range(len(source)))
    if len(shape) >= len(source) or 1 in source or 1 in shape:
        return []
    for n in shape:
        groups.append([])
        while rest and not (groups[-1] and same_size(product(tuple(source[d] for d in groups[-1])), n)):
            groups[-1].append(rest.pop(0))
        if not same_size(product(tuple(source[d] for d in groups[-1])), n):
            return []
    return [] if rest else groups
