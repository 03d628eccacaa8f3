"""Fusions declared outside the package match, get kernels, and are tested by one line; what is wrong is noticed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from examples import user_fusions
from fusec import Dims, fusion, passes, testing
from fusec.errors import DeclarationError
from fusec.ir.types import TensorType
from fusec.rewriting import matcher
from fusec.rewriting.fusion import FUSIONS
from fusec.rewriting.matcher import Matcher

ROOT = Path(__file__).parents[1]
THEIRS = {f.name: FUSIONS.pop(f.name) for f in testing.fusions_of(user_fusions)}
"""Declared only while the tests of this file run: other tests know the built-in fusions alone."""

Rows = Annotated[Tensor, Dims("*batch cols")]
Row = Annotated[Tensor, Dims("cols")]


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    saved = dict(FUSIONS)
    FUSIONS.update(THEIRS)
    yield
    FUSIONS.clear()
    FUSIONS.update(saved)
    passes.pattern_library().broken.clear()


test_derived = testing.derived_tests(user_fusions)


@pytest.mark.slow
def test_the_example_runs_and_shows_its_fusions() -> None:
    done = subprocess.run(
        [sys.executable, "examples/user_fusions.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(f"{name} ×1" in done.stdout for name in THEIRS), done.stdout
    assert "Nothing falls back." in done.stdout


def complaints(check: testing.Check, declared: Any) -> str:
    return "\n".join(check(declared))


def test_a_spelling_that_means_something_else() -> None:
    @fusion
    def tanh_gate(x: Rows, gate: Rows) -> Tensor:
        """x·tanh(gate)"""
        return x * torch.tanh(gate)

    @tanh_gate.spelling
    def swapped(x: Tensor, gate: Tensor) -> Tensor:
        return torch.tanh(x) * gate

    assert "swapped(x, gate): result 0 is off by" in complaints(testing.spellings_agree, tanh_gate)


def test_a_spelling_that_differs_for_infinity_only() -> None:
    @fusion
    def squashed(x: Rows) -> Tensor:
        """x / (1 + |x|)"""
        return x / (1 + x.abs())

    @squashed.spelling
    def by_inverse(x: Tensor) -> Tensor:
        inverse = 1 / (1 + x.abs())
        return torch.where(x.abs() == torch.inf, torch.sign(x), x * inverse)

    assert "special values" in complaints(testing.spellings_agree, squashed)


def test_clauses_that_decide_nothing() -> None:
    @fusion
    def tanh_gate(x: Rows, gate: Rows, scale: float) -> Tensor:
        """x·tanh(scale·gate)"""
        return x * torch.tanh(gate * scale)

    @tanh_gate.where
    def rows_have_an_end(x: TensorType) -> bool:
        """Always so."""
        return bool(x.shape[-1] > 0)

    assert "rows_have_an_end refused nothing" in complaints(testing.every_clause_refuses, tanh_gate)

    @tanh_gate.where
    def scale_is_none(scale: float) -> bool:
        """Never so."""
        return scale is None

    assert "satisfy its clauses" in complaints(testing.is_a_pattern, tanh_gate)


def test_clauses_decide_over_the_arguments_that_are_drawn() -> None:
    @fusion
    def limited(x: Rows, low: float, high: float) -> Tensor:
        """x between two numbers, by two tanh."""
        return torch.tanh(x - low) - torch.tanh(x - high)

    @limited.where
    def in_order(low: float, high: float) -> bool:
        """The lower number is first."""
        return low < high

    @limited.where
    def rows_fill_registers(x: TensorType) -> bool:
        """A row is a multiple of eight."""
        return isinstance(x.shape[-1], int) and x.shape[-1] % 8 == 0

    for check in testing.PATTERN_CHECKS:
        assert complaints(check, limited) == "", check.__name__


def test_a_clause_whose_author_says_what_it_refuses() -> None:
    @fusion
    def shifted(x: Rows, bias: Row | None, shift: float) -> Tensor:
        """tanh(x + bias - shift)"""
        return torch.tanh((x if bias is None else x + bias) - shift)

    @shifted.where
    def rows_are_no_multiple_of_a_large_prime(x: TensorType) -> bool:
        """Nobody draws such a row."""
        return bool(x.shape[-1] % 997)

    assert "refused nothing of what was tried; give `refuses=`" in complaints(testing.every_clause_refuses, shifted)
    shifted.clauses.clear()
    shifted.where(refuses={"cols": 998})(rows_are_no_multiple_of_a_large_prime)
    assert "refused nothing of its author's {'cols': 998}" in complaints(testing.every_clause_refuses, shifted)
    shifted.clauses.clear()
    shifted.where(refuses={"cols": 997})(rows_are_no_multiple_of_a_large_prime)

    @shifted.where(refuses={"bias": None, "dtype": "bf16"})
    def bias_is_there_in_bf16(x: TensorType, bias: TensorType | None) -> bool:
        """Without a bias, and in f32, it is not worth a name."""
        return x.dtype.name != "bf16" or bias is not None

    @shifted.where(refuses={"shift": 0.25})
    def not_by_a_quarter(shift: float) -> bool:
        """A number that is not tried."""
        return shift != 0.25

    assert complaints(testing.every_clause_refuses, shifted) == ""
    with pytest.raises(DeclarationError, match="refuses unknown heads"):
        shifted.where(refuses={"heads": 3})(not_by_a_quarter)


def test_a_clause_is_tested_where_no_other_refuses() -> None:
    @fusion
    def scaled_tanh(x: Rows, scale: float) -> Tensor:
        """tanh(scale·x)"""
        return torch.tanh(x * scale)

    @scaled_tanh.where
    def not_zero(scale: float) -> bool:
        """Zero."""
        return scale != 0

    @scaled_tanh.where
    def positive(scale: float) -> bool:
        """Zero again, and what is below it: the first clause decides nothing."""
        return scale > 0

    assert "not_zero refused nothing" in complaints(testing.every_clause_refuses, scaled_tanh)


def test_what_is_known_already() -> None:
    @fusion
    def known_by_another_name(x: Rows) -> Tensor:
        """gelu(x)"""
        return F.gelu(x)

    test: Any = testing.derived_tests(known_by_another_name)
    with pytest.raises(AssertionError, match="what an earlier fusion computes"):
        test(known_by_another_name, testing.is_a_pattern)
    with pytest.raises(pytest.skip.Exception, match="it has no pattern"):
        test(known_by_another_name, testing.every_spelling_is_found)


def test_an_operation_that_is_left_to_aten() -> None:
    @fusion
    def log_cosh(x: Rows) -> Tensor:
        """log(cosh(x))"""
        return torch.log(torch.cosh(x))

    assert "log_cosh calls aten.cosh.default" in complaints(testing.is_a_pattern, log_cosh)


def test_a_scalar_that_is_computed_with() -> None:
    @fusion
    def warmed(x: Rows, heat: float) -> Tensor:
        """tanh(x)·heat²"""
        return torch.tanh(x) * (heat * heat)

    assert "does not reach its pattern" in complaints(testing.is_a_pattern, warmed)


def test_a_matcher_that_overlooks_other_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matcher, "users_agree", lambda self: True)
    assert ": found" in complaints(testing.other_readers_prevent_it, THEIRS["soft_cap"])


@pytest.mark.parametrize(
    ("owner", "name", "mistake", "name_of_fusion", "case"),
    [
        (Matcher, "fit_attribute", lambda *_: True, "scaled_branch", "contraction, operand 0 transposed"),
        (matcher, "_orders", lambda wanted, node: permutations(node.operands), "soft_cap", "div, operands swapped"),
        (matcher, "same_number", lambda *_: True, "gelu_quick", "constant, not 1.702"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_matcher_that_overlooks_a_difference(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, mistake: Any, name_of_fusion: str, case: str
) -> None:
    monkeypatch.setattr(owner, name, mistake)
    found = complaints(testing.what_is_found_is_what_is_declared, FUSIONS[name_of_fusion])
    assert f"found in spite of reference: {case}" in found, found


def test_a_kernel_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    right = testing.compile_graph

    def wrong(graph: Any, config: Any) -> Any:
        planted = graph.copy()
        next(n for n in planted.nodes if n.is_op("constant")).attributes["value"] *= 1.01
        return right(planted, config)

    monkeypatch.setattr(testing, "compile_graph", wrong)
    for check in testing.KERNEL_CHECKS:
        assert "of the largest" in complaints(check, THEIRS["soft_cap"])


def test_a_module_without_fusions_is_refused() -> None:
    with pytest.raises(ValueError, match="no fusion"):
        testing.derived_tests(testing)
