"""The equivalence check of a rewrite: both sides run over a finite field, in float64, and on special values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fusec.errors import FusecError, GraphError
from fusec.ir.graph import Graph
from fusec.ir.ops import Trait
from fusec.ir.types import OtherType, TensorType, same_shape
from fusec.reference.interpreter import evaluate
from fusec.verify.field import FieldTensor, Unknown, evaluate_field, same_elements
from fusec.verify.samples import ROUNDS, field_inputs, float_inputs
from fusec.verify.shrink import Trial, trials

State: TypeAlias = Literal["agree", "differ", "unknown"]
_TOLERANCE = 1e-9
"""Relative to the largest element of an output: far above the effect of reordering in float64, far below a mistake."""
_LARGE_TOLERANCE = 1e-6
"""In the round ``large``, where an exponent of 1e6 passes on an absolute error of 1e-10."""
_FLOOR = 1e-12
_ORDINARY = ("normal", "positive")
"""Rounds whose inputs a model is expected to see."""


@dataclass(frozen=True)
class OracleResult:
    """The result of one oracle."""

    oracle: str
    """``types``, ``field``, ``float64`` or ``special values``."""
    state: State
    detail: str = ""
    """The reason it is undecided, or the round in which the sides differ."""
    output: int | None = None
    """The first output that differs; beyond the last one come the inputs that are written."""
    index: tuple[int, ...] | None = None
    """Index of the first element that differs."""
    before: float | None = None
    after: float | None = None


@dataclass(frozen=True)
class EquivalenceResult:
    """True where both sides are equivalent."""

    passed: bool
    results: tuple[OracleResult, ...]
    message: str
    """One line."""

    def __bool__(self) -> bool:
        return self.passed

    @property
    def undecided(self) -> bool:
        """True where the graphs could not be run: it did not pass, yet no difference was found."""
        return not self.passed and all(r.state != "differ" for r in self.results)

    @property
    def unusual(self) -> str:
        """A value that differs, where both sides agree on ordinary inputs; "" where they do not."""
        wrong = next((r for r in self.results if r.state == "differ" and r.oracle != "field"), None)
        if wrong is None or wrong.before is None or any(f" {name} " in wrong.detail for name in _ORDINARY):
            return ""
        return f"{wrong.before:.3g} becomes {wrong.after:.3g} {wrong.detail}"


def check_rewrite(before: Graph, after: Graph, exact: bool = True, seed: int = 0) -> EquivalenceResult:
    """Check whether ``after`` may replace ``before``; both have the same inputs and outputs.

    Float64 and special values decide. The field decides too where it expresses both sides, unless the rewrite
    is declared inexact. Symbols become small distinct primes; static sizes are scaled down where all attributes
    scale (see ``fusec.verify.shrink``). A difference on scaled sizes is tried again on the real ones, where
    these are not too large, since a number in the graph may depend on a size.
    """
    types = _compare_types(before, after)
    if types.state != "agree":
        return EquivalenceResult(False, (types,), types.detail)
    result: EquivalenceResult | None = None
    try:
        for trial in trials(before, after):
            result = _compare(trial, types, exact, seed)
            if result.passed:
                break
    except GraphError as reason:
        return EquivalenceResult(False, (types,), reason.what)
    return EquivalenceResult(False, (types,), "the graphs are too large to be run") if result is None else result


def _compare(trial: Trial, types: OracleResult, exact: bool, seed: int) -> EquivalenceResult:
    results = [types]
    wrong: OracleResult | None = None
    for oracle in ("float64", "special values", "field"):
        try:
            found = _ask_field(trial, seed) if oracle == "field" else _ask_floats(oracle, trial, ROUNDS[oracle], seed)
        except _NotRunnable as reason:
            return EquivalenceResult(False, (*results, OracleResult(oracle, "unknown", str(reason))), str(reason))
        results.append(found)
        if found.state == "differ" and (exact or oracle != "field"):
            wrong = found
            break
    if wrong is None:
        return EquivalenceResult(True, tuple(results), f"both sides agree{trial.note}")
    place = (
        f"output {wrong.output} at {wrong.index}: {wrong.before} and {wrong.after}" if wrong.index is not None else ""
    )
    why = ", ".join(filter(None, (place, wrong.detail)))
    return EquivalenceResult(False, tuple(results), f"{wrong.oracle}: {why}{trial.note}")


class _NotRunnable(Exception):
    pass


def _compare_types(before: Graph, after: Graph) -> OracleResult:
    """Inputs and outputs must have the same dtypes and shapes."""
    for what, xs, ys in (("input", before.inputs, after.inputs), ("output", before.outputs, after.outputs)):
        if len(xs) != len(ys):
            return OracleResult("types", "differ", f"{len(xs)} {what}s became {len(ys)}")
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            if isinstance(x.type, OtherType) or isinstance(y.type, OtherType):
                return OracleResult("types", "unknown", f"{what} {i} is {x.type}, which only opaque nodes interpret", i)
            if isinstance(x.type, TensorType) and isinstance(y.type, TensorType):
                same = x.type.dtype == y.type.dtype and same_shape(x.type.shape, y.type.shape)
            else:
                same = type(x.type) is type(y.type)
            if not same:
                return OracleResult("types", "differ", f"{what} {i} was {x.type} and became {y.type}", i)
    return OracleResult("types", "agree")


def _ask_floats(oracle: str, trial: Trial, rounds: Sequence[str], seed: int) -> OracleResult:
    for number, name in enumerate(rounds):
        inputs = float_inputs(trial.before, trial.symbols, name, seed + number)
        try:
            expected = _run(trial.before, inputs, trial, seed)
        except (RuntimeError, IndexError, FusecError) as reason:
            raise _NotRunnable(f"the original cannot be run on sampled inputs: {reason}") from reason
        try:
            found = _run(trial.after, inputs, trial, seed)
        except (RuntimeError, IndexError, FusecError) as reason:
            return OracleResult(oracle, "differ", f"the replacement cannot be run: {reason}")
        tolerance = _LARGE_TOLERANCE if name == "large" else _TOLERANCE
        wrong = _first_difference(oracle, expected, found, partial(_close, tolerance=tolerance))
        if wrong is not None:
            return OracleResult(**(vars(wrong) | {"detail": f"on {name} inputs"}))
    return OracleResult(oracle, "agree")


def _run(graph: Graph, inputs: Sequence[Any], trial: Trial, seed: int) -> list[Any]:
    """Return the outputs, and the inputs after the call where the graph writes to them."""
    inputs = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        outputs = evaluate(graph, inputs, trial.symbols, dtype=torch.float64, mutate=trial.writes)
    return outputs + (list(inputs) if trial.writes else [])


def _ask_field(trial: Trial, seed: int) -> OracleResult:
    if _has_opaque(trial.before) or _has_opaque(trial.after):
        return OracleResult("field", "unknown", "the graph calls opaque operations")
    if not trial.before.inputs:
        return OracleResult("field", "unknown", "the graphs are numbers, which are rounded")
    inputs = field_inputs(trial.before, trial.symbols, seed)
    expected, found = (evaluate_field(g, inputs, trial.symbols) for g in (trial.before, trial.after))
    for side in (expected, found):
        if isinstance(side, Unknown):
            return OracleResult("field", "unknown", side.reason)
    assert not isinstance(expected, Unknown) and not isinstance(found, Unknown)
    return _first_difference("field", expected, found, same_elements) or OracleResult("field", "agree")


def _has_opaque(graph: Graph) -> bool:
    return any(n.has(Trait.OPAQUE) or (n.has(Trait.REGION) and _has_opaque(n.body)) for n in graph.nodes)


def _first_difference(
    oracle: str, expected: Sequence[Any], found: Sequence[Any], same: Callable[[Any, Any], Tensor]
) -> OracleResult | None:
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        if not isinstance(a, (Tensor, FieldTensor)):
            if a != b and a == a:
                return OracleResult(oracle, "differ", f"{a} became {b}", i)
            continue
        agree = same(a, b)
        if not bool(agree.all()):
            index = tuple(int(n) for n in (~agree).nonzero()[0])
            x, y = (float((v.top if isinstance(v, FieldTensor) else v)[index]) for v in (a, b))
            return OracleResult(oracle, "differ", "", i, index, x, y)
    return None


def _close(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    """Return which elements are equal: NaN and NaN, infinities by sign, integers exactly, floats within a tolerance."""
    if not a.is_floating_point():
        return a == b
    finite = a.isfinite() & b.isfinite()
    scale = a[a.isfinite()].abs().max() if bool(a.isfinite().any()) else a.new_zeros(())
    near = (a - b).abs() <= tolerance * scale + _FLOOR * scale.clamp(max=1.0)
    return torch.where(finite, near, (a == b) | (a.isnan() & b.isnan()))
