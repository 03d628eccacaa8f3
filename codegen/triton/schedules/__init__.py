"""Schedules for GPUs: tiles are rows or blocks, there is no scratch, dynamic indices are checked before their use."""

from dataclasses import replace

from fusec.analysis.machine import Machine, chip
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.kernel import Check, Kernel, Operand, Statement
from fusec.codegen.tile.region import assemble
from fusec.codegen.tile.rows import Tiling, schedule_rows
from fusec.codegen.triton.schedules.attention import schedule_tiled_attention
from fusec.codegen.triton.schedules.gemm import schedule_tiled_contraction
from fusec.codegen.triton.schedules.grouped_gemm import schedule_tiled_groups
from fusec.codegen.triton.schedules.heuristics import MAX_SCANNED, MAX_TILE, default_config, other_configs
from fusec.codegen.triton.schedules.split_rows import schedule_split_rows
from fusec.errors import ScheduleError
from fusec.loops.grouped import find_grouped_products
from fusec.loops.indexing import DynamicIndex
from fusec.loops.plan import Plan

_LANES = 1024
"""Elements of a tile that is not a row."""
_SERIAL = 128
"""Lanes of a tile over kept axes, where a serial loop goes through rows: few, so that there are many programs."""
_PROGRAMS = 16
"""Half of the programs of one warp that a processor runs at once."""
_TILING = Tiling(_LANES, grain=1, serial_lanes=_SERIAL, cuts=1, has_scratch=False)


def schedule(plan: Plan, name: str, machine: Machine | None = None, config: KernelConfig | None = None) -> Kernel:
    """Return the kernel of a plan.

    Args:
        plan: of the kernel.
        name: of the kernel.
        machine: the GPU; by default the usual one.
        config: the kernel configuration; by default the one for that GPU.

    Raises:
        ScheduleError: where no schedule covers the region.
    """
    nest, shape, gpu = plan.nest, plan.shape, _gpu(machine)
    config = config or default_config(nest, shape, gpu, _LANES)
    if config.descriptors and not gpu.has_descriptors:
        fix = "a config without, as all are that configs() gives for it"
        raise ScheduleError(f"blocks by tensor descriptors on {gpu.name}", why="it has none", fix=fix)
    emitter = _GpuEmitter(plan.body)
    if shape.attention is not None:
        statements = schedule_tiled_attention(emitter, nest, shape.attention, config)
    elif shape.kind == "contraction":
        statements = schedule_tiled_contraction(emitter, nest, shape, config)
    elif (groups := find_grouped_products(nest, shape)) is not None:
        statements = schedule_tiled_groups(emitter, nest, groups, config)
    elif config.splits > 1:
        statements = schedule_split_rows(emitter, nest, shape, config)
    else:
        longest = MAX_SCANNED if shape.scans else MAX_TILE
        tiling = replace(_TILING, lanes=config.columns, longest_row=longest, cores=_PROGRAMS * gpu.threads)
        statements = schedule_rows(emitter, nest, shape, tiling)
    if any(b.role == "scratch" for b in emitter.scratch):
        raise ScheduleError("the kernel needs scratch memory")
    return assemble(plan, name, emitter, statements, config)


def configs(plan: Plan, machine: Machine | None) -> tuple[KernelConfig, ...]:
    """Return the configurations of a plan: the default, then a few that may be faster.

    Raises:
        ScheduleError: where no schedule covers the region.
    """
    nest, shape, gpu = plan.nest, plan.shape, _gpu(machine)
    default = default_config(nest, shape, gpu, _LANES)
    return (default, *other_configs(nest, shape, gpu, default))


class _GpuEmitter(Emitter):
    def guard(self, index: DynamicIndex, value: Operand) -> tuple[Statement, ...]:
        return (Check(value, index.length, self.numbers[index.node]),)


def _gpu(machine: Machine | None) -> Machine:
    """Return the machine if it is a GPU, else the default GPU."""
    return machine if machine is not None and machine.code else chip("")
