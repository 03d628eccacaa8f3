"""Grouping: primitives are joined into kernels wherever one loop nest serves both and memory traffic is saved."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from fusec.ir.forwarding import forward_writes
from fusec.ir.graph import Graph, Node
from fusec.ir.regions import open_regions
from fusec.passes.grouping.joins import TINY, Grouping
from fusec.pipeline import Context
from fusec.refusal import Refusal


@dataclass(frozen=True)
class Group:
    """Make regions of kind ``kernel``, each one launch; declared regions are opened and leave their names as labels.

    The limits of the context say what the target schedules.
    """

    name: ClassVar[str] = "group"

    def apply(self, graph: Graph, context: Context) -> None:
        """Group the whole graph."""
        labels = open_regions(graph)
        graph.erase_dead()
        forward_writes(graph, TINY)
        left: dict[Node, Refusal] = {}
        refused: dict[Hashable, Refusal] = {}
        while True:
            grouping = Grouping(graph, context, labels, left=left, refused=refused)
            grouping.join()
            if context.limits.assumed_share is not None and (slower := grouping.faster_as_vendor_calls()):
                left |= slower
            elif unscheduled := grouping.unscheduled():
                refused |= unscheduled
            else:
                break
        for node, refusal in left.items():
            sources = tuple(map(str, node.sources[:1]))
            message = "a large-M GEMM is left to the vendor"
            context.remarks.add(
                "analysis", "group", message, subject=node.op.name, reason=refusal.reason, sources=sources
            )
        grouping.make()
