"""Whether a group of nodes is legal as one kernel, and the time that it gains or loses by being one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusec.analysis.cost import Cost, Unit, kernel_cost, node_cost, operations, unit_of
from fusec.analysis.machine import Machine
from fusec.analysis.memory import touched_bytes
from fusec.ir.graph import Graph, Node
from fusec.ir.types import Size, estimate
from fusec.loops.indexing import IndexedExpr
from fusec.loops.plan import Plan
from fusec.loops.recomputation import evaluations, repetitions
from fusec.refusal import Refusal

NOTHING = Cost(launches=0)
DOUBT = 0.05
"""The share of a predicted time that a prediction cannot tell apart: what repeats less than that loses nothing."""


@dataclass(frozen=True)
class Estimate:
    """A group of nodes as one kernel, and its predicted cost."""

    plan: Plan | Refusal
    """The kernel's plan, or why the group is not one."""
    cost: Cost = NOTHING
    """Of the kernel, or of its operations one by one."""
    repeated: str = ""
    """The recomputed value that costs most, in words; "" where the kernel computes each value once."""
    again: Cost = NOTHING
    """The operations of recomputation."""

    @property
    def refusal(self) -> Refusal | None:
        """Why the group is not one kernel."""
        return self.plan if isinstance(self.plan, Refusal) else None

    @property
    def is_large_m(self) -> bool:
        """Whether the kernel is a large-M GEMM."""
        return isinstance(self.plan, Plan) and self.plan.shape.many


def estimate_kernel(body: Graph, plan: Plan | Refusal, machine: Machine) -> Estimate:
    """Predict the cost of a group by the graph that it would be."""
    if isinstance(plan, Refusal):
        return Estimate(plan, _apart(body, machine))
    counts = evaluations(plan.nest)
    repeated, again = _repeated(counts)
    return Estimate(plan, kernel_cost(body, counts, machine), repeated, again)


def gain(together: Estimate, parts: Iterable[Estimate], machine: Machine) -> float:
    """Seconds that one kernel is predicted to save over several."""
    return sum(float(part.cost.time(machine)) for part in parts) - float(together.cost.time(machine))


def may_lose(together: Estimate, machine: Machine) -> bool:
    """Whether one kernel could take longer than several: only by what it repeats, by more than a launch and DOUBT."""
    repeated = float(together.again.arithmetic(machine))
    return repeated > max(machine.launch_us * 1e-6, DOUBT * float(together.cost.time(machine)))


def _repeated(counts: Mapping[IndexedExpr, float]) -> tuple[str, Cost]:
    """The value that costs most by being repeated, in words, and all operations beyond once."""
    items = {item.value: item for item in counts}
    work: dict[Unit, Size] = {}
    most, words = 0.0, ""
    for value, times in repetitions(counts).items():
        item = items[value]
        extra = (times - 1) * estimate(value.tensor.numel) * operations(item)
        unit = unit_of(item.node)
        work[unit] = work.get(unit, 0) + round(extra)
        if extra > most:
            most, words = extra, f"{item.node.op.name} would be computed {times:.0f} times over"
    return words, Cost(work=work, launches=0)


def _apart(body: Graph, machine: Machine) -> Cost:
    """What the operations of a body cost one by one."""
    total = NOTHING
    for node in body.nodes:
        total += _alone(node, machine)
    return total


def _alone(node: Node, machine: Machine) -> Cost:
    return node_cost(node, lambda value: machine.holds(estimate(touched_bytes(value)))).at()
