"""Right operands that are computed, such as weights unpacked from integers: loops around tiles in registers."""

from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from fusec.codegen.cpp.schedules.blocks import Block
from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.kernel import Constant, Loop, TableLookup
from fusec.ir.types import I32, DType, accumulation
from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr
from fusec.loops.tables import Table, tables


def computed_right(
    emitter: Emitter, rights: Sequence[IndexedExpr], sums: DType, bound: tuple[Axis, ...], columns: Block, lanes: int
) -> tuple[Loop, tuple[str, ...]]:
    """Return the loops that compute a block of a right operand, as ``ComputedDot`` has them, and its tiles.

    Args:
        emitter: of the kernel.
        rights: the right operand, one expression for each segment of the summed axis.
        sums: the dtype of the sums.
        bound: the summed axes, the last of them in tiles.
        columns: the block.
        lanes: of a tile.
    """
    *outer, inner = bound
    with ExitStack() as loops:
        loops.enter_context(emitter.loop(columns.axis, "serial", 1, columns.start, columns.stop))
        if outer:
            loops.enter_context(emitter.loop(loops.enter_context(emitter.over(tuple(outer))), "serial"))
        loops.enter_context(emitter.loop(inner, "tile", lanes))
        made = dict[Hashable, TableLookup]()
        for item, table in tables(rights, inner, lanes).items():
            emitter.define(item, _look_up(emitter, table, lanes, made))
        values = emit_rights(emitter, rights, sums)
    right = emitter.inner.pop()
    assert isinstance(right, Loop)
    return right, values


def emit_rights(emitter: Emitter, rights: Sequence[IndexedExpr], sums: DType) -> tuple[str, ...]:
    """Compute the right operand of each segment in the dtype of the sums."""
    values = [str(emitter.emit(right)) for right in rights]
    if accumulation(rights[0].dtype) != sums:
        values = [emitter.compute("cast", value, dtype=sums) for value in values]
    return tuple(values)


def _look_up(emitter: Emitter, table: Table, lanes: int, made: dict[Hashable, TableLookup]) -> str:
    """Append the look-up of a code in a table, perhaps one that another look-up has made."""
    item, shift = table.field(lanes)
    index = str(emitter.widened(item))
    if shift:
        index = emitter.compute("shift_right", index, Constant(shift), dtype=I32)
    dst = emitter.fresh()
    if table.key not in made:
        with emitter.loop(table.entry, "tile", lanes):
            value = str(emitter.emit(table.value))
        entries = emitter.inner.pop()
        assert isinstance(entries, Loop)
        made[table.key] = TableLookup(dst, index, entries, value)
    emitter.inner.append(replace(made[table.key], dst=dst, index=index))
    return dst
