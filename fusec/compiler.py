"""Compilation of one graph: passes, then kernels, then a program; the one place that names passes and targets."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusec.analysis.machine import Machine
from fusec.analysis.sites import Site
from fusec.config import Config
from fusec.ir.graph import Graph
from fusec.pipeline import Context, PassRecord
from fusec.remarks import Remarks

if TYPE_CHECKING:
    from fusec.codegen.program.kernels import ScheduleCache
    from fusec.codegen.program.program import Program
    from fusec.codegen.target import Target

logger = logging.getLogger(__name__)


@dataclass
class Compiled:
    """A compiled graph: its program, and the record of its compile."""

    imported: Graph
    """The graph as the frontend imported it."""
    graph: Graph
    """The graph after all passes: kernel regions, matmuls, opaque calls."""
    program: Program
    remarks: Remarks
    records: list[PassRecord]
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the compile by stage: ``passes`` and ``code``."""
    machine: Machine | None = None
    """The machine whose times are predicted."""
    sites: tuple[Site, ...] = ()
    """The sites of the model that it is a part of, under ``trace`` and ``report``."""

    def summary(self) -> str:
        """Return one line: what the graph became, and how long that took."""
        steps = Counter(step.kind for step in self.program.steps)
        opaque = sum(steps[kind] for kind in ("opaque", "interpreted", "write"))
        fusions = next((len(r.declared) for r in reversed(self.records) if r.declared), 0)
        failures = sum(r.kind == "failure" for r in self.remarks)
        return (
            f"{self.graph.name}: {len(self.imported)} nodes, {fusions} fusions, {steps['kernel']} kernels, "
            f"{steps['vendor']} vendor calls, {opaque} ATen calls, {failures} failures, "
            f"{sum(self.seconds.values()):.2f} s"
        )


def context_for(target: Target, config: Config, machine: Machine | None = None) -> tuple[Context, ScheduleCache]:
    """Return the state that the passes of one compile share, and the cache of the kernels that they schedule.

    Args:
        target: the target to compile for.
        config: the user's options.
        machine: the machine model for cost prediction; by default the target's.
    """
    from fusec.codegen.program.kernels import ScheduleCache
    from fusec.passes import vendor_pipeline

    machine = machine or target.machine(config)
    limits = target.limits(config, machine)
    schedules = ScheduleCache(target, machine, limits)
    vendor = vendor_pipeline(config)
    context = Context(config, machine=machine, limits=limits, unschedulable=schedules.refusal, vendor=vendor)
    return context, schedules


def compile_graph(graph: Graph, config: Config | None = None, target: Target | None = None) -> Compiled:
    """Compile one graph.

    Args:
        graph: as the frontend imported it; it is not changed.
        config: the user's options; by default those of the environment.
        target: the target; by default the one for the graph.

    Returns:
        The compiled graph; its ``program(arguments)`` takes a list, which it clears, and returns a list.
    """
    from fusec.analysis.devices import kernel_device
    from fusec.codegen import target_for
    from fusec.codegen.program.program import build_program
    from fusec.codegen.target import device_guard
    from fusec.pass_cache import PassCache
    from fusec.passes import default_pipeline, kept_traces

    config = config or Config.from_environment()
    work = graph.copy()
    with device_guard(kernel_device(graph)):
        target = target or target_for(work, config)
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
        program.folded.remark(work, context)
    seconds = {"passes": passed - start, "code": time.perf_counter() - passed}
    compiled = Compiled(graph, work, program, context.remarks, context.records, seconds, context.machine)
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", compiled.summary())
    return compiled
