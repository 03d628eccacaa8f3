"""Matmuls of bytes by weights of bytes with a scale for each group: the sum of a group is exact in 32 bits."""

from dataclasses import dataclass
from typing import TypeAlias

from fusec.ir.types import F32, I8, U8, accumulation
from fusec.loops.affine import Axis
from fusec.loops.casts import EXACT, uncast
from fusec.loops.indexing import IndexedExpr
from fusec.loops.intervals import Interval, interval, range_of

Zero: TypeAlias = IndexedExpr | int


@dataclass(frozen=True)
class Codes:
    """A right operand as ``(codes - zero) · Π scales``; zero and scales are the same for all of a group."""

    codes: IndexedExpr
    """int8 or uint8."""
    zero: Zero
    scales: tuple[IndexedExpr, ...]

    @property
    def range(self) -> Interval:
        """The least and the greatest code."""
        found = interval(self.codes.value)
        assert found is not None
        return found


@dataclass(frozen=True)
class ByteGroups:
    """A contraction as ``Σ_o Π scales · Σ_i left · (codes - zero)``; ``i`` is its last bound axis, a group."""

    lefts: tuple[IndexedExpr, ...]
    """int8, one for each segment."""
    rights: tuple[Codes, ...]
    """All with the same zero and scales, and codes of one dtype."""


def find_byte_groups(contraction: IndexedExpr) -> ByteGroups | None:
    """Return a float contraction as sums of bytes in groups; None where it is none."""
    (*_, axis) = contraction.bound
    lefts = [uncast(left) for left, _ in contraction.pairs]
    rights = [_codes(right, axis) for _, right in contraction.pairs]
    found = tuple(codes for codes in rights if codes is not None)
    if accumulation(contraction.dtype) != F32 or any(left.dtype != I8 for left in lefts) or len(found) < len(rights):
        return None
    if len({(c.codes.dtype, c.zero, c.scales) for c in found}) > 1 or not isinstance(axis.size, int):
        return None
    largest = max(abs(end) for c in found for end in (*c.range, *_ends(c.zero)))
    exact = len(lefts) * axis.size * 128 * 2 * largest < 1 << 31
    return ByteGroups(tuple(lefts), found) if exact else None


def _codes(item: IndexedExpr, axis: Axis) -> Codes | None:
    """Return a right operand as codes, zero and scales; None where it is something else."""
    item, scales = uncast(item), list[IndexedExpr]()
    while item.kind == "pointwise" and item.node.is_op("mul") and item.dtype.is_float:
        varying = [o for o in item.operands if axis in o.axes]
        if len(varying) != 1:
            return None
        scales += (o for o in item.operands if o is not varying[0])
        item = uncast(varying[0])
    codes, zero = _difference(item, axis) or (item, 0)
    return Codes(codes, zero, tuple(scales)) if scales and codes.dtype in (I8, U8) else None


def _difference(item: IndexedExpr, axis: Axis) -> tuple[IndexedExpr, Zero] | None:
    """Return an expression as codes and the zero that is subtracted from them; None where it is something else."""
    if item.kind != "pointwise" or not item.node.is_op("sub", "add"):
        return None
    codes, zero = uncast(item.operands[0]), _integer(item.operands[1])
    if zero is None or axis in item.operands[1].axes:
        return None
    if item.node.is_op("add"):
        if not isinstance(zero, int):
            return None
        zero = -zero
    values, (least, most) = interval(codes.value), _ends(zero)
    if item.dtype.is_float or values is None:
        return codes, zero  # kernels compute in float32 or more
    start, end = range_of(item.dtype)
    return (codes, zero) if start <= values[0] - most and values[1] - least <= end else None


def _integer(item: IndexedExpr) -> Zero | None:
    """Return a byte, or the number of a constant that fits in one."""
    item = uncast(item)
    if item.kind == "constant" and item.node.is_op("constant"):
        number = item.node.attributes["value"]
        return int(number) if abs(number) < EXACT and number == int(number) else None
    return item if item.dtype in (I8, U8) else None


def _ends(zero: Zero) -> Interval:
    return (zero, zero) if isinstance(zero, int) else interval(zero.value) or (0, 0)
