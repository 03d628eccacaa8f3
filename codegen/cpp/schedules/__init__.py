"""Schedules for CPUs: tiles are registers, threads have scratch memory, run-time indices are checked ahead of all."""

from fusec.codegen.cpp.schedules.attention import schedule_attention
from fusec.codegen.cpp.schedules.small_m_gemm import schedule_contraction
from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.tile.region import ANY_ROWS, assemble
from fusec.codegen.tile.rows import Tiling, schedule_rows
from fusec.ir.graph import Node
from fusec.loops.indexing import lower_to_loops
from fusec.loops.kinds import MULTIPLIED, Limits, classify

_LIMITS = Limits(ANY_ROWS, MULTIPLIED)


def schedule(region: Node, tiling: Tiling) -> Kernel:
    """The kernel of a region whose body holds primitive operations only.

    Raises:
        ScheduleError: where no schedule covers the region.
    """
    nest = lower_to_loops(region.body)
    shape = classify(nest, _LIMITS)
    emitter = Emitter(region.body)
    if shape.attention is not None:
        statements = schedule_attention(emitter, nest, shape.attention, tiling)
    elif shape.kind == "contraction":
        statements = schedule_contraction(emitter, nest, shape, tiling)
    else:
        statements = schedule_rows(emitter, nest, shape, tiling)
    return assemble(region, nest, shape, emitter, (*emitter.checks_ahead(nest.dynamic_indices()), *statements))
