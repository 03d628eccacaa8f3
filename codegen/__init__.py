"""Targets by name: what turns a region into a kernel and a kernel into something that runs."""

import functools
import importlib
from typing import TYPE_CHECKING

from fusec.analysis.devices import kernel_device, kind

if __name__ != "fusec.codegen":
    raise ImportError("import fusec.codegen; this folder is only its source")

if TYPE_CHECKING:
    from fusec.codegen.target import Target
    from fusec.config import Config
    from fusec.ir.graph import Graph

TARGETS = {"cpp": "fusec.codegen.cpp:CppTarget", "triton": "fusec.codegen.triton:TritonTarget"}
"""Module and class of each target, which is imported on demand."""


@functools.cache
def target_named(name: str) -> "Target":
    """The target of that name."""
    module, _, attribute = TARGETS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)()


def target_for(graph: "Graph", config: "Config") -> "Target":
    """The target that a graph is compiled for: the one asked for, else the one of its tensors' device."""
    if config.target:
        return target_named(config.target)
    return target_named("triton" if kind(kernel_device(graph)) == "cuda" else "cpp")
