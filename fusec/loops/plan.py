"""The plan of a kernel: made once, read by grouping, cost, schedules and explanations."""

from dataclasses import dataclass

from fusec.ir.graph import Graph
from fusec.loops.indexing import LoopNest, lower_to_loops
from fusec.loops.kinds import Limits, Shape, classify


@dataclass(frozen=True)
class Plan:
    """A region's body, its loop nest, and the kind of schedule that the nest takes."""

    body: Graph
    nest: LoopNest
    shape: Shape


def plan_kernel(body: Graph, limits: Limits) -> Plan:
    """Plan one kernel for a body.

    Args:
        body: a graph of primitive operations.
        limits: of the target.

    Raises:
        ScheduleError: where the body is not one loop nest, or none that the target has a schedule for.
    """
    nest = lower_to_loops(body)
    return Plan(body, nest, classify(nest, limits))
