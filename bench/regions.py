"""The regions of a model that become Triton kernels, with what they get at inference, and the forms they take."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fusec.analysis.machine import Machine
from fusec.codegen.tile.configuration import KernelConfig
from fusec.compiler import context_for
from fusec.config import Config
from fusec.dynamo import backend_with, interpreted
from fusec.errors import ScheduleError
from fusec.ir.graph import Graph, Node
from fusec.loops.plan import plan_kernel
from fusec.reference.interpreter import evaluate


def graphs_of(model: nn.Module, inputs: dict[str, Any]) -> list[tuple[Graph, list[Any]]]:
    """The graphs of a model as imported, and what they are called with."""
    kept: list[tuple[Graph, list[Any]]] = []

    def keep(graph: Graph, config: Config) -> Any:
        run = interpreted(graph)

        def program(arguments: list[Any]) -> list[Any]:
            kept.append((graph.copy(), list(arguments)))
            return run(arguments)

        return SimpleNamespace(program=program)

    torch._dynamo.reset()  # or a second model of a class might be captured with symbols
    with torch.no_grad():
        torch.compile(model, backend=backend_with(keep), dynamic=False)(**inputs)
    return kept


def regions_of(graph: Graph, arguments: list[Any], config: Config | None = None) -> list[tuple[Node, list[Any]]]:
    """The kernels that the pipeline makes of a graph, which it changes, with what they get."""
    from fusec.codegen.triton import TritonTarget
    from fusec.passes import default_pipeline

    config = config or Config()
    default_pipeline(config).run(graph, context_for(TritonTarget(), config)[0])
    regions = [n for n in graph if n.is_op("region") and n.attributes["kind"] == "kernel"]
    values = list(dict.fromkeys(v for region in regions for v in region.operands))
    graph.set_outputs(values)
    numbers = dict(zip(values, evaluate(graph, arguments), strict=True))
    return [(region, [numbers[v] for v in region.operands]) for region in regions]


def other_forms(region: Node, machine: Machine) -> list[KernelConfig]:
    """One configuration of each form that the default of a GEMM has not: transposed, split, or with descriptors.

    Those that are tried for the machine at all.
    """
    from fusec.codegen.triton.legality import ANY
    from fusec.codegen.triton.schedules import configs

    try:
        default, *others = configs(plan_kernel(region.body, ANY), machine)
    except ScheduleError:
        return []
    forms: dict[tuple[bool, bool, bool], KernelConfig] = {_form(default): default}
    for config in others:
        forms.setdefault(_form(config), config)
    return list(forms.values())[1:]


def _form(config: KernelConfig) -> tuple[bool, bool, bool]:
    return config.transposed, config.splits > 1, config.descriptors
