"""Find out whether the code of a target is at fault, and which kernel.

It is where the graph after all passes is right in the reference interpreter; each kernel is compared with it alone, and
on the other target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusec.debug.trial import BEFORE_GROUPING, Trial
from fusec.ir.graph import Graph, Node
from fusec.ir.types import ScalarType, symbol

_OTHER = {"cpp": "triton", "triton": "cpp"}
_MOST_ELEMENTS = 1 << 16
"""Elements of the inputs of a kernel that the interpreter of Triton runs in a few seconds."""


@dataclass(frozen=True)
class WrongCode:
    """The result for one graph."""

    target: str = ""
    """The target, where the graph after all passes is right in the reference interpreter; else ""."""
    kernels: tuple[str, ...] = ()
    """Kernels that are wrong by themselves."""
    right_on: str = ""
    """The other target, where all of these are right on it."""

    def __str__(self) -> str:
        kernels = f"the {'kernels' if len(self.kernels) > 1 else 'kernel'} {', '.join(self.kernels)} of"
        elsewhere = f" and on target {self.right_on}" if self.right_on else ""
        return (
            f"{kernels if self.kernels else 'no kernel by itself, but the program of'} target {self.target}; "
            f"right in the reference interpreter{elsewhere}"
        )


def wrong_code(trial: Trial) -> WrongCode:
    """Run the graph after all passes by the reference interpreter, and where it is right, each kernel alone."""
    from fusec.codegen import target_for
    from fusec.compiler import compile_graph
    from fusec.dynamo import interpreted

    try:
        graph = compile_graph(trial.graph, trial.config).graph
    except Exception:  # a compile that raises has no kernels
        return WrongCode()
    if trial.difference(interpreted(graph)):
        return WrongCode()
    target = target_for(graph, trial.config).name
    wrong = [(node, alone) for node, alone in _alone(trial, graph) if alone.wrong()[0]]
    names = dict.fromkeys(str(node.attributes["label"]) for node, _ in wrong)
    return WrongCode(target, tuple(names), _right_on(target, [alone for _, alone in wrong]))


def _alone(trial: Trial, graph: Graph) -> list[tuple[Node, Trial]]:
    """Return the trial of each kernel region, with the operands and sizes that it has in the run."""
    from fusec.reference.interpreter import bind_symbols, evaluate

    regions = [node for node in graph if node.is_op("region")]
    graph.set_outputs(list(dict.fromkeys(v for region in regions for v in region.operands)))
    sizes = bind_symbols(graph, trial.arguments)
    known = dict(zip(graph.outputs, evaluate(graph, trial.arguments, sizes), strict=True))
    alone = replace(trial.config, disable=BEFORE_GROUPING)
    found = []
    for region in regions:
        given = [*(known[v] for v in region.operands), *sizes.values()]
        found.append((region, Trial(_with_sizes(region.body, sizes), given, alone, trial.progress)))
    return found


def _with_sizes(body: Graph, sizes: Mapping[str, int]) -> Graph:
    """Return a body with an input for each size symbol of the graph, as its operands need not determine them."""
    body = body.copy()
    for name in sizes:
        body.add_input(ScalarType("int", symbol(name)), name)
    return body


def _right_on(target: str, wrong: Sequence[Trial]) -> str:
    """Return the other target, if kernels of a CPU are right on it; Triton's interpreter runs them there."""
    from fusec.analysis.devices import kernel_device

    other = _OTHER.get(target, "")
    if not other or not wrong or any(kernel_device(trial.graph) != "cpu" for trial in wrong):
        return ""
    if any(_elements(trial.arguments) > _MOST_ELEMENTS for trial in wrong):
        return ""
    return "" if any(trial.wrong(target=other, strict=True)[0] for trial in wrong) else other


def _elements(arguments: Sequence[Any]) -> int:
    return sum(x.numel() for x in arguments if hasattr(x, "numel"))
