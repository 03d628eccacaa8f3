"""Size expressions as text: one walk over sympy's nodes, and the syntax of each language."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import sympy

from fusec.errors import BuildError
from fusec.ir.types import Size

_SUM, _QUOTIENT, _PRODUCT, _ATOM = range(4)
_Text: TypeAlias = tuple[str, int]
"""Text and its precedence."""


@dataclass(frozen=True)
class Language:
    """Syntax of integer arithmetic, with ``{}`` for an operand; Python's by default."""

    name: str = "Python"
    quotient: str = "{} // {}"
    """Syntax of a division without remainder."""
    floor: str = "{} // {}"
    remainder: str = "{} % {}"
    minimum: str = "min({}, {})"
    maximum: str = "max({}, {})"
    integer: Callable[[int], str] = str
    symbol: Callable[[str], str] = str

    def print(self, size: Size, tight: bool = False) -> str:
        """An integer expression, in parentheses where ``tight`` asks for one operand.

        Raises:
            BuildError: for a function that has no integer form.
        """
        return self._bound(sympy.sympify(size), _ATOM if tight else _SUM)

    def _bound(self, e: sympy.Expr, level: int) -> str:
        text, own = self._text(e)
        return text if own >= level else f"({text})"

    def _text(self, e: sympy.Expr) -> _Text:
        if e.is_Symbol:
            return self.symbol(e.name), _ATOM
        if e.is_Integer:
            return self.integer(int(e)), _ATOM if e >= 0 else _SUM
        if e.is_Add or e.is_Mul or e.is_Rational:
            over, under = e.as_numer_denom()
            if under != 1:
                return self._apply(self.quotient, over, under)
            return self._sum(e.args) if e.is_Add else self._sum([e]) if _is_negative(e) else self._product(e.args)
        if e.is_Pow and e.exp.is_Integer and e.exp > 0:
            return self._product([e.base] * int(e.exp))
        if isinstance(e, (sympy.floor, sympy.ceiling)):
            over, under = e.args[0].as_numer_denom()
            return self._apply(self.floor, over if isinstance(e, sympy.floor) else over + under - 1, under)
        if isinstance(e, sympy.Mod):
            return self._apply(self.remainder, *e.args)
        if isinstance(e, (sympy.Min, sympy.Max)):
            form = self.minimum if isinstance(e, sympy.Min) else self.maximum
            return reduce(form.format, (self._text(a)[0] for a in e.args)), _ATOM
        raise BuildError(f"the size {e} has no {self.name} form", why=f"{type(e).__name__} is no integer operation")

    def _apply(self, form: str, left: sympy.Expr, right: sympy.Expr) -> _Text:
        """A function of two operands, or an operator between them."""
        inside, outside = (_SUM, _ATOM) if form.endswith(")") else (_ATOM, _QUOTIENT)
        return form.format(self._bound(left, inside), self._bound(right, inside)), outside

    def _sum(self, terms: Iterable[sympy.Expr]) -> _Text:
        out = ""
        for term in sorted(terms, key=lambda a: (a.is_Number, str(a))):
            negative = _is_negative(term)
            # A minus in front binds more tightly than a quotient, which would then round the other way.
            text = self._bound(-term if negative else term, _PRODUCT if negative and not out else _QUOTIENT)
            out += (" - " if negative else " + ") + text if out else "-" * negative + text
        return out, _SUM

    def _product(self, factors: Iterable[sympy.Expr]) -> _Text:
        return " * ".join(self._bound(f, _PRODUCT if f.is_Pow else _ATOM) for f in factors), _PRODUCT


def _is_negative(term: sympy.Expr) -> bool:
    return bool(term.as_coeff_Mul()[0] < 0)


PYTHON = Language()


def sizes_text(sizes: tuple[Size, ...]) -> str:
    """A tuple of sizes in Python."""
    return f"({', '.join(map(PYTHON.print, sizes))}{',' if len(sizes) == 1 else ''})"
