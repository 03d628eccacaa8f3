"""Grouping: primitives are joined into kernels wherever one loop nest serves both and memory traffic is saved."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from fusec.ir.forwarding import forward_writes
from fusec.ir.graph import Graph, Node
from fusec.ir.regions import open_regions
from fusec.loops.kinds import FEW_ROWS, FEW_ROWS_OF_GPU, HALVES, MULTIPLIED, Limits
from fusec.passes.grouping.joins import TINY, Grouping
from fusec.pipeline import Context

ENOUGH_OF_SOME_ROWS = 0.75
"""The share of the library's speed on large matrices with which generated products of up to ``SOME_ROWS`` rows were
found quicker than its calls and what follows them."""


@dataclass(frozen=True)
class Group:
    """Make regions of kind ``kernel``, each one launch; declared regions are opened and leave their names as labels."""

    name: ClassVar[str] = "group"
    small_m: int = 16
    """Largest number of rows of a matrix product that is generated rather than left to the vendor; twice that of
    half types on a GPU, whose matrix units take more of them at once."""
    cpu: bool = True
    """Whether kernels are a CPU's: they may rely on the order of their iterations, and multiply many rows, where the
    machine's profile says that it is quick. A GPU's multiply many rows under the option `autotune`, which
    times them against the library's."""

    def apply(self, graph: Graph, context: Context) -> None:
        """Group the whole graph."""
        labels = open_regions(graph)
        graph.erase_dead()
        forward_writes(graph, TINY)
        if self.cpu:
            many = frozenset(d for d in MULTIPLIED if context.machine.multiplies(d.name))
            some = frozenset(d for d in MULTIPLIED if context.machine.multiplies(d.name, ENOUGH_OF_SOME_ROWS))
        else:
            many = some = HALVES if context.config.autotune else frozenset()
        few = FEW_ROWS if self.cpu else FEW_ROWS_OF_GPU
        limits = Limits(self.small_m * few // FEW_ROWS, many, some, in_order=self.cpu, any_layout=not self.cpu, few=few)
        left: dict[Node, str] = {}
        refused: dict[Hashable, str] = {}
        while True:
            grouping = Grouping(graph, context, labels, limits, left=left, refused=refused)
            grouping.join()
            if not self.cpu and (slower := grouping.quicker_apart()):
                left |= slower
            elif unscheduled := grouping.unscheduled():
                refused |= unscheduled
            else:
                break
        for node, reason in left.items():
            sources = tuple(map(str, node.sources[:1]))
            message = "a product of many rows is the library's"
            context.remarks.add("analysis", "group", message, subject=node.op.name, reason=reason, sources=sources)
        grouping.make()
