"""Sorts of rows that one tile holds, whose results are tiles as well."""

from collections.abc import Iterable
from dataclasses import dataclass

from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.kernel import Constant, Statement
from fusec.ir.types import DType, accumulation
from fusec.loops.indexing import IndexedExpr
from fusec.loops.sorts import sort_of


@dataclass(frozen=True)
class SortTile(Statement):
    """``order`` = the places of the keys of a tile in order; ``values`` = these keys (Triton).

    Equal keys keep their order. Largest first if ``descending``; NaN is the largest. Lanes beyond the end come last.
    """

    OPERANDS, RESULT = ("keys",), ("order", "values")
    order: str
    values: str
    keys: str
    axis: str
    """The axis of the keys, of which one tile is the whole range."""
    along: str
    """The axis of the results, with tiles of as many lanes."""
    dtype: DType
    """The compute type of the keys."""
    descending: bool


def emit_sort(emitter: Emitter, item: IndexedExpr, sorts: Iterable[IndexedExpr], lanes: int) -> None:
    """Emit the sort of a row, once for its order and its elements.

    Args:
        emitter: of the kernel.
        item: the order, or the elements.
        sorts: all of the kernel.
        lanes: of the tile that holds the row.
    """
    if item in emitter.levels[-1].names:
        return
    (x,), (axis,), sort = item.operands, item.bound, sort_of(item.node)
    assert sort is not None
    dtype, (along,) = accumulation(x.dtype), item.index[-1].axes
    order, values = emitter.fresh("order"), emitter.fresh("sorted")
    with emitter.loop(axis, "tile", lanes):
        keys = emitter.rounded(x, emitter.emit(x))
        if isinstance(keys, Constant):
            keys = emitter.compute("cast", keys, dtype=dtype)
        names = emitter.axis_name(axis), emitter.axis_name(along)
        emitter.inner.append(SortTile(order, values, keys, *names, dtype, sort.attributes["descending"]))
    for other in sorts:  # a loop that is one tile opens no scope
        if sort_of(other.node) is sort and other.index == item.index:
            emitter.define(other, order if other.node is sort else values)
