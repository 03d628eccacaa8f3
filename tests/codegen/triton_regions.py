"""Kernel regions as the pipeline makes them for Triton."""

from collections.abc import Callable, Sequence
from typing import Any

from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.graph import Graph, Node
from fusec.passes import default_pipeline
from fusec.pipeline import Context


def kernel_regions(graph: Graph, config: Config | None = None) -> list[Node]:
    """Those of a graph, which is changed in place."""
    config = config or Config()
    default_pipeline(config, "triton").run(graph, Context(config))
    return [node for node in graph if node.is_op("region") and node.attributes["kind"] == "kernel"]


def regions_of(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Node]:
    """Those of a function, for inputs of these sizes."""
    return kernel_regions(trace(function, inputs, symbolic=False))
