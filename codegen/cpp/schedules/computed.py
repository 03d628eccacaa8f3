"""Right operands that are computed, such as weights unpacked from integers: loops around tiles in registers."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from fusec.codegen.cpp.schedules.blocks import Block
from fusec.codegen.cpp.statements import PAIRED_LANES
from fusec.codegen.tile.emitter import Emitter, static_size
from fusec.codegen.tile.kernel import Constant, Loop, TableLookup
from fusec.ir.types import BF16, I32, U8, DType, accumulation
from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr
from fusec.loops.tables import Table, tables

PAIRED_TILE = 2 * PAIRED_LANES
"""Elements of a tile of pairs of bfloat16."""


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
    with _loops(emitter, bound, columns, lanes):
        made = dict[Hashable, TableLookup]()
        for item, table in tables(rights, bound[-1], lanes).items():
            emitter.define(item, _look_up(emitter, table, lanes, made))
        values = emit_rights(emitter, rights, sums)
    right = emitter.inner.pop()
    assert isinstance(right, Loop)
    return right, values


def paired_right(
    emitter: Emitter, rights: Sequence[IndexedExpr], bound: tuple[Axis, ...], columns: Block
) -> tuple[Loop, tuple[str, ...]]:
    """As ``computed_right``, of a right operand that is ``looked_up_in_pairs``."""
    found, made = tables(rights, bound[-1], PAIRED_LANES), dict[Hashable, TableLookup]()
    with _loops(emitter, bound, columns, PAIRED_TILE):
        values = tuple(_look_up(emitter, found[right], PAIRED_LANES, made, paired=True) for right in rights)
    right = emitter.inner.pop()
    assert isinstance(right, Loop)
    return right, values


def looked_up_in_pairs(contraction: IndexedExpr) -> bool:
    """Return whether all of a right operand is bfloat16, looked up by four bits of bytes, in whole tiles of pairs.

    Tables of bfloat16 take half the look-ups, and the products half the instructions.
    """
    inner, rights = contraction.bound[-1], [right for _, right in contraction.pairs]
    found = tables(rights, inner, PAIRED_LANES)
    if static_size(inner) % PAIRED_TILE or any(right.dtype != BF16 or right not in found for right in rights):
        return False
    return all(_are_bytes(table) for table in found.values())


def _are_bytes(table: Table) -> bool:
    codes, _ = table.field(PAIRED_LANES)
    return table.entry.size == PAIRED_LANES and codes.kind == "load" and codes.dtype == U8


@contextmanager
def _loops(emitter: Emitter, bound: tuple[Axis, ...], columns: Block, lanes: int) -> Iterator[None]:
    """Open the loops over the columns and the outer steps of k, and the tile loop over the inner ones."""
    *outer, inner = bound
    with ExitStack() as loops:
        loops.enter_context(emitter.loop(columns.axis, "serial", 1, columns.start, columns.stop))
        if outer:
            loops.enter_context(emitter.loop(loops.enter_context(emitter.over(tuple(outer))), "serial"))
        loops.enter_context(emitter.loop(inner, "tile", lanes))
        yield


def emit_rights(emitter: Emitter, rights: Sequence[IndexedExpr], sums: DType) -> tuple[str, ...]:
    """Compute the right operand of each segment in the dtype of the sums."""
    values = [str(emitter.emit(right)) for right in rights]
    if accumulation(rights[0].dtype) != sums:
        values = [emitter.compute("cast", value, dtype=sums) for value in values]
    return tuple(values)


def _look_up(
    emitter: Emitter, table: Table, lanes: int, made: dict[Hashable, TableLookup], paired: bool = False
) -> str:
    """Append the look-up of a code in a table, perhaps one that another look-up has made."""
    item, shift = table.field(lanes)
    index = str(emitter.emit(item) if paired else emitter.widened(item))
    if shift and not paired:
        index = emitter.compute("shift_right", index, Constant(shift), dtype=I32)
    dst = emitter.fresh()
    if table.key not in made:
        with emitter.loop(table.entry, "tile", lanes):
            value = str(emitter.emit(table.value))
        entries = emitter.inner.pop()
        assert isinstance(entries, Loop)
        made[table.key] = TableLookup(dst, index, entries, value, shift if paired else None)
    emitter.inner.append(replace(made[table.key], dst=dst, index=index, shift=shift if paired else None))
    return dst
