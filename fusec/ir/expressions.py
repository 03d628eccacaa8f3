"""The functions that sizes may be built from, by the names under which sympy prints them."""

import operator
from collections.abc import Callable
from typing import Any

import sympy

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "floor": sympy.floor, "ceiling": sympy.ceiling, "Mod": sympy.Mod, "Max": sympy.Max, "Min": sympy.Min,
    "Abs": sympy.Abs, "sqrt": sympy.sqrt,
    "exp": sympy.exp, "log": sympy.log,
}  # fmt: skip
"""The functions that the parser accepts; everything else in a size is +, -, *, / and **."""

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "**": operator.pow,
}  # fmt: skip
_MOST_BITS = 4096
"""No power of two numbers is longer."""


def combine(sign: str, left: Any, right: Any) -> Any:
    """Return two sizes or numbers combined by an operator; a division stays exact.

    Raises:
        ValueError: for a power that no size can be.
    """
    if sign == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * abs(right) > _MOST_BITS:
            raise ValueError(f"{left} to the power {right} is too large")
    if sign == "/":
        return sympy.sympify(left) / sympy.sympify(right)
    return _OPERATORS[sign](left, right)
