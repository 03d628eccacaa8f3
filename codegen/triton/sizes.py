"""Size expressions as Triton text; every size and index is non-negative, so truncating division is exact."""

import sympy

from fusec.errors import ScheduleError
from fusec.ir.types import Size


def size_text(size: Size, tight: bool = False) -> str:
    """An int or sympy expression as Python text, in parentheses where ``tight`` asks for one operand.

    Raises:
        ScheduleError: for a function that has no integer form.
    """
    text, level = _text(sympy.sympify(size))
    return f"({text})" if tight and level < _ATOM else text


_SUM, _PRODUCT, _ATOM = 0, 1, 2


def _text(e: sympy.Expr) -> tuple[str, int]:
    """Text, and how strongly it binds."""
    if e.is_Symbol:
        return e.name, _ATOM
    if e.is_Integer:
        return str(e), _ATOM if e >= 0 else _SUM
    if e.is_Add or e.is_Mul or e.is_Rational:
        over, under = e.as_numer_denom()
        if under != 1:
            return f"{_bound(over, _ATOM)} // {_bound(under, _ATOM)}", _PRODUCT
        return _add(e) if e.is_Add else _mul(e)
    if e.is_Pow and e.exp.is_Integer and e.exp > 1:
        return " * ".join([_bound(e.base, _ATOM)] * int(e.exp)), _PRODUCT
    name, args = e.func.__name__, e.args
    if name == "floor":
        return _text(args[0])
    if name == "ceiling":
        over, under = args[0].as_numer_denom()
        return _text(sympy.floor((over + under - 1) / under)) if under != 1 else _text(over)
    if name in ("FloorDiv", "CleanDiv"):
        return f"{_bound(args[0], _ATOM)} // {_bound(args[1], _ATOM)}", _PRODUCT
    if name in ("Mod", "PythonMod"):
        return f"{_bound(args[0], _ATOM)} % {_bound(args[1], _ATOM)}", _PRODUCT
    if name in ("Min", "Max"):
        function = "tl.minimum" if name == "Min" else "tl.maximum"
        out = _text(args[0])[0]
        for arg in args[1:]:
            out = f"{function}({out}, {_text(arg)[0]})"
        return out, _ATOM
    raise ScheduleError(f"the size {e} has no Triton form", why=f"{name} is not known to the printer")


def _bound(e: sympy.Expr, level: int) -> str:
    text, own = _text(e)
    return text if own >= level else f"({text})"


def _add(e: sympy.Expr) -> tuple[str, int]:
    out = ""
    for term in sorted(e.args, key=lambda a: (a.is_Integer, -len(a.free_symbols), str(a))):
        negative = bool(term.as_coeff_Mul()[0] < 0)
        text = _bound(-term if negative else term, _PRODUCT)
        out += (" - " if negative else " + ") + text if out else ("-" + text if negative else text)
    return out, _SUM


def _mul(e: sympy.Expr) -> tuple[str, int]:
    coefficient, rest = e.as_coeff_Mul()
    factors = [*sympy.Mul.make_args(rest)] + ([coefficient] if coefficient != 1 else [])
    return " * ".join(_bound(f, _ATOM if not f.is_Pow else _PRODUCT) for f in factors), _PRODUCT
