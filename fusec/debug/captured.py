"""Compare the graphs that are captured of a model, before any pass, with eager."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusec.config import Config
from fusec.debug.capture import CaptureOptions, call_model, captured_run, run_compiled
from fusec.debug.trial import SEED
from fusec.ir.graph import Graph

_ROUNDING = 4.0
"""Decompositions may round more often than eager: up to this share of the numeric rule's bound is no difference."""
_STAGES = {"eager": "Dynamo", "aot_eager": "AOTAutograd"}
"""The part of torch that is at fault where a model is wrong with a backend of torch's, and not with earlier ones."""


@dataclass(frozen=True)
class Captured:
    """The graphs of a model, with the arguments of each."""

    calls: list[tuple[Graph, list[Any]]]
    difference: str = ""
    """The difference of their results, by the reference interpreter, from eager; "" where there is none, or eager
    cannot run on copies and in float64."""
    stage: str = ""
    """The part of torch or fusec that is at fault."""
    check: str = ""
    """The call of torch without fusec that shows it, or that is right."""


def captured(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    options: CaptureOptions,
    config: Config | None = None,
) -> Captured:
    """Capture the graphs of a model, and compare them with eager.

    Raises:
        NothingCaptured: where no graph was produced.
    """
    original = _Original(model, inputs, keywords, options)
    try:
        eager, wide = original.eager(), original.eager(wide=True)
        model, inputs, keywords = original.copied()
    except Exception:  # a model that cannot be copied, that raises, or that has no float64
        return Captured(captured_run(model, inputs, keywords, options, config=config)[0])
    calls, results = captured_run(model, inputs, keywords, options, mutate=True, config=config)
    difference = _difference(eager, results, wide)
    if not difference:
        return Captured(calls)
    for backend, stage in _STAGES.items():
        model, inputs, keywords = original.copied()
        if _difference(eager, run_compiled(model, backend, inputs, keywords, options), wide):
            return Captured(calls, difference, stage, f'torch.compile(model, backend="{backend}") is wrong, too')
    check = 'torch.compile(model, backend="aot_eager") is right'
    return Captured(calls, difference, "fusec's decompositions or import", check)


@dataclass(frozen=True)
class _Original:
    """A model and its inputs, of which only copies are called: a call may change them."""

    model: Callable[..., Any]
    inputs: Sequence[Any]
    keywords: Mapping[str, Any]
    options: CaptureOptions

    def copied(self) -> tuple[Any, list[Any], dict[str, Any]]:
        import torch

        torch.manual_seed(SEED)
        model, inputs, keywords = copy.deepcopy((self.model, list(self.inputs), dict(self.keywords)))
        return model, inputs, keywords

    def eager(self, wide: bool = False) -> Any:
        """Return the results in eager, in the model's dtype or float64."""
        import torch
        from torch.utils._pytree import tree_map

        def widened(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                return x
            return x.detach().double().requires_grad_(x.requires_grad)

        model, inputs, keywords = self.copied()
        if wide:
            model = model.double() if isinstance(model, torch.nn.Module) else model
            inputs, keywords = tree_map(widened, (inputs, keywords))
        return call_model(model, inputs, keywords, self.options.train)


def _difference(eager: Any, captured: Any, reference64: Any) -> str:
    """Return how results differ from eager by more than rounding; "" where they do not, or cannot be compared."""
    from fusec.reference.contract import as_far_as_eager, compare_outputs

    usual, found, wide = (_numbers(x) for x in (eager, captured, reference64))
    wrong = [one for one in compare_outputs(usual, found, wide).outputs if one.ratio > _ROUNDING]
    return f"output {wrong[0].index}: {wrong[0].message}" if wrong and not as_far_as_eager(usual, found, wide) else ""


def _numbers(results: Any) -> list[Any]:
    """Return the tensors and numbers among results; other objects have no equality."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [x for x in tree_leaves(results) if isinstance(x, (torch.Tensor, int, float))]
