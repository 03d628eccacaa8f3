"""Predicted gain or loss of fusing a group of nodes into one kernel."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusec.analysis.cost import Cost, Unit, kernel_cost, node_cost, operations, unit_of
from fusec.analysis.machine import Machine
from fusec.analysis.memory import touched_bytes
from fusec.ir.graph import Graph
from fusec.ir.types import Size, estimate
from fusec.loops.indexing import IndexedExpr
from fusec.loops.plan import Plan
from fusec.loops.recomputation import evaluations, repetitions
from fusec.refusal import Refusal

NOTHING = Cost(launches=0)
DOUBT = 0.05
"""Relative error of predicted times: recomputation below this share of them counts as no loss."""


@dataclass(frozen=True)
class Estimate:
    """A group of nodes as one kernel, and its predicted cost."""

    plan: Plan | Refusal
    """The kernel's plan, or why the group is not legal as one kernel."""
    cost: Cost = NOTHING
    """Cost of the kernel, or of its operations one by one where it is not legal."""
    repeated: str = ""
    """Text for remarks: the recomputed value that costs most; "" where nothing is recomputed."""
    again: Cost = NOTHING
    """The operations of recomputation, without the first evaluation."""

    @property
    def refusal(self) -> Refusal | None:
        """The reason why the group is not legal as one kernel."""
        return self.plan if isinstance(self.plan, Refusal) else None

    @property
    def is_large_m(self) -> bool:
        """True if the kernel is a large-M GEMM."""
        return isinstance(self.plan, Plan) and self.plan.shape.many


def estimate_kernel(body: Graph, plan: Plan | Refusal, machine: Machine) -> Estimate:
    """Predict the cost of a group of nodes as a kernel with this body."""
    if isinstance(plan, Refusal):
        return Estimate(plan, _unfused_cost(body, machine))
    counts = evaluations(plan.nest)
    repeated, again = _repeated(counts)
    return Estimate(plan, kernel_cost(body, counts, machine), repeated, again)


def gain(together: Estimate, parts: Iterable[Estimate], machine: Machine) -> float:
    """Return the seconds that one kernel is predicted to save over several."""
    return sum(float(part.cost.time(machine)) for part in parts) - float(together.cost.time(machine))


def may_lose(together: Estimate, machine: Machine) -> bool:
    """Return whether recomputation takes longer than a launch and than ``DOUBT`` of the kernel's time."""
    repeated = float(together.again.arithmetic(machine))
    return repeated > max(machine.launch_us * 1e-6, DOUBT * float(together.cost.time(machine)))


def _repeated(counts: Mapping[IndexedExpr, float]) -> tuple[str, Cost]:
    """Return text for the value whose recomputation costs most, and the operations of all recomputation."""
    items = {item.value: item for item in counts}
    work: dict[Unit, Size] = {}
    most, words = 0.0, ""
    for value, times in repetitions(counts).items():
        item = items[value]
        extra = (times - 1) * estimate(value.tensor.numel) * operations(item)
        unit = unit_of(item.node)
        work[unit] = work.get(unit, 0) + round(extra)
        if extra > most:
            most, words = extra, f"{item.node.op.name} would be computed {times:.0f} times"
    return words, Cost(work=work, launches=0)


def _unfused_cost(body: Graph, machine: Machine) -> Cost:
    """Return the cost of the operations of a body as one launch each."""
    total = NOTHING
    for node in body.nodes:
        total += node_cost(node, lambda value: machine.holds(estimate(touched_bytes(value)))).at()
    return total
