"""Scales and zero points of groups of weights, computed in lanes ahead of a small-M GEMM."""

import math
from collections.abc import Iterable

import sympy

from fusec.codegen.cpp.schedules.blocks import Block
from fusec.codegen.tile.emitter import Emitter, static_size
from fusec.codegen.tile.kernel import Load, Prefetch, Store
from fusec.ir.types import F32, accumulation
from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr, stride, walk

_MOST_BYTES = 128 << 10
"""Size limit of the scratch for a block of columns, which stays in the second-level cache."""


def keep_scales(
    emitter: Emitter, found: Iterable[IndexedExpr], bound: tuple[Axis, ...], columns: Block, lanes: int
) -> None:
    """Compute scales and zero points of all groups of a block of columns, and keep them in scratch as floats.

    In the loop over groups one of them takes several instructions, both together as many as 32 weights of four bits;
    from scratch it is one load.

    Args:
        emitter: of the kernel.
        found: what does not vary inside a group.
        bound: the summed axes, the last of them inside a group.
        columns: the block.
        lanes: of a tile.
    """
    outer = bound[:-1]
    groups = math.prod(map(static_size, outer))
    scales = [item for item in found if _is_kept(item, columns.axis, outer)]
    if groups < lanes or not scales or 4 * len(scales) * groups * columns.size > _MOST_BYTES:
        return
    with emitter.over(outer) as steps:
        place = (emitter.axis_symbol(columns.axis) - columns.start) * groups + emitter.axis_symbol(steps)
        kept = {
            item: (emitter.add_scratch(F32, groups * columns.size, "scales"), sympy.expand(place)) for item in scales
        }
        with (
            emitter.loop(columns.axis, "serial", 1, columns.start, columns.stop),
            emitter.loop(steps, "tile", lanes),
        ):
            for item, (buffer, offset) in kept.items():
                emitter.inner.append(Store(buffer.name, offset, emitter.emit(item)))
            column = emitter.axis_symbol(columns.axis)
            for load in [s for s in emitter.inner if isinstance(s, Load)]:
                next_block = load.offset.subs(column, column + columns.size)
                emitter.inner.append(Prefetch(load.buffer, sympy.expand(next_block)))
    emitter.kept |= kept


def shared_by_groups(rights: Iterable[IndexedExpr], inner: Axis) -> list[IndexedExpr]:
    """Return the largest expressions of right operands that do not vary along the last summed axis."""
    varying = [item for item in walk(rights) if inner in item.axes]
    return list(dict.fromkeys(o for item in varying for o in item.operands if inner not in o.axes))


def _is_kept(item: IndexedExpr, column: Axis, outer: tuple[Axis, ...]) -> bool:
    """Return whether an expression is a float for each group of a column, of neighbours in memory, but not just one."""
    items = list(walk([item]))
    return (
        column in item.axes
        and any(a in item.axes for a in outer)
        and accumulation(item.dtype) == F32
        and not (item.kind == "load" and item.dtype == F32)
        and all(i.kind in ("load", "lookup", "pointwise", "constant") for i in items)
        and all(stride(i, outer[-1]) in (0, 1) for i in items if i.kind in ("load", "lookup"))
    )
