"""Sizes as numbers: exactly where every symbol is known, about where costs are compared."""

from typing import Any

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from fusec.errors import GraphError
from fusec.ir.types import ASSUMED_SIZE, estimate, evaluate_size, evaluate_sizes, quotient, same_size, simplify, symbol

S, N = symbol("s"), symbol("n")


def test_a_size_has_one_value() -> None:
    assert evaluate_sizes((3, S, S * N - 1, sympy.floor(S / 2)), {"s": 5, "n": 4}) == (3, 5, 19, 2)


def test_what_is_no_size_is_refused() -> None:
    with pytest.raises(GraphError, match="n is unknown"):
        evaluate_size(S * N, {"s": 5})
    with pytest.raises(GraphError, match="it is 5/2"):
        evaluate_size(S / 2, {"s": 5})


def test_an_estimate_knows_what_it_is_told() -> None:
    assert estimate(12) == 12
    assert estimate(S * N) == ASSUMED_SIZE**2
    assert estimate(S * N, {"n": 4}) == 4 * ASSUMED_SIZE
    assert estimate(S * N / 8, {"s": 5, "n": 4}) == 2


def test_whole_parts_stand_outside_of_a_quotient() -> None:
    n = symbol("n")
    assert quotient(n - 30, 20) + 1 == quotient(n - 10, 20)
    assert same_size(quotient(quotient(n - 10, 5) - 1, 2), quotient(n - 15, 10))


def test_a_length_rounded_up_is_a_multiple() -> None:
    up = 64 * quotient(N + 63, 64)
    assert same_size(N + 63 * N - 64 * sympy.floor(63 * N / 64), up)
    assert same_size(-64 * sympy.floor(-N / 64), up) and simplify(up / quotient(N + 63, 64)) == 64


FACTORS = st.fractions(-4, 4, max_denominator=12)


@given(FACTORS, FACTORS, FACTORS, FACTORS, st.booleans())
def test_the_one_form_of_a_quotient_has_its_value(a: Any, b: Any, c: Any, d: Any, nested: bool) -> None:
    exact = sympy.Rational(a) * S + sympy.Rational(b) * N + sympy.Rational(c)
    before = sympy.floor(sympy.floor(exact) * sympy.Rational(d) + N / 2) if nested else sympy.floor(exact)
    after = simplify(before)
    assert simplify(after) == after
    for s, n in ((1, 1), (2, 5), (63, 7), (64, 8), (65, 12)):
        sizes = {S: s, N: n}
        assert before.subs(sizes) == sympy.sympify(after).subs(sizes) == evaluate_size(after, {"s": s, "n": n})


def test_a_size_without_a_value_is_estimated() -> None:
    """A quotient whose divisor is 0 for the size that is assumed."""
    a, b = symbol("a"), symbol("b")
    assert estimate(sympy.floor(a / sympy.floor(a / (2 * b)))) == ASSUMED_SIZE
    assert estimate(sympy.floor(a / sympy.floor(a / (2 * b))), {"a": 8, "b": 2}) == 4
