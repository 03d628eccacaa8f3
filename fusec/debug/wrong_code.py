"""Find out whether the code of a target is at fault, and which kernel.

It is where the graph after all passes is right in the reference interpreter. Then kernels are left to ATen by halves,
and those at fault are tried on the other target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fusec.codegen.program.fallback import UnfusedKernel
from fusec.codegen.program.kernels import EDITED
from fusec.codegen.target import Launchable, PrintedKernel, Target
from fusec.codegen.tile.kernel import Kernel
from fusec.config import Config
from fusec.debug.trial import BEFORE_GROUPING, MOST, Trial
from fusec.errors import BuildError
from fusec.ir.graph import Graph, Node
from fusec.ir.types import ScalarType, symbol

if TYPE_CHECKING:
    from fusec.compiler import Compiled

_OTHER = {"cpp": "triton", "triton": "cpp"}
_MOST_ELEMENTS = 1 << 16
"""Elements of the inputs of a kernel that the interpreter of Triton runs in a few seconds."""


@dataclass(frozen=True)
class WrongCode:
    """The result for one graph."""

    target: str = ""
    """The target, where the graph after all passes is right in the reference interpreter; else ""."""
    kernels: tuple[str, ...] = ()
    """Kernels without which the program is right."""
    right_on: str = ""
    """The other target, where all of these are right on it."""
    edited: tuple[str, ...] = ()
    """The paths of edits that these are built from."""

    def __str__(self) -> str:
        kernels = f"the {'kernels' if len(self.kernels) > 1 else 'kernel'} {', '.join(self.kernels)} of"
        elsewhere = f" and on target {self.right_on}" if self.right_on else ""
        edits = f"; edited: {', '.join(self.edited)}, `fusec kernels revert` removes it" if self.edited else ""
        return (
            f"{kernels if self.kernels else 'no kernel, but the program of'} target {self.target}; "
            f"right in the reference interpreter{elsewhere}{edits}"
        )


def wrong_code(trial: Trial) -> WrongCode:
    """Run the graph after all passes by the reference interpreter; where it is right, bisect for wrong kernels."""
    from fusec.codegen import target_for
    from fusec.compiler import compile_graph
    from fusec.dynamo import interpreted

    try:
        compiled = compile_graph(trial.graph, trial.config)
    except Exception:  # a compile that raises has no kernels
        return WrongCode()
    if trial.difference(interpreted(compiled.graph)):
        return WrongCode()
    target = target_for(compiled.graph, trial.config)
    names = _wrong_kernels(trial, target, list(compiled.program.kernels))
    alone = _alone(trial, compiled, names) if names else []
    paths = dict.fromkeys(r.reason for r in compiled.remarks if r.pass_name == EDITED and r.subject in names)
    return WrongCode(target.name, tuple(names), _right_on(target.name, alone), tuple(paths))


class _Partly:
    """A target with a few kernels; the operations of the others run through ATen."""

    def __init__(self, target: Target, names: Sequence[str]) -> None:
        self.target, self.names = target, names

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def build(self, kernels: Sequence[Kernel], config: Config) -> list[Launchable | BuildError]:
        """Build the few kernels."""
        built = iter(self.target.build([k for k in kernels if k.name in self.names], config))
        return [next(built) if k.name in self.names else PrintedKernel(k.name, "") for k in kernels]

    def select_kernel(self, region: Node, kernel: Kernel, built: Launchable, *about: Any) -> tuple[Kernel, Launchable]:
        """Return the kernel, if it was built, or its operations."""
        if isinstance(built, PrintedKernel):
            return kernel, UnfusedKernel(kernel.name, region.body, kernel.symbols)
        return self.target.select_kernel(region, kernel, built, *about)


def _wrong_kernels(trial: Trial, target: Target, names: Sequence[str]) -> list[str]:
    """Return the kernels without which a program is right, in log₂(n) + 1 runs each, and one more for all."""
    from fusec.compiler import compile_graph

    def wrong(chosen: Sequence[str]) -> bool:
        trial.progress(f"{trial.graph.name}: {len(chosen)} of {len(names)} kernels")
        partly: Any = _Partly(target, chosen)
        return bool(trial.difference(compile_graph(trial.graph, trial.config, partly).program))

    found: list[str] = []
    left = [] if wrong(()) else list(names)
    while left and len(found) < MOST:
        right, bad = 0, len(left)  # right with as many kernels, wrong with so many
        while bad - right > 1:
            middle = (right + bad) // 2
            right, bad = (right, middle) if wrong(left[:middle]) else (middle, bad)
        found.append(left.pop(bad - 1))
        if not wrong(left):
            break
    return [name for name in names if name in found]


def _alone(trial: Trial, compiled: "Compiled", names: Sequence[str]) -> list[Trial]:
    """Return the trial of one region of each kernel, with the operands and sizes that it has in the run."""
    from fusec.reference.interpreter import bind_symbols, evaluate

    regions = {step.name: step.node for step in compiled.program.steps if step.name in names and step.node}
    graph = compiled.graph
    graph.set_outputs(list(dict.fromkeys(v for region in regions.values() for v in region.operands)))
    sizes = bind_symbols(graph, trial.arguments)
    known = dict(zip(graph.outputs, evaluate(graph, trial.arguments, sizes), strict=True))
    config = replace(trial.config, disable=BEFORE_GROUPING)
    found = []
    for region in regions.values():
        given = [*(known[v] for v in region.operands), *sizes.values()]
        found.append(Trial(_with_sizes(region.body, sizes), given, config, trial.progress))
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
