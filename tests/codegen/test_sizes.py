"""Sizes as text: every language computes what sympy says."""

import re

import pytest
import sympy
from sympy import Max, Min, Mod, ceiling, floor

from fusec.codegen.cpp.expressions import CPP
from fusec.codegen.tile.kernel import index_symbol
from fusec.codegen.tile.sizes import PYTHON, Language, sizes_text
from fusec.codegen.triton.signature import TRITON
from fusec.errors import BuildError
from fusec.ir.types import symbol

X, Y, Z = map(symbol, "xyz")
I = index_symbol("i")  # noqa: E741
VALUES = ({"x": 12, "y": 4, "z": 3, "i": 0}, {"x": 20, "y": 6, "z": 5, "i": 7}, {"x": 6, "y": 2, "z": 1, "i": 1})

WHOLE = [
    X * 3 - Y, -X + 40, -X, I + 3, 2 * I - Z, X * (I + 1), X**2 * Z, X * (Y + 1) ** 2, sympy.Integer(2) ** 40,
    sympy.Integer(-3), floor(X / 3), floor((X + 7) / 8), ceiling(X / 8), ceiling(I / 4), floor(X / (2 * Y)),
    floor(X / 2) ** 2, X - floor(X / Y) * Y, -X * floor(Y / 3), floor(floor(X / 2) / 3 + Y), X * ceiling(Y / 4) + 1,
    Mod(X, Y), Mod(I, 4) * 3, Mod(X + 1, 2 * Y), Mod(floor(X / 3), Y) * Z, Max(X, Y, 4), X * Max(Y, 3) + Min(X, Y, Z),
    Min(Z + 4, X), -X + 4, X - floor(X / 5), -floor(X / 5), X - Mod(X, 5), -Mod(X, 7), X - ceiling(X / 7) + 2 * Y,
]  # fmt: skip
# Whole for every value above: torch divides so where it has a guard.
DIVIDED = [X / 2, X * Y / (2 * Z) * Z, (X * Y + X) / 2, X / 2 + Y / 2, X * Y / 2 * Z, X * (Y + 2) / Y + 2 * X / Y]


def test_an_index_is_a_whole_number() -> None:
    """So that a block of one element, or a grid of one program, has no rounding in its text."""
    assert floor(I) == I and Mod(I, 1) == 0 and Mod(4 * I, 4) == 0


def value(text: str, values: dict[str, int]) -> int:
    """What a text computes in its language, division cutting off what is left over."""
    python = re.sub(r"(?<!/)/(?!/)", "//", text.replace("<int64_t>", "").replace("LL", "").replace("tl.", ""))
    functions = {
        "floor_divide": int.__floordiv__, "remainder": int.__mod__,
        "minimum": min, "maximum": max, "min": min, "max": max,
    }  # fmt: skip
    return int(eval(python, functions, values))


@pytest.mark.parametrize("language", [CPP, TRITON, PYTHON], ids=lambda language: language.name)
@pytest.mark.parametrize("expression", [*WHOLE, *DIVIDED], ids=str)
def test_sizes_compute_what_sympy_does(language: Language, expression: sympy.Expr) -> None:
    for values in VALUES:
        exact = expression.subs({s: values[s.name] for s in expression.free_symbols})
        if exact.is_Integer:
            assert value(language.print(expression), values) == exact
            assert value(f"7 * {language.print(expression, tight=True)}", values) == 7 * exact


@pytest.mark.parametrize("expression", DIVIDED, ids=str)
def test_a_division_is_whole_somewhere(expression: sympy.Expr) -> None:
    assert any(expression.subs({s: v[s.name] for s in expression.free_symbols}).is_Integer for v in VALUES)


def test_sizes_read_well() -> None:
    assert TRITON.print(floor((X + 7) / 8)) == TRITON.print(ceiling(X / 8)) == "(x + 7) // 8"
    assert CPP.print(floor(X / 8)) == "floor_divide<int64_t>(x, 8)"
    assert CPP.print(2**40 * X) == "1099511627776LL * x"
    assert sizes_text((X, 1)) == "(x, 1)" and sizes_text((2 * X - 1,)) == "(2 * x - 1,)"


def test_what_is_no_integer_operation_is_refused() -> None:
    with pytest.raises(BuildError, match=r"sqrt\(x\) has no Triton form"):
        TRITON.print(sympy.sqrt(X))
