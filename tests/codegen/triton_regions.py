"""Kernel regions as the pipeline makes them for Triton."""

from collections.abc import Callable, Sequence
from typing import Any

from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.graph import Graph, Node
from fusec.ir.regions import open_regions
from fusec.loops.kinds import HALVES, MULTIPLIED, Limits
from fusec.passes import default_pipeline
from fusec.passes.grouping.joins import Grouping
from fusec.pipeline import Context


def kernel_regions(graph: Graph, config: Config | None = None) -> list[Node]:
    """Those of a graph, which is changed in place."""
    config = config or Config()
    default_pipeline(config, "triton").run(graph, Context(config))
    return [node for node in graph if node.is_op("region") and node.attributes["kind"] == "kernel"]


def regions_of(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Node]:
    """Those of a function, for inputs of these sizes."""
    return kernel_regions(trace(function, inputs, symbolic=False))


def regions_with_products(function: Callable[..., Any], inputs: Sequence[Any], symbolic: bool = False) -> list[Node]:
    """Those of a function where products of any number of rows are generated, whether that pays or not."""
    return regions_around_products(trace(function, inputs, symbolic=symbolic))


def regions_around_products(graph: Graph) -> list[Node]:
    """Those of a graph, which is changed in place."""
    config = Config(disable="group,bias")
    context = Context(config)
    default_pipeline(config, "triton").run(graph, context)
    limits = Limits(16, MULTIPLIED | HALVES, in_order=False, any_layout=True)
    grouping = Grouping(graph, context, open_regions(graph), limits)
    grouping.join()
    grouping.make()
    return [node for node in graph if node.is_op("region") and node.attributes["kind"] == "kernel"]
