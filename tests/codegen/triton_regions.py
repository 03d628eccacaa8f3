"""Kernel regions as the pipeline makes them for Triton."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fusec.codegen.triton.legality import ANY
from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.graph import Graph, Node
from fusec.ir.regions import open_regions
from fusec.passes import default_pipeline
from fusec.passes.grouping.joins import Grouping
from tests.contexts import context_of

every_chip = pytest.mark.parametrize(
    "chip", ["sm_90", *(pytest.param(chip, marks=pytest.mark.thorough) for chip in ("gfx942", "sm_80", "sm_100"))]
)
"""Chips that kernels are compiled for ahead of time."""


def kernel_regions(graph: Graph, config: Config | None = None) -> list[Node]:
    """Those of a graph, which is changed in place."""
    config = config or Config()
    default_pipeline(config).run(graph, context_of("triton", config))
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
    context = context_of("triton", config)
    default_pipeline(config).run(graph, context)
    grouping = Grouping(graph, replace(context, limits=replace(ANY, small_m=16)), open_regions(graph))
    grouping.fuse()
    grouping.make()
    return [node for node in graph if node.is_op("region") and node.attributes["kind"] == "kernel"]
