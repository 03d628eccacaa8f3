"""Intervals of integers: bounds of all elements of a value, for all inputs."""

from collections.abc import Callable
from itertools import product
from typing import TypeAlias

from fusec.ir.graph import Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import BOOL, I64, U8, DType

Interval: TypeAlias = tuple[int, int]
"""The least and the greatest integer, both included."""

_MAX_DEPTH = 24
"""Operations that are followed from a value; beyond them it has the full range of its dtype."""


def interval(value: Value) -> Interval | None:
    """Return an interval that holds all elements of an integer or boolean value; None for other dtypes."""
    return _interval(value, {}, _MAX_DEPTH)


def range_of(dtype: DType) -> Interval:
    """Return the range of an integer or boolean dtype."""
    if dtype == BOOL:
        return 0, 1
    bits = 8 * dtype.bytes
    return (0, (1 << bits) - 1) if dtype == U8 else (-(1 << bits - 1), (1 << bits - 1) - 1)


def _interval(value: Value, known: dict[Value, Interval | None], depth: int) -> Interval | None:
    if value.dtype.kind not in ("int", "bool"):
        return None
    if value not in known:
        low, high = range_of(value.dtype)
        node = value.producer
        found = _result(node, value, lambda v: _interval(v, known, depth - 1)) if node is not None and depth else None
        # What leaves the range of the dtype wraps around.
        known[value] = found if found is not None and low <= found[0] <= found[1] <= high else (low, high)
    return known[value]


def _result(node: Node, value: Value, interval_of: Callable[[Value], Interval | None]) -> Interval | None:
    """Return the interval of a node's result before it wraps around; None where it is not known."""
    if node.has(Trait.SORT):
        n = node.operands[0].shape[-1]
        return 0, max(n - 1, 0) if isinstance(n, int) else range_of(I64)[1]
    if node.is_op("constant"):
        number = int(node.attributes["value"])
        return number, number
    if node.is_op("iota"):
        size = node.attributes["size"]
        return (0, max(size - 1, 0)) if isinstance(size, int) else (0, range_of(node.result.dtype)[1])
    if node.attributes.get("combine") in ("add", "mul"):
        return None
    if node.is_op("full"):
        return (int(node.attributes["value"]),) * 2
    either = node.has(Trait.VIEW | Trait.LOOKUP | Trait.WRITE) or node.is_op("where", "cast", "min", "max")
    rule = _union if either else _RULES.get(node.op.name)
    if rule is None:
        return None
    read = (
        node.operands[:1] if node.has(Trait.LOOKUP) else node.operands[:2] if node.has(Trait.WRITE) else node.operands
    )
    read = read[1:] if node.is_op("where") else read
    sides = [side for side in map(interval_of, read) if side is not None]
    return rule(*sides) if len(sides) == len(read) else None


def _union(*sides: Interval) -> Interval:
    return min(low for low, _ in sides), max(high for _, high in sides)


def _monotonic(f: Callable[..., int]) -> Callable[..., Interval]:
    """Return the rule of a function that is monotonic in each operand: its extremes are at ends of intervals."""

    def rule(*sides: Interval) -> Interval:
        ends = [f(*numbers) for numbers in product(*sides)]
        return min(ends), max(ends)

    return rule


def _and(a: Interval, b: Interval) -> Interval | None:
    most = [high for low, high in (a, b) if low >= 0]
    return (0, min(most)) if most else None


def _or(a: Interval, b: Interval) -> Interval | None:
    return (0, (1 << max(a[1], b[1]).bit_length()) - 1) if min(a[0], b[0]) >= 0 else None


def _shift_right(a: Interval, b: Interval) -> Interval | None:
    return (a[0] >> b[1], a[1] >> b[0]) if a[0] >= 0 and 0 <= b[0] and b[1] < 64 else None


def _floor_divide(a: Interval, b: Interval) -> Interval | None:
    return _monotonic(lambda x, y: x // y)(a, b) if b[0] > 0 else None


def _remainder(a: Interval, b: Interval) -> Interval | None:
    if b[0] <= 0:
        return None
    return a if 0 <= a[0] and a[1] < b[0] else (0, b[1] - 1)


_RULES: dict[str, Callable[..., Interval | None]] = {
    "add": _monotonic(lambda a, b: a + b),
    "sub": _monotonic(lambda a, b: a - b),
    "mul": _monotonic(lambda a, b: a * b),
    "neg": _monotonic(lambda a: -a),
    "maximum": _monotonic(max),
    "minimum": _monotonic(min),
    "and": _and,
    "or": _or,
    "xor": _or,
    "shift_right": _shift_right,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
}
