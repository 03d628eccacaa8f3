"""One model family against the numeric rule: eager, compiled and float64 on the same weights and inputs."""

import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bench.families import Family, Inputs, Sizes
from bench.numerics import DRAWS, cast_inputs, cast_parameters, move_weights, reference_outputs, tensors_of
from bench.peers import Backend, Runner, compiled_with
from fusec.debug.report import summarize
from fusec.debug.subject import is_compiled
from fusec.models.inputs import Padding
from fusec.reference.contract import Comparison, compare_outputs
from tests.campaigns.routing import Routed, flips, scores_and_choices, unfounded_choices

Shape = tuple[int, int, Padding]
SHAPES: dict[str, list[Shape]] = {
    "static": [(1, 13, "none"), (3, 40, "left"), (3, 16, "right")],
    "dynamic": [(2, 11, "left"), (3, 17, "right"), (4, 9, "left")],
}
"""Batch, length and side of the padding, per mode."""
MOST_LEFT = {"flops": 0.01, "bytes": 0.05}
"""Largest shares of calls into ATen other than attention, lookups and arithmetic on indices."""
LEAST_GENERATED = 0.95
"""Least share of generated kernels in activation traffic outside vendor calls, attention and lookups."""


@dataclass
class Result:
    """What was found about one family in one dtype and mode."""

    model: str
    dtype: str
    mode: str
    ratio: float = 0.0
    reason: str = ""
    error: str = ""
    """The exception that ended it, if one did."""
    refused: str = ""
    """The exception that eager itself raises: there is nothing to be held to."""
    graphs: int = 0
    breaks: list[str] = field(default_factory=list)
    flips: int = 0
    """Tokens that got other experts than in the reference, all on ties."""
    exempt: str = ""
    """Why coverage is not promised of it."""
    summaries: list[dict[str, Any]] = field(default_factory=list)
    """What fusec says of each graph: kernels, regions, coverage, fallbacks."""
    left_to_aten: list[str] = field(default_factory=list)
    """Why whole graphs were."""

    @property
    def uncovered(self) -> str:
        """The promise on coverage that a graph breaks; "" where none does."""
        return next(filter(None, map(_broken_promise, [] if self.exempt else self.summaries)), "")

    @property
    def differs(self) -> bool:
        """Whether it ran and broke the rule; false also where it did not run."""
        return not self.error and (bool(self.reason) or not self.ratio <= 1.0)

    @property
    def passed(self) -> bool:
        """Whether the rule held, Dynamo found one graph, and coverage is what is promised."""
        held = not (self.reason or self.error or self.refused) and self.ratio <= 1.0
        return held and not self.breaks and not self.left_to_aten and not self.uncovered

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"passed": self.passed, "uncovered": self.uncovered}


def _broken_promise(summary: dict[str, Any]) -> str:
    left, generated = summary["left"], summary["activations"]
    for unit, most in MOST_LEFT.items():
        if left[unit] > most:
            return f"{left[unit]:.1%} of the {unit} are left to ATen, which should be at most {most:.0%}"
    if generated < LEAST_GENERATED:
        return f"{generated:.1%} of activation traffic is in generated kernels, which should be {LEAST_GENERATED:.0%}"
    return ""


def check(
    family: Family,
    dtype: torch.dtype,
    mode: str,
    backend: Backend,
    attention: str = "sdpa",
    seed: int = 0,
    shapes: list[Shape] | None = None,
) -> Result:
    """Compile and compare; an exception is a result too."""
    from torch._dynamo.utils import counters

    result = Result(family.name, str(dtype).removeprefix("torch."), mode, exempt=family.exempt)
    torch._dynamo.reset()
    counters.clear()
    model = cast_parameters(family.build(Sizes(), attention, seed), dtype)
    shapes = shapes or SHAPES[mode]
    first = cast_inputs(family.sample(*shapes[0], seed), dtype)
    result.refused = refusal(family, model, first, seed)
    if result.refused:
        kept = not _raised(compiled_with(model, backend, dynamic=mode == "dynamic"), first)
        result.reason = f"eager refuses, the compiled model does not: {result.refused}" if kept else ""
        return result
    try:
        found = _comparisons(family, model, dtype, mode, backend, seed, shapes, result)
        result.ratio = max(comparison.ratio for comparison in found)
        result.reason = next((str(comparison) for comparison in found if not comparison.passed), "")
    except Exception as problem:
        result.error = _described(problem)
    result.graphs = counters["stats"]["unique_graphs"]
    result.breaks = [" ".join(str(reason).split())[:200] for reason in counters["graph_break"]]
    if dynamo := sys.modules.get("fusec.dynamo"):
        result.summaries = [summarize(graph) for graph in dynamo.compiled_graphs() if is_compiled(graph)]
        result.left_to_aten = list(dynamo.fallbacks())
    return result


def refusal(family: Family, model: nn.Module, inputs: Inputs, seed: int = 0) -> str:
    """What eager raises in this dtype, though in float32 it runs the family; "" where there is nothing of the kind."""
    said = _raised(model, inputs)
    return "" if said and _raised(family.build(seed=seed), cast_inputs(inputs, torch.float32)) else said


def _raised(runner: Runner, inputs: Inputs) -> str:
    """What a call raises; "" where it gives a result."""
    try:
        _run(runner, inputs)
    except Exception as problem:
        return _described(problem)
    return ""


def _described(problem: Exception) -> str:
    cause = getattr(problem, "inner_exception", problem)  # Dynamo wraps what a backend raises
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:300]


def _comparisons(
    family: Family,
    model: nn.Module,
    dtype: torch.dtype,
    mode: str,
    backend: Backend,
    seed: int,
    shapes: list[Shape],
    result: Result,
) -> list[Comparison]:
    runner_model = Routed(model) if family.routed else model
    compiled = compiled_with(runner_model, backend, dynamic=mode == "dynamic")
    comparisons = []
    for number, (batch, length, padding) in enumerate(shapes):
        inputs = cast_inputs(family.sample(batch, length, padding, seed + number), dtype)
        if family.routed:
            comparisons.append(_routed_comparison(runner_model, compiled, inputs, dtype, result))
        else:
            comparisons.append(_comparison(model, compiled, inputs, dtype, seed))
    return comparisons


def _comparison(model: nn.Module, compiled: Runner, inputs: Inputs, dtype: torch.dtype, seed: int) -> Comparison:
    runs = []
    for draw in range(DRAWS):
        if draw:
            move_weights(model, seed + draw)
        runs.append((_run(model, inputs), _run(compiled, inputs), reference_outputs(model, inputs)))
    e, f, r = ([torch.stack(draws) for draws in zip(*side, strict=True)] for side in zip(*runs, strict=True))
    return compare_outputs(e, f, r, dtype)


def _routed_comparison(
    model: nn.Module, compiled: Runner, inputs: Inputs, dtype: torch.dtype, result: Result
) -> Comparison:
    found, expected, reference = _run(compiled, inputs), _run(model, inputs), reference_outputs(model, inputs)
    if unfounded := unfounded_choices(model, found):
        return Comparison((), f"{unfounded} tokens got experts that their scores do not favour")
    if flips(found, reference) or flips(expected, reference):
        result.flips += flips(found, reference)
        forced: dict[str, Any] = inputs | {"forced": scores_and_choices(reference)[1]}
        found, expected, reference = _run(compiled, forced), _run(model, forced), reference_outputs(model, forced)
        if unfounded := unfounded_choices(model, found):
            return Comparison((), f"{unfounded} tokens got experts that their scores do not favour")
    e, f, r = ([outputs[0], *scores_and_choices(outputs)[0]] for outputs in (expected, found, reference))
    return compare_outputs(e, f, r, dtype)


def _run(runner: Runner, inputs: dict[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        return tensors_of(runner(**inputs))
