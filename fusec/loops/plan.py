"""The plan of a kernel, which grouping, the cost model and schedules share."""

from dataclasses import dataclass

from fusec.ir.graph import Graph
from fusec.loops.indexing import LoopNest, lower_to_loops
from fusec.loops.kinds import Limits, Shape, classify


@dataclass(frozen=True)
class Plan:
    """A region's body, its loop nest, and the kind of the nest."""

    body: Graph
    nest: LoopNest
    shape: Shape


def plan_kernel(body: Graph, limits: Limits) -> Plan:
    """Lower a body to a loop nest and classify it.

    Args:
        body: a graph of primitive operations.
        limits: of the target.

    Raises:
        ScheduleError: where the body is not one loop nest, or the target has no schedule for the nest.
    """
    nest = lower_to_loops(body)
    return Plan(body, nest, classify(nest, limits))
