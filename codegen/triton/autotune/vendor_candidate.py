"""The candidate of the vendor's library: vendor calls for a kernel's matmuls, and kernels for the rest."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fusec.codegen.program.fallback import as_typed
from fusec.codegen.program.program import build_program
from fusec.codegen.target import Target
from fusec.ir.graph import Graph, is_written
from fusec.ir.types import DType
from fusec.loops.kinds import no_weight_prologue
from fusec.pipeline import Context


class VendorCandidate:
    """A kernel's body compiled to a program without generated matmuls.

    Args:
        name: of the kernel.
        body: of its region, with attention as a vendor call.
        target: of the other kernels.
        context: of the compile; its vendor pipeline groups the body.

    Raises:
        FusecError: if a pass fails.
    """

    def __init__(self, name: str, body: Graph, target: Target, context: Context) -> None:
        graph = _with_destinations(body)
        config = replace(context.config, mode="default", autotune=False, cuda_graphs=False, strict=False)
        none = frozenset[DType]()
        limits = replace(context.limits, small_m=0, many=none, some=none, weight_prologue=no_weight_prologue)
        own = Context(config, machine=context.machine, limits=limits)
        context.vendor.run(graph, own)
        self._program = build_program(graph, target, own)
        self._given = graph.inputs
        self.name, self.source = name, self._program.source

    def __call__(self, buffers: Sequence[Any], symbols: Sequence[int] = ()) -> None:
        """As ``Launchable``, for static sizes."""
        self._program(as_typed(buffers, self._given))

    def prepare(self, buffers: Sequence[Any]) -> None:
        """Do nothing: its kernels are built at their first launch."""


def _with_destinations(body: Graph) -> Graph:
    """Return a copy that writes its results to additional inputs: a launch is given memory for them.

    No input is frozen, since layers share a kernel.
    """
    graph = body.copy()
    for value in graph.inputs:
        value.frozen = False
    outputs = list(graph.outputs)
    for i, value in enumerate(outputs):
        if not is_written(value):
            outputs[i] = graph.add_node("write", [graph.add_input(value.type), value]).result
    graph.set_outputs(outputs)
    return graph
