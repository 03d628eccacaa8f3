"""Visible keys of attention: bounds from masks that are computed from indices, and masks that are loaded.

Blocks of keys that no query of a block sees are skipped. NaN and infinities there are ignored then, as in torch's own
causal attention.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sympy

from fusec.ir.types import BF16, F16, F32, F64, I64, Size
from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr, walk

_LOWEST = {F16: -65504.0, BF16: -(2 - 2.0**-7) * 2.0**127, F32: -(2 - 2.0**-23) * 2.0**127, F64: -sys.float_info.max}
"""The lowest number of each type, which models mask with."""
_LESS = {"le": 0, "lt": 1, "ge": 0, "gt": 1}


@dataclass(frozen=True)
class Bound:
    """A bound on the keys whose score is not -inf."""

    upper: bool
    """True if it is an upper bound, else a lower one."""
    value: sympy.Expr
    """Inclusive, over the other axes and ``numbers``."""
    numbers: dict[sympy.Symbol, IndexedExpr]
    """Integers that are known at run time before any score is, such as a loaded position."""


@dataclass(frozen=True)
class Mask:
    """An expression that hides scores, each where it has a certain value."""

    item: IndexedExpr
    hidden: bool | float
    """The value: of a condition, or -inf of a number that is added."""
    least: float = -math.inf
    """The score that a condition leaves, or up to which a number that is added hides: -inf, or the lowest number of a
    type. Next to a score that is shown, the weight of either is 0; where all scores of a row are the lowest number, its
    weights are equal."""

    @property
    def leaves_infinity(self) -> bool:
        """True if a score that it hides may be -inf."""
        return self.least == -math.inf or not isinstance(self.hidden, bool)


def visible_keys(scores: IndexedExpr, keys: tuple[Axis, ...], symbol: Callable[[Axis], sympy.Symbol]) -> list[Bound]:
    """Return proven bounds of the keys whose score is not -inf: of comparisons that select -inf where they fail."""
    conditions = (mask for mask in _hidden(scores) if mask.least == -math.inf)
    bounds = (_bound(mask.item, mask.hidden, keys, symbol) for mask in conditions)
    return [bound for bound in bounds if bound is not None]


def loaded_masks(scores: IndexedExpr, keys: tuple[Axis, ...]) -> list[Mask]:
    """Return masks that are known before any score is, and hide some keys: loaded, or of the lowest number.

    Comparisons that ``visible_keys`` makes bounds of are left out.
    """
    known = [mask for mask in _hidden(scores) if not mask.item.axes.isdisjoint(keys) and _is_known(mask.item)]
    return [
        mask
        for mask in known
        if mask.least != -math.inf
        or (
            any(part.kind in ("load", "lookup") for part in walk([mask.item]))
            and _bound(mask.item, mask.hidden, keys, _placeholder) is None
        )
    ]


def _is_known(item: IndexedExpr) -> bool:
    """Return whether a value is arithmetic of loads, so that it is known before any score is."""
    return all(part.kind in ("load", "lookup", "constant", "index", "pointwise") for part in walk([item]))


def _placeholder(axis: Axis) -> sympy.Symbol:
    return sympy.Symbol(f"axis{axis.serial}", integer=True, nonnegative=True)


def _bound(
    condition: IndexedExpr, hidden: bool | float, keys: tuple[Axis, ...], symbol: Callable[[Axis], sympy.Symbol]
) -> Bound | None:
    """Return the bound of the visible keys, given a condition that is ``hidden`` for hidden ones; None without one."""
    if condition.kind != "pointwise" or condition.node.op.name not in _LESS:
        return None
    integers = _Integers(keys, symbol)
    slack, key = integers.slack(condition), integers.key
    if slack is not None and hidden:
        slack = sympy.expand(-slack - 1)
    slope = slack.coeff(key, 1) if slack is not None else 0
    if slope not in (-1, 1):
        return None
    value = sympy.expand(slack + key if slope == -1 else key - slack)
    return Bound(slope == -1, value, integers.numbers)


def _hidden(scores: IndexedExpr) -> Iterator[Mask]:
    """Yield the masks of the scores."""
    if scores.kind == "load" and scores.dtype.is_float:
        yield Mask(scores, -math.inf, _LOWEST[scores.dtype])
    if scores.kind != "pointwise":
        return
    if scores.node.is_op("where"):
        condition, first, second = scores.operands
        for value, hidden in ((second, False), (first, True)):
            number = value.node.attributes.get("value") if value.kind == "constant" else None
            if number is not None and scores.dtype.is_float and number <= _LOWEST[scores.dtype]:
                least = -math.inf if number == -math.inf else _LOWEST[scores.dtype]
                for part in _each(condition, hidden):
                    yield Mask(part, hidden, least)
                yield from _hidden(second if hidden else first)
    elif scores.node.is_op("cast", "add"):
        for operand in scores.operands:
            yield from _hidden(operand)


def _each(condition: IndexedExpr, hidden: bool) -> Iterator[IndexedExpr]:
    """Yield the operands of a conjunction, or of the negation of a disjunction."""
    if condition.kind == "pointwise" and condition.node.is_op("or" if hidden else "and"):
        for operand in condition.operands:
            yield from _each(operand, hidden)
    else:
        yield condition


class _Integers:
    """Builds integer expressions over axes, sizes, and symbols for numbers known only at run time."""

    def __init__(self, keys: tuple[Axis, ...], symbol: Callable[[Axis], sympy.Symbol]) -> None:
        self.keys, self.symbol = keys, symbol
        self.key = sympy.Dummy("key", integer=True, nonnegative=True)
        """The number of a key, over all axes."""
        self.numbers: dict[sympy.Symbol, IndexedExpr] = {}

    def slack(self, condition: IndexedExpr) -> sympy.Expr | None:
        """Return an expression that is non-negative exactly where a comparison of integers holds; else None."""
        left, right = (self.expression(o) for o in condition.operands)
        if left is None or right is None:
            return None
        if condition.node.is_op("ge", "gt"):
            left, right = right, left
        return sympy.expand(right - left - _LESS[condition.node.op.name])

    def expression(self, item: IndexedExpr) -> sympy.Expr | None:
        """Return an integer over indices, or as a symbol for a run-time number that is the same for all keys."""
        if item.dtype.kind != "int":
            return None
        out = self._computed(item)
        if out is None and item.axes.isdisjoint(self.keys) and _is_known(item):
            out = sympy.Dummy(f"number{len(self.numbers)}", integer=True)
            self.numbers[out] = item
        return out

    def _computed(self, item: IndexedExpr) -> sympy.Expr | None:
        if item.kind == "index":
            out: sympy.Expr = sympy.sympify(item.index[0].offset)
            for axis, coefficient in item.index[0].terms:
                out = out + self.symbol(axis) * coefficient
            return self._over_keys(out)
        if item.kind == "constant":
            value: Size = item.node.attributes["value" if item.node.is_op("constant") else "expr"]
            return sympy.sympify(value)
        if item.kind != "pointwise" or not item.node.is_op("add", "sub", "cast"):
            return None
        # Indices do not overflow; loaded values may, in types narrower than int64.
        if item.dtype != I64 and any(part.kind == "load" for part in walk([item])):
            return None
        parts = [p for p in map(self.expression, item.operands) if p is not None]
        if len(parts) < len(item.operands):
            return None
        first, *rest = parts
        return first - rest[0] if item.node.is_op("sub") else sum(rest, start=first)

    def _over_keys(self, out: sympy.Expr) -> sympy.Expr | None:
        """Return an expression with the number of a key in place of its axes; None where it is no function of that."""
        *outer, inner = self.keys
        rest, step = self.key, inner.size
        for axis in reversed(outer):
            rest, step = rest - self.symbol(axis) * step, step * axis.size
        out = sympy.expand(out.subs(self.symbol(inner), rest))
        return None if any(out.has(self.symbol(axis)) for axis in outer) else out
