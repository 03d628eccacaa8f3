"""Visible keys of attention: bounds from masks that are computed from indices, and masks that are loaded.

Blocks of keys that no query of a block sees are skipped. NaN and infinities there are ignored then, as in torch's own
causal attention.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sympy

from fusec.ir.types import I64, Size
from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr, walk

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


def visible_keys(scores: IndexedExpr, keys: tuple[Axis, ...], symbol: Callable[[Axis], sympy.Symbol]) -> list[Bound]:
    """Return proven bounds of the keys whose score is not -inf: of comparisons that select -inf where they fail."""
    bounds = (_bound(condition, hidden, keys, symbol) for condition, hidden in _hidden(scores))
    return [bound for bound in bounds if bound is not None]


def loaded_masks(scores: IndexedExpr, keys: tuple[Axis, ...]) -> list[tuple[IndexedExpr, bool | float]]:
    """Return masks that the scores load, each with the value at which the score is -inf.

    Comparisons that ``visible_keys`` makes bounds of are left out.
    """
    return [
        (item, hidden)
        for item, hidden in _hidden(scores)
        if not item.axes.isdisjoint(keys)
        and any(part.kind in ("load", "lookup") for part in walk([item]))
        and _is_known(item)
        and _bound(item, hidden, keys, _placeholder) is None
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


def _hidden(scores: IndexedExpr) -> Iterator[tuple[IndexedExpr, bool | float]]:
    """Yield pairs of an expression and a value: wherever the expression has the value, the score is -inf."""
    if scores.kind == "load" and scores.dtype.is_float:
        yield scores, -math.inf
    if scores.kind != "pointwise":
        return
    if scores.node.is_op("where"):
        condition, first, second = scores.operands
        for value, hidden in ((second, False), (first, True)):
            if value.kind == "constant" and value.node.attributes.get("value") == -math.inf:
                yield from _each(condition, hidden)
                yield from _hidden(second if hidden else first)
    elif scores.node.is_op("cast", "add"):
        for operand in scores.operands:
            yield from _hidden(operand)


def _each(condition: IndexedExpr, hidden: bool) -> Iterator[tuple[IndexedExpr, bool]]:
    """Yield the operands of a conjunction, or of the negation of a disjunction."""
    if condition.kind == "pointwise" and condition.node.is_op("or" if hidden else "and"):
        for operand in condition.operands:
            yield from _each(operand, hidden)
    else:
        yield condition, hidden


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
