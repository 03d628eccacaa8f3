"""Grouping: the partitioning of a graph of primitives into kernels."""

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
    """Make regions of kind ``kernel``, each one launch; the names of declared regions become labels.

    The limits of the context are those of the target's schedules.
    """

    name: ClassVar[str] = "group"

    def apply(self, graph: Graph, context: Context) -> None:
        """Group the whole graph, again without what a round finds to be slower or without a schedule."""
        labels = open_regions(graph)
        graph.erase_dead()
        forward_writes(graph, TINY)
        to_vendor: dict[Node, Refusal] = {}
        refused: dict[Hashable, Refusal] = {}
        while True:
            grouping = Grouping(graph, context, labels, to_vendor=to_vendor, refused=refused)
            grouping.fuse()
            if context.limits.assumed_share is not None and (slower := grouping.faster_as_vendor_calls()):
                to_vendor |= slower
            elif unscheduled := grouping.unscheduled():
                refused |= unscheduled
            else:
                break
        for node, refusal in to_vendor.items():
            sources = tuple(map(str, node.sources[:1]))
            message = "a large-M GEMM is a vendor call"
            context.remarks.add(
                "analysis", "group", message, subject=node.op.name, reason=refusal.reason, sources=sources
            )
        grouping.make()
