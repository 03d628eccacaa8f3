"""Which keys a query can see: bounds that a mask of indices puts on them, and what a loaded mask says at run time.

Keys that no query of a block sees are not read, so that what is not finite there goes unseen, as in torch's own
causal attention.
"""

import math
from collections.abc import Callable, Iterator

import sympy

from fusec.analysis.affine import Axis
from fusec.analysis.indexing import Located, walk
from fusec.ir.types import Size

_LESS = {"le": 0, "lt": 1, "ge": 0, "gt": 1}


def visible_keys(
    scores: Located, keys: Axis, symbol: Callable[[Axis], sympy.Symbol]
) -> tuple[list[sympy.Expr], list[sympy.Expr]]:
    """Lower and upper bounds (inclusive) of the keys whose score is not -inf, as expressions over the other axes.

    Only what is proven counts: comparisons of indices under which a score is exactly -inf otherwise.
    """
    lower: list[sympy.Expr] = []
    upper: list[sympy.Expr] = []
    key = symbol(keys)
    for condition, hidden in _hidden(scores):
        slack = _slack(condition, symbol)
        if slack is not None and hidden:
            slack = sympy.expand(-slack - 1)
        slope = slack.coeff(key, 1) if slack is not None else 0
        if slope == -1:
            upper.append(sympy.expand(slack + key))
        elif slope == 1:
            lower.append(sympy.expand(key - slack))
    return lower, upper


def loaded_masks(scores: Located, keys: Axis) -> list[tuple[Located, bool | float]]:
    """Values known before any score is, and what each equals only where a score is -inf: for a look at run time."""
    return [
        (item, hidden)
        for item, hidden in _hidden(scores)
        if keys in item.axes
        and any(part.kind == "load" for part in walk([item]))
        and all(part.kind in ("load", "constant", "index", "pointwise") for part in walk([item]))
    ]


def _hidden(scores: Located) -> Iterator[tuple[Located, bool | float]]:
    """Values, each with what it equals only where a score is -inf."""
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


def _each(condition: Located, hidden: bool) -> Iterator[tuple[Located, bool]]:
    """What a conjunction (or the negation of a disjunction) is made of."""
    if condition.kind == "pointwise" and condition.node.is_op("or" if hidden else "and"):
        for operand in condition.operands:
            yield from _each(operand, hidden)
    else:
        yield condition, hidden


def _slack(condition: Located, symbol: Callable[[Axis], sympy.Symbol]) -> sympy.Expr | None:
    """An expression that is not negative exactly where the condition holds; None where it compares no indices."""
    if condition.kind != "pointwise" or condition.node.op.name not in _LESS:
        return None
    left, right = (_integer(o, symbol) for o in condition.operands)
    if left is None or right is None:
        return None
    if condition.node.is_op("ge", "gt"):
        left, right = right, left
    return sympy.expand(right - left - _LESS[condition.node.op.name])


def _integer(item: Located, symbol: Callable[[Axis], sympy.Symbol]) -> sympy.Expr | None:
    """An integer computed from indices, as an expression over axes and sizes."""
    if item.dtype.kind != "int":
        return None
    if item.kind == "index":
        out: sympy.Expr = sympy.sympify(item.index[0].offset)
        for axis, coefficient in item.index[0].terms:
            out = out + symbol(axis) * coefficient
        return out
    if item.kind == "constant":
        value: Size = item.node.attributes["value" if item.node.is_op("constant") else "expr"]
        return sympy.sympify(value)
    if item.kind == "pointwise" and item.node.is_op("add", "sub", "cast"):
        parts = [p for p in (_integer(o, symbol) for o in item.operands) if p is not None]
        if len(parts) == len(item.operands):
            first, *rest = parts
            return first - rest[0] if item.node.is_op("sub") else sum(rest, start=first)
    return None
