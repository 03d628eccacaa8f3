"""Size expressions as Python text, for the generated program."""

import sympy

from fusec.errors import BuildError
from fusec.ir.types import Size


def size_text(size: Size) -> str:
    """An integer expression over size symbols, whose names are Python variables."""
    return repr(size) if isinstance(size, int) else _text(sympy.sympify(size))


def sizes_text(sizes: tuple[Size, ...]) -> str:
    """A tuple of sizes."""
    return f"({', '.join(map(size_text, sizes))}{',' if len(sizes) == 1 else ''})"


def _text(e: sympy.Expr) -> str:
    if e.is_Integer:
        return repr(int(e))
    if e.is_Symbol:
        return str(e)
    name = type(e).__name__
    if name in ("floor", "ceiling"):
        numerator, denominator = sympy.fraction(sympy.together(e.args[0]))
        sign = "-" if name == "ceiling" else ""
        return f"{sign}({sign}({_text(numerator)}) // ({_text(denominator)}))"
    if e.is_Add or e.is_Mul:
        numerator, denominator = sympy.fraction(sympy.together(e))
        if denominator != 1:
            return f"({_text(numerator)}) // ({_text(denominator)})"
    parts = [_text(a) if a.is_Symbol or a.is_Integer else f"({_text(a)})" for a in e.args]
    if e.is_Add or e.is_Mul:
        return (" + " if e.is_Add else " * ").join(parts)
    if e.is_Pow and e.exp.is_Integer and int(e.exp) > 0:
        return f"{parts[0]} ** {int(e.exp)}"
    if name in ("FloorDiv", "CleanDiv"):
        return f"{parts[0]} // {parts[1]}"
    if name in ("Mod", "PythonMod"):
        return f"{parts[0]} % {parts[1]}"
    if name == "ModularIndexing":
        return f"{parts[0]} // {parts[1]} % {parts[2]}"
    if name in ("Min", "Max"):
        return f"{name.lower()}({', '.join(parts)})"
    raise BuildError(f"the size {e} has no Python form", why=f"{name} is not an integer operation")
