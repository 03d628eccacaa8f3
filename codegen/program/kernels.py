"""The kernels of a graph: each distinct one is scheduled and built once; regions without one are reported."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

from fusec.analysis.machine import Machine
from fusec.codegen.program.constant_folding import NO_FOLDING, ConstantFolding, mark_frozen
from fusec.codegen.program.index_checks import Checked, hoist_checks, unhoisted
from fusec.codegen.target import Launchable, Target
from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.tile.sharing import Numbers, share, tile_program
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
EDITED = "edit"
"""The pass of remarks on kernels that are built from an edited source."""


class ScheduleCache:
    """Schedules planned kernels, each distinct one once; grouping and the program share the results."""

    def __init__(self, target: Target, machine: Machine, limits: Limits) -> None:
        self.target, self.machine, self.limits = target, machine, limits
        self._found: dict[tuple[Any, ...], Kernel | FusecError] = {}

    def kernel(self, region: Node) -> Kernel:
        """Return the tile program of a region.

        Raises:
            FusecError: if the target has no schedule for it.
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


class Launched(NamedTuple):
    """A kernel that is launched for a region."""

    kernel: Kernel
    launchable: Launchable
    lookups: tuple[Node, ...]
    """The lookups and writes whose indices it checks, in the order of their numbers."""


def build_kernels(
    graph: Graph,
    target: Target,
    context: Context,
    folding: ConstantFolding = NO_FOLDING,
    schedules: ScheduleCache | None = None,
) -> dict[Node, Launched]:
    """Build the kernels of all regions that are launched; those without one are reported and interpreted.

    Args:
        graph: after grouping.
        target: the target of the kernels.
        context: takes the remarks.
        folding: the nodes that are not launched, and the values that are frozen.
        schedules: of the regions that grouping has scheduled already.
    """
    for node in (regions := [n for n in graph.nodes if _is_launched(n) and n not in folding.nodes]):
        mark_frozen(node, folding.values)
        _make_dense(node)
    schedules = schedules or ScheduleCache(target, context.machine, context.limits)
    scheduled = _schedule(regions, schedules, context)
    checked = hoist_checks(scheduled)
    named, built = _build_named(checked, target, context)
    if any(isinstance(one, BuildError) for one in built.values()):  # ATen, in its place, makes no checks for others
        checked = unhoisted(scheduled)
        named, built = _build_named(checked, target, context)
    for name, launchable in built.items():
        if path := getattr(launchable, "edited", ""):
            said = {"subject": name, "reason": path, "suggestion": "fusec kernels revert removes the edit"}
            context.remarks.add("analysis", EDITED, f"{name} is edited", **said)
    kernels = dict[Node, Launched]()
    selected: dict[tuple[str, Numbers], tuple[Kernel, Launchable]] = {}
    for node, (code, numbers) in named.items():
        launchable = built[code.name]
        if isinstance(launchable, BuildError):
            _report(context, node, "could not be built and runs through ATen", launchable)
            continue
        if (key := (code.name, numbers)) not in selected:
            message = "could not be compiled and runs through ATen"
            report = partial(_report, context, node, message, name=code.name)
            kernel = replace(checked[node].kernel, name=code.name, numbers=numbers)
            selected[key] = target.select_kernel(node, kernel, launchable, context, report)
        kernels[node] = Launched(*selected[key], checked[node].lookups)
    return kernels


def _is_launched(node: Node) -> bool:
    return node.has(Trait.REGION) and node.attributes["kind"] != "vendor"


def _schedule(regions: Sequence[Node], schedules: ScheduleCache, context: Context) -> dict[Node, Kernel]:
    """Return the tile programs of regions, the same one for regions that have equal ones."""
    by_region: dict[Node, Kernel] = {}
    by_structure: dict[tuple[Any, ...], Kernel] = {}
    by_tile_program: dict[tuple[Any, ...], Kernel] = {}
    for region in regions:
        key = structure(region.body)
        if key not in by_structure:
            try:
                kernel = schedules.kernel(region)
            except FusecError as reason:
                _report(context, region, "has no kernel and runs through ATen", reason)
                continue
            by_structure[key] = by_tile_program.setdefault(tile_program(kernel), kernel)
        by_region[region] = by_structure[key]
    return by_region


def _named(scheduled: dict[Node, Kernel], shared: bool) -> dict[Node, tuple[Kernel, Numbers]]:
    """Return the kernels to build, each under a name of its own, and the numbers that their launches pass."""
    distinct = {id(kernel): kernel for kernel in scheduled.values()}
    codes = share(distinct.values()) if shared else [(kernel, ()) for kernel in distinct.values()]
    names: dict[int, str] = {}
    for code, _ in codes:
        if id(code) not in names:
            names[id(code)] = next(n for n in _numbered(code.name) if n not in names.values())
    named = [(replace(code, name=names[id(code)]), numbers) for code, numbers in codes]
    by_kernel = dict(zip(distinct, named, strict=True))
    return {node: by_kernel[id(kernel)] for node, kernel in scheduled.items()}


def _build_named(
    checked: dict[Node, Checked], target: Target, context: Context
) -> "tuple[dict[Node, tuple[Kernel, Numbers]], dict[str, Launchable | BuildError]]":
    """Return what ``_named`` does, and each kernel by its name, or the error of its build."""
    named = _named({node: one.kernel for node, one in checked.items()}, target.shares_code)
    return named, _build({kernel.name: kernel for kernel, _ in named.values()}, target, context)


def _build(kernels: dict[str, Kernel], target: Target, context: Context) -> "dict[str, Launchable | BuildError]":
    if not kernels:
        return {}
    try:
        return dict(zip(kernels, target.build(list(kernels.values()), context.config), strict=True))
    except BuildError as reason:
        if context.config.strict:
            raise
        _warn_once(str(reason))
        return dict.fromkeys(kernels, reason)


def _make_dense(region: Node) -> None:
    """Give results dense layouts: a kernel writes to buffers without gaps or overlaps."""
    for result, inner in zip(region.results, region.body.outputs, strict=True):
        if isinstance(inner.type, TensorType) and inner not in region.body.inputs:
            if not is_written(inner):
                inner.type = dense(inner.type)
        result.type = inner.type


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{i}" for i in count(2))


def kernel_name(region: Node) -> str:
    """Return a name for the kernel of a region, from its label, that is an identifier in C++ and Python."""
    label = str(region.attributes.get("label") or "kernel")
    name = "".join(c if c.isalnum() and c.isascii() else "_" for c in label).strip("_")
    return name if name and not name[0].isdigit() else f"kernel_{name}"


def _report(context: Context, node: Node, message: str, reason: FusecError, name: str = "") -> None:
    """Add a remark about a fallback; ``name`` is that of the kernel, if it failed at its launch."""
    if context.config.strict:
        raise reason
    pass_name, name = (LAUNCH, name) if name else (PASS_NAME, kernel_name(node))
    context.remarks.add(
        "failure", pass_name, f"{name} {message}", subject=name, reason=reason.reason, suggestion=reason.fix,
        sources=tuple(map(str, node.sources)),
    )  # fmt: skip


@cache
def _warn_once(message: str) -> None:
    warnings.warn(f"fusec runs models through ATen: {message}", stacklevel=2)
