"""Schedules for CPUs: tiles are registers, threads have scratch, dynamic indices are checked ahead of the grid."""

from dataclasses import replace

from fusec.codegen.cpp.schedules.attention import schedule_attention
from fusec.codegen.cpp.schedules.gemm import schedule_contraction
from fusec.codegen.cpp.schedules.grouped_gemm import schedule_grouped
from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.tile.region import assemble
from fusec.codegen.tile.rows import Tiling, schedule_rows
from fusec.loops.grouped import find_grouped_products
from fusec.loops.plan import Plan


def schedule(plan: Plan, name: str, tiling: Tiling) -> Kernel:
    """Return the kernel of a plan.

    Raises:
        ScheduleError: where no schedule covers it.
    """
    nest, shape, emitter = plan.nest, plan.shape, Emitter(plan.body)
    if shape.attention is not None:
        statements = schedule_attention(emitter, nest, shape.attention, tiling)
    elif shape.kind == "contraction":
        statements = schedule_contraction(emitter, nest, shape, tiling)
    elif (groups := find_grouped_products(nest, shape)) is not None:
        statements = schedule_grouped(emitter, nest, groups, tiling)
    else:
        statements = schedule_rows(emitter, nest, shape, tiling)
    checks = emitter.checks_ahead(nest.dynamic_indices(), tiling.lanes)
    return replace(assemble(plan, name, emitter, (*checks, *statements)), checks=len(checks))
