"""Small-M products by a computed weight that is contiguous along its columns: lanes are columns, sums are serial."""

from collections.abc import Sequence
from contextlib import ExitStack

from fusec.codegen.cpp.schedules.blocks import Block
from fusec.codegen.cpp.schedules.computed import emit_rights
from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.kernel import ColumnDot, Loop, Matrix
from fusec.ir.types import accumulation
from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr, stride
from fusec.loops.kinds import is_computed, weight_of


def column_in_lanes(contraction: IndexedExpr) -> Axis | None:
    """Return the column axis along which a computed weight is contiguous, where it is not along the summed one."""
    if not is_computed(contraction):
        return None
    weight, bound = weight_of(contraction), contraction.bound
    if stride(weight, bound[-1]) == 1:
        return None
    return next((axis for axis in weight.axes if axis not in bound and stride(weight, axis) == 1), None)


def column_dot(
    emitter: Emitter,
    contraction: IndexedExpr,
    lefts: Sequence[Matrix],
    target: Matrix,
    rows: int,
    columns: Block,
    lanes: int,
) -> ColumnDot:
    """Return the product of a block of columns.

    Args:
        emitter: of the kernel.
        contraction: the product.
        lefts: the left operands, one for each segment; their summed elements are contiguous.
        target: memory for the sums.
        rows: their number.
        columns: the block.
        lanes: of a register of columns.
    """
    *outer, inner = contraction.bound
    with ExitStack() as loops:
        if outer:
            steps = loops.enter_context(emitter.over(tuple(outer)))
            loops.enter_context(emitter.loop(steps, "serial"))
        loops.enter_context(emitter.loop(columns.axis, "tile", lanes, columns.start, columns.stop))
        loops.enter_context(emitter.loop(inner, "serial"))
        rights = [right for _, right in contraction.pairs]
        values = emit_rights(emitter, rights, accumulation(contraction.dtype))
    right = emitter.inner.pop()
    assert isinstance(right, Loop)
    return ColumnDot(target, tuple(lefts), right, values, rows)
