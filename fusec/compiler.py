"""The way of a graph: passes, then kernels, then a program. Everything that names concrete passes and targets."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusec.analysis.machine import Machine
from fusec.config import Config
from fusec.ir.graph import Graph
from fusec.pipeline import Context, PassRecord
from fusec.remarks import Remarks

if TYPE_CHECKING:
    from fusec.codegen.program.launchables import Schedules
    from fusec.codegen.program.program import Program
    from fusec.codegen.target import Target


@dataclass
class Compiled:
    """One graph, compiled: what runs, and everything that was decided on the way."""

    imported: Graph
    """The graph as it came."""
    graph: Graph
    """The graph after all passes: kernel regions, products, opaque calls."""
    program: Program
    remarks: Remarks
    records: list[PassRecord]
    seconds: dict[str, float] = field(default_factory=dict)
    """Time of the compile by stage: passes, and code."""
    machine: Machine | None = None
    """What predicted times are those of."""


def context_for(target: Target, config: Config, machine: Machine | None = None) -> tuple[Context, Schedules]:
    """Return what the passes of one compile share, and the kernels that they have scheduled.

    Args:
        target: of the kernels.
        config: the user's choices.
        machine: what predicted times are those of; by default what the target finds.
    """
    from fusec.codegen.program.launchables import Schedules
    from fusec.passes import vendor_pipeline

    machine = machine or target.machine(config)
    limits = target.limits(config, machine)
    schedules = Schedules(target, machine, limits)
    vendor = vendor_pipeline(config)
    context = Context(config, machine=machine, limits=limits, unschedulable=schedules.refusal, vendor=vendor)
    return context, schedules


def compile_graph(graph: Graph, config: Config | None = None) -> Compiled:
    """Compile one graph.

    Args:
        graph: as the frontend imported it; it is not changed.
        config: the user's choices.

    Returns:
        What runs; ``program(arguments)`` takes a list, which it clears, and gives a list.
    """
    from fusec.analysis.devices import kernel_device
    from fusec.codegen import target_for
    from fusec.codegen.program.program import build_program
    from fusec.codegen.target import current
    from fusec.pass_cache import PassCache
    from fusec.passes import default_pipeline, kept_traces

    config = config or Config.from_environment()
    work = graph.copy()
    with current(kernel_device(graph)):
        target = target_for(work, config)
        context, schedules = context_for(target, config)
        start = time.perf_counter()
        pipeline = default_pipeline(config)
        passes = PassCache(pipeline, graph, context)
        if not passes.load(work):
            with kept_traces(config):
                pipeline.run(work, context)
            passes.store(work)
        passed = time.perf_counter()
        program = build_program(work, target, context, schedules)
    if config.freeze:
        program.keeping.remark(work, context)
    seconds = {"passes": passed - start, "code": time.perf_counter() - passed}
    return Compiled(graph, work, program, context.remarks, context.records, seconds, context.machine)
