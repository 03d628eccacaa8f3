"""Find the application of a rewrite that makes a model wrong, by bisection over application numbers.

Where grouping is the cause, each kernel is compared with the region it computes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusec.config import Config
from fusec.debug.capture import captured_calls
from fusec.ir.graph import Graph
from fusec.remarks import Remark

NONE = "!0.."
"""Selects no application."""
SEED = 0


@dataclass(frozen=True)
class Finding:
    """The result of the search in one graph of a model."""

    graph: str
    applications: int
    """Number of applications."""
    wrong: str = ""
    """The difference of its program from eager; empty where it is right."""
    culprit: Remark | None = None
    """The first application with which it is."""
    alone: bool = False
    """True where it is right without that application."""
    kernels: tuple[str, ...] = ()
    """Kernels that are wrong by themselves, where grouping is the cause and sizes are known."""

    def __str__(self) -> str:
        if not self.wrong:
            return f"{self.graph}: right, with {self.applications} applications of rewrites and passes"
        if self.culprit is None:
            return f"{self.graph}: {self.wrong}\n  cause: no rewrite and no generated kernel, it is wrong without any"
        number = self.culprit.application
        mend = f"options={{'apply': '!{number}'}}" if self.alone else f"none: it is wrong without number {number}, too"
        kernels = f" ({', '.join(self.kernels)})" if self.kernels else ""
        return f"{self.graph}: {self.wrong}\n  cause: {self.culprit}{kernels}\n  fix:   {mend}"


def bisect(
    model: Callable[..., Any],
    *inputs: Any,
    dynamic: bool = False,
    train: bool = False,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
    **keywords: Any,
) -> list[Finding]:
    """Compare every graph of a model with eager, and search for the application that makes it wrong.

    A program is right where its results and updated inputs are no farther from float64 than the
    numeric rule allows, on the inputs that the model passes to the graph.

    Args:
        model: a module or function of tensors; it is called once on ``inputs`` and ``keywords``.
        inputs: sample inputs.
        dynamic: make sizes symbols.
        train: compare backward graphs too.
        options: those of ``torch.compile(..., backend="fusec")``; ``apply`` is set by the search itself.
        progress: called with a message for each trial.
        keywords: further sample inputs, by name.

    Raises:
        NothingCaptured: where the model leaves no graph.
        OptionError: for an unknown option.
    """
    config = replace(Config.from_options(None, options), apply="")
    calls = captured_calls(model, inputs, keywords, dynamic=dynamic, train=train)
    return [_search(_Trial(graph, arguments, config, progress)) for graph, arguments in calls]


class _Trial:
    """One graph with its inputs and eager's results."""

    def __init__(self, graph: Graph, arguments: Sequence[Any], config: Config, progress: Callable[[str], None]) -> None:
        import torch

        from fusec.reference.interpreter import evaluate

        self.graph, self.arguments, self.config, self.progress = graph, arguments, config, progress
        self.eager = self.run(lambda given: evaluate(graph, given, mutate=True))
        wide = self.run(lambda given: evaluate(graph, given, dtype=torch.float64))
        self.reference = [*wide[: len(graph.outputs)], *self.eager[len(graph.outputs) :]]

    def run(self, function: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Return the results, and the inputs after the call."""
        import torch

        from fusec.reference.contract import copy_arguments

        given = copy_arguments(self.arguments)
        torch.manual_seed(SEED)
        return [*function(list(given)), *given]

    def wrong(self, **changes: Any) -> tuple[str, Sequence[Remark]]:
        """Return how a program is wrong, and the remarks of its compile."""
        from fusec.compiler import compile_graph
        from fusec.reference.contract import compare_outputs

        self.progress(f"{self.graph.name}: {changes or 'everything'}")
        remarks: Sequence[Remark] = ()
        try:
            compiled = compile_graph(self.graph, replace(self.config, **changes))
            remarks = compiled.remarks
            comparison = compare_outputs(self.eager, self.run(compiled.program), self.reference)
        except Exception as reason:
            return f"{type(reason).__name__}: {reason}", remarks
        return "" if comparison.passed else str(comparison), remarks


def _search(trial: _Trial) -> Finding:
    wrong, remarks = trial.wrong()
    made = {r.application: r for r in remarks if r.kind == "passed" and r.application is not None}
    finding = Finding(trial.graph.name, len(made), wrong)
    if not wrong or trial.wrong(apply=NONE)[0]:
        return finding
    right, bad = -1, max(made, default=0)  # right with the applications up to the first, wrong up to the second
    while bad - right > 1:
        middle = (right + bad) // 2
        if trial.wrong(apply=f"0..{middle}")[0]:
            bad = middle
        else:
            right = middle
    culprit, alone = made.get(bad), not trial.wrong(apply=f"!{bad}")[0]
    one_by_one = culprit is not None and culprit.subject == "group" and not trial.graph.symbols()
    kernels = _wrong_kernels(trial) if one_by_one else ()
    return replace(finding, culprit=culprit, alone=alone, kernels=kernels)


def _wrong_kernels(trial: _Trial) -> tuple[str, ...]:
    """Return the wrong kernels of a graph of static sizes; with symbols, a kernel's inputs may not determine them."""
    from fusec.compiler import compile_graph
    from fusec.reference.interpreter import evaluate

    graph = compile_graph(trial.graph, trial.config).graph
    regions = [node for node in graph if node.is_op("region")]
    graph.set_outputs(list(dict.fromkeys(v for region in regions for v in region.operands)))
    known = dict(zip(graph.outputs, evaluate(graph, trial.arguments), strict=True))
    alone = replace(trial.config, disable="canonicalize,raise,fuse,attention,bias")
    found = []
    for region in regions:
        label, given = str(region.attributes["label"]), [known[v] for v in region.operands]
        if _Trial(region.body, given, alone, trial.progress).wrong()[0]:
            found.append(label)
    return tuple(dict.fromkeys(found))
