"""Whether a group is one kernel, and what it gains or loses by being one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusec.analysis.cost import Cost, Unit, kernel_cost, node_cost, operations, unit_of
from fusec.analysis.machine import Machine
from fusec.analysis.memory import touched_bytes
from fusec.errors import ScheduleError
from fusec.ir.graph import Graph, Node
from fusec.ir.types import Size, estimate
from fusec.loops.indexing import IndexedExpr, lower_to_loops
from fusec.loops.kinds import Limits, classify
from fusec.loops.recomputation import evaluations, repetitions

NOTHING = Cost(launches=0)
DOUBT = 0.05
"""The share of a predicted time that a prediction cannot tell apart: what repeats less than that loses nothing."""


@dataclass(frozen=True)
class Judgement:
    """What a group of nodes is as one kernel."""

    reason: str
    """Why it is none; "" where it is one."""
    cost: Cost = NOTHING
    """Of the kernel, or of its operations one by one."""
    repeated: str = ""
    """Which value it computes again and again; "" where it computes each once."""
    again: Cost = NOTHING
    """The operations that it carries out beyond once."""
    many: bool = False
    """Whether it has products of many rows."""


def judge(body: Graph, limits: Limits, machine: Machine, refused: str = "") -> Judgement:
    """Judge a group by the graph that it would be; ``refused`` is why the target does not schedule it."""
    if refused:
        return Judgement(refused, _apart(body, machine))
    try:
        nest = lower_to_loops(body)
        shape = classify(nest, limits)
    except ScheduleError as reason:
        return Judgement(reason.reason, _apart(body, machine))
    counts = evaluations(nest)
    repeated, again = _repeated(counts)
    return Judgement("", kernel_cost(body, counts, machine), repeated, again, shape.many)


def gain(together: Judgement, parts: Iterable[Judgement], machine: Machine) -> float:
    """Seconds that one kernel is predicted to save over several."""
    return sum(float(part.cost.time(machine)) for part in parts) - float(together.cost.time(machine))


def may_lose(together: Judgement, machine: Machine) -> bool:
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
