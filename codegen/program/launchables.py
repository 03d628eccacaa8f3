"""The kernels of a graph: each distinct one is scheduled and built once, and what has none is reported."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from fusec.analysis.machine import Machine
from fusec.codegen.program.freezing import NOTHING, Decided, mark
from fusec.codegen.target import Launchable, Target
from fusec.codegen.tile.kernel import Kernel
from fusec.errors import BuildError, FusecError
from fusec.ir.graph import Graph, Node, is_written
from fusec.ir.ops import Trait
from fusec.ir.structure import structure
from fusec.ir.types import TensorType
from fusec.loops.kinds import Limits
from fusec.loops.plan import Plan, plan_kernel
from fusec.loops.strides import dense
from fusec.pipeline import Context
from fusec.refusal import Refusal
from fusec.remarks import LAUNCH

PASS_NAME = "program"


class Schedules:
    """Schedule regions for a target, each distinct one once: grouping asks for the kernels that are built later."""

    def __init__(self, target: Target, machine: Machine, limits: Limits) -> None:
        self.target, self.machine, self.limits = target, machine, limits
        self._found: dict[tuple[Any, ...], Kernel | FusecError] = {}

    def kernel(self, region: Node) -> Kernel:
        """Return the tile program of a region.

        Raises:
            FusecError: where the target has none.
        """
        found = self._kernel(region.body, lambda: plan_kernel(region.body, self.limits))
        if isinstance(found, FusecError):
            raise found
        return replace(found, name=kernel_name(region), sources=region.sources)

    def refusal(self, plan: Plan) -> Refusal | None:
        """Return why a planned kernel has no tile program."""
        found = self._kernel(plan.body, lambda: plan)
        return Refusal.of(found) if isinstance(found, FusecError) else None

    def _kernel(self, body: Graph, plan: Callable[[], Plan]) -> Kernel | FusecError:
        key = structure(body)
        if key not in self._found:
            try:
                self._found[key] = self.target.schedule(plan(), machine=self.machine)
            except FusecError as reason:
                self._found[key] = reason
        return self._found[key]


def build_kernels(
    graph: Graph,
    target: Target,
    context: Context,
    decided: Decided = NOTHING,
    schedules: Schedules | None = None,
) -> dict[Node, tuple[Kernel, Launchable]]:
    """The kernel of every region that calls launch and that has one; the others are reported and will be interpreted.

    Args:
        graph: grouped.
        target: what the kernels run on.
        context: takes the remarks.
        decided: what weights decide, to be taken as frozen.
        schedules: what grouping has scheduled already.
    """
    schedules = schedules or Schedules(target, context.machine, context.limits)
    scheduled: dict[Node, Kernel] = {}
    kernels: dict[tuple[Any, ...], Kernel] = {}
    names: set[str] = set()
    equal: dict[tuple[Any, ...], Kernel] = {}
    for node in graph.nodes:
        if not node.has(Trait.REGION) or node.attributes["kind"] == "vendor" or node in decided.once:
            continue
        mark(node, decided.values)
        _settle_layouts(node)
        key = structure(node.body)
        if key in equal:
            scheduled[node] = equal[key]
            continue
        try:
            kernel = schedules.kernel(node)
        except FusecError as reason:
            _report(context, node, "has no kernel and runs through ATen", reason)
            continue
        tile_program = (kernel.kind, kernel.buffers, kernel.symbols, kernel.body, kernel.work, kernel.config)
        if tile_program not in kernels:
            name = next(n for n in _numbered(kernel.name) if n not in names)
            names.add(name)
            kernels[tile_program] = replace(kernel, name=name)
        scheduled[node] = equal[key] = kernels[tile_program]
    distinct = list(kernels.values())
    launchables = _launchables(distinct, target, context)
    found: dict[Node, tuple[Kernel, Launchable]] = {}
    selected: dict[str, tuple[Kernel, Launchable]] = {}
    for node, kernel in scheduled.items():
        launchable = launchables[kernel.name]
        if isinstance(launchable, BuildError):
            _report(context, node, "could not be built and runs through ATen", launchable)
        else:
            if kernel.name not in selected:
                what = "could not be compiled and runs through ATen"
                report = partial(_report, context, node, what, name=kernel.name)
                selected[kernel.name] = target.select_kernel(node, kernel, launchable, context, report)
            found[node] = selected[kernel.name]
    return found


def _launchables(kernels: Sequence[Kernel], target: Target, context: Context) -> "dict[str, Launchable | BuildError]":
    if not kernels:
        return {}
    try:
        return dict(zip((k.name for k in kernels), target.build(kernels, context.config), strict=True))
    except BuildError as reason:
        if context.config.strict:
            raise
        _warn_once(str(reason))
        return {k.name: reason for k in kernels}


def _settle_layouts(region: Node) -> None:
    """Give results memory without gaps or overlaps: what a kernel writes is an array of its own."""
    for result, inner in zip(region.results, region.body.outputs, strict=True):
        if isinstance(inner.type, TensorType) and inner not in region.body.inputs:
            if not is_written(inner):
                inner.type = dense(inner.type)
        result.type = inner.type


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{i}" for i in count(2))


def kernel_name(region: Node) -> str:
    """A name for the kernel of a region, from its label; C++ and Python take it."""
    label = str(region.attributes.get("label") or "kernel")
    name = "".join(c if c.isalnum() and c.isascii() else "_" for c in label).strip("_")
    return name if name and not name[0].isdigit() else f"kernel_{name}"


def _report(context: Context, node: Node, what: str, reason: FusecError, name: str = "") -> None:
    """Leave a remark; at a launch under the name of the kernel."""
    if context.config.strict:
        raise reason
    pass_name, name = (LAUNCH, name) if name else (PASS_NAME, kernel_name(node))
    context.remarks.add(
        "failure", pass_name, f"{name} {what}", subject=name, reason=reason.reason, suggestion=reason.fix,
        sources=tuple(map(str, node.sources)),
    )  # fmt: skip


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    import warnings

    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"fusec runs models through ATen: {message}", stacklevel=2)
