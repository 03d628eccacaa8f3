"""Scales and zero points of groups of weights, computed in lanes ahead of a small-M GEMM."""

import math
from collections.abc import Iterable

import sympy

from fusec.codegen.cpp.schedules.blocks import Block
from fusec.codegen.tile.emitter import Emitter, static_size
from fusec.codegen.tile.kernel import Store
from fusec.ir.types import F32, accumulation
from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr, stride, walk

_MOST_BYTES = 128 << 10


def keep_scales(
    emitter: Emitter, roots: Iterable[IndexedExpr], columns: Block, outer: tuple[Axis, ...], inner: Axis, lanes: int
) -> None:
    """Compute what does not vary along ``inner`` for a block of columns, and keep it in scratch as floats.

    In the loop over groups each takes several instructions, as many as 16 weights do; from scratch it is one load.

    Args:
        emitter: of the kernel.
        roots: right operands.
        columns: the block.
        outer: the contracted axes that count groups.
        inner: the contracted axis inside a group.
        lanes: of a tile.
    """
    groups = math.prod(map(static_size, outer))
    scales = [item for item in _uniform(roots, inner) if _is_kept(item, columns.axis, outer)]
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
    emitter.kept |= kept


def _uniform(roots: Iterable[IndexedExpr], inner: Axis) -> dict[IndexedExpr, None]:
    """Return the largest expressions below ``roots`` that do not vary along ``inner``."""
    varying = [item for item in walk(roots) if inner in item.axes]
    return dict.fromkeys(o for item in varying for o in item.operands if inner not in o.axes)


def _is_kept(item: IndexedExpr, column: Axis, outer: tuple[Axis, ...]) -> bool:
    """Return whether an expression is a float for each group of a column, of neighbours in memory, but not just one."""
    items = list(walk([item]))
    return (
        column in item.axes
        and any(a in item.axes for a in outer)
        and accumulation(item.dtype) == F32
        and not (item.kind == "load" and item.dtype == F32)
        and all(i.kind in ("load", "pointwise", "constant") for i in items)
        and all(stride(i, outer[-1]) in (0, 1) for i in items if i.kind == "load")
    )
