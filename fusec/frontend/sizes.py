"""Torch's symbolic sizes as plain sympy over the IR's own symbols."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fusec.errors import ImportFailure
from fusec.frontend.lengths import product_for
from fusec.ir.types import Size, quotient, simplify


def _remainder(a: Any, b: Any) -> Any:
    """Return a remainder as a quotient where it may be part of one: ``n + -n % 64`` is 64 times one."""
    return a - b * sympy.floor(a / b) if b.is_Integer and b > 0 else sympy.Mod(a, b)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "FloorDiv": lambda a, b: quotient(a, b) if b.is_positive else sympy.floor(a / b),
    "CeilDiv": lambda a, b: sympy.ceiling(a / b),
    "CeilToInt": sympy.ceiling,
    "FloorToInt": sympy.floor,
    "CleanDiv": lambda a, b: a / b,
    "TrueDiv": lambda a, b: a / b,
    "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b,
    "ToFloat": lambda a: a,
    "Identity": lambda a: a,
    "Mod": _remainder,
    "PythonMod": _remainder,
    "ModularIndexing": lambda a, b, m: _remainder(sympy.floor(a / b), m),
    "PowByNatural": lambda a, b: a**b,
    "FloatPow": lambda a, b: a**b,
    "Max": sympy.Max,
    "Min": sympy.Min,
    "TruncToInt": lambda a: sympy.Piecewise((sympy.floor(a), a >= 0), (sympy.ceiling(a), True)),
    "OpaqueUnaryFn_sqrt": sympy.sqrt,
    "OpaqueUnaryFn_exp": sympy.exp,
    "OpaqueUnaryFn_log": sympy.log,
    "Where": lambda c, a, b: sympy.Piecewise((a, c), (b, True)),
}


_EXACT = 1024
"""Products of sizes with floats of at most so large a denominator, a power of two, are exact in Python as well."""


@dataclass(frozen=True)
class Real:
    """A float that the graph computes from sizes, such as ``4 / n``: torch's expression, with true division."""

    expr: Any


def finalize_numbers(graph: torch.fx.Graph) -> None:
    """Guard on the sign of symbolic numbers in calls: symbols of the IR are positive, so a number is positive or 0.

    A negative number stays unknown: a guard would compile for each value of it.
    """
    for node in graph.find_nodes(op="placeholder"):
        number = node.meta.get("val")
        if isinstance(number, torch.SymInt) and number.node.has_hint():
            if number.node.hint == 0:
                int(number)
            elif number.node.hint > 0:
                bool(number > 0)


def to_size(value: Any) -> Size:
    """An int or a symbolic int as a size: replacements of the shape environment applied, torch's functions gone."""
    if isinstance(value, (int, float)):
        return int(value) if value == int(value) else sympy.Float(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return simplify(to_plain(value.node.expr))
    raise ImportFailure(
        f"{value!r} is not a size", why=f"a size is a number, known or symbolic, not a {type(value).__name__}"
    )


def to_plain(expr: Any) -> Any:
    """A sympy expression of torch over our symbols, or products of these, and sympy's own functions.

    Raises:
        ImportFailure: for a function without a plain meaning.
    """
    if isinstance(expr, (int, float)):
        return sympy.sympify(expr)
    if expr.is_Symbol:
        return product_for(expr.name)
    if expr.is_Float and (exact := sympy.Rational(float(expr))).q <= _EXACT:
        return exact
    if not expr.args:
        return expr
    args = [to_plain(a) for a in expr.args]
    if type(expr).__module__.startswith("sympy."):
        return expr.func(*args)
    function = _FUNCTIONS.get(type(expr).__name__)
    if function is None:
        why = f"no sympy counterpart of {type(expr).__name__} is known"
        raise ImportFailure(f"the size {expr}", why=why, fix="compile with dynamic=False")
    return sympy.sympify(function(*args))
