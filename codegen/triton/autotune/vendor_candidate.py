"""A kernel's work with its products by the vendor's library and kernels for the rest: what it has to beat."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fusec.codegen.program.program import build_program
from fusec.codegen.program.unfused import as_typed
from fusec.codegen.target import Target
from fusec.ir.graph import Graph, is_written
from fusec.pipeline import Context


class VendorCandidate:
    """A kernel's body as a program of its own, without a product of ours.

    Args:
        name: of the kernel.
        body: of its region, or what says the same with a call of the library's attention.
        target: of the rest.
        context: of the compile; its passes for the rest group it.

    Raises:
        FusecError: where a pass cannot go on.
    """

    def __init__(self, name: str, body: Graph, target: Target, context: Context) -> None:
        graph = _in_place(body)
        config = replace(context.config, mode="default", autotune=False, cuda_graphs=False, strict=False)
        limits = replace(context.limits, small_m=0, many=frozenset(), some=frozenset())
        own = Context(config, machine=context.machine, limits=limits)
        context.vendor.run(graph, own)
        self._program = build_program(graph, target, own)
        self._given = graph.inputs
        self.name, self.source = name, self._program.source

    def __call__(self, buffers: Sequence[Any], symbols: Sequence[int] = ()) -> None:
        """As a ``Launchable``, of a kernel of known sizes."""
        self._program(as_typed(buffers, self._given))

    def prepare(self, buffers: Sequence[Any]) -> None:
        """Its kernels are built at their first launch."""


def _in_place(body: Graph) -> Graph:
    """A copy that writes its results into further inputs: whoever runs a kernel has memory for them.

    Weights decide nothing in it, as a kernel is shared by layers.
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
