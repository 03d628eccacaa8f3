"""Schedule of grouped GEMMs on tiles: an index chooses the matrix that a row is multiplied by, as a token its expert.

A first grid has one program for each group: it counts the rows of earlier groups and lists its own behind them. In the
second, each program multiplies all rows of one group, block by block, by a block of columns of the group's matrix. So
only matrices that are chosen are read, and rows are neither copied nor padded to whole blocks in memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import sympy

from fusec.codegen.tile.blocks import block_range, grid
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.kernel import DotTiles, Init, Scan, Statement, Store, Update, index_symbol
from fusec.codegen.triton.schedules.operands import (
    MATRIX_ROWS,
    blocks_of_sum,
    has_groups,
    length,
    multiplied,
    power_of_two,
)
from fusec.ir.types import I64, accumulation, product
from fusec.loops.affine import Axis
from fusec.loops.grouped import GroupedProducts, is_stored
from fusec.loops.indexing import LoopNest

_INDICES = 1024
"""Indices in a block of those that each program of the first grid reads."""
_GROUP, _BLOCK = map(index_symbol, ("group", "block"))


def schedule_tiled_groups(
    emitter: Emitter, nest: LoopNest, groups: GroupedProducts, config: KernelConfig
) -> tuple[Statement, ...]:
    """Return the body of a kernel for a grouped GEMM and the operations on its rows: two grids."""
    return _TiledGroups(emitter, nest, groups, config).run()


def width(groups: GroupedProducts, config: KernelConfig) -> int:
    """Return the columns of a block of each product."""
    room = min(config.columns // len(groups.products), length((groups.column,)))
    return max(MATRIX_ROWS, power_of_two(room // 2 + 1))


class _TiledGroups:
    def __init__(self, emitter: Emitter, nest: LoopNest, groups: GroupedProducts, config: KernelConfig) -> None:
        self.emitter, self.nest, self.groups, self.config = emitter, nest, groups, config
        self.count = product(tuple(axis.size for axis in groups.rows))
        """Number of rows."""
        self.order = emitter.add_scratch(I64, self.count + 1, "order", "shared").name
        """The numbers of the rows, those of a group together; the last element is for rows of other groups."""
        self.starts, self.stops = (
            emitter.add_scratch(I64, groups.count, name, "shared").name for name in ("starts", "stops")
        )
        """The places in that order where the rows of each group begin and end."""
        self.width = width(groups, config)

    def run(self) -> tuple[Statement, ...]:
        """Return the statements of the kernel."""
        emitter, programs = self.emitter, (_GROUP.name, self.groups.count)
        self._list_rows()
        listed = grid(emitter.take(), [programs])
        self._multiply()
        blocks = -(-length((self.groups.column,)) // self.width)
        return (*listed, *grid(emitter.take(), [programs, (_BLOCK.name, blocks)]))

    # First grid: the rows of each group.

    def _list_rows(self) -> None:
        """Store where the rows of a group begin and end, and their numbers in between."""
        emitter, group = self.emitter, self.emitter.number(_GROUP)
        before, own = (emitter.accumulator("sum", I64, True) for _ in range(2))
        with self._each_index() as (_, index):
            for total, op in ((before, "lt"), (own, "eq")):
                one = emitter.compute("cast", emitter.compute(op, index, group, dtype=I64), dtype=I64)
                emitter.inner.append(Update(total, "sum", (one,)))
        start, count = (emitter.fold("sum", total, I64) for total in (before, own))
        emitter.inner.append(Store(self.starts, _GROUP, start))
        emitter.inner.append(Store(self.stops, _GROUP, emitter.compute("add", start, count, dtype=I64)))
        emitter.inner.append(Init(found := emitter.fresh("acc"), "sum", I64, tile=False))
        with self._each_index() as (row, index):
            mine = emitter.compute("eq", index, group, dtype=I64)
            one, rank = emitter.compute("cast", mine, dtype=I64), emitter.fresh()
            emitter.inner.append(Scan(rank, "sum", one, found, emitter.axis_name(row), I64))
            place = emitter.compute("add", start, emitter.compute("sub", rank, one, dtype=I64), dtype=I64)
            last = emitter.number(sympy.sympify(self.count))
            place = emitter.compute("where", mine, place, last, dtype=I64)
            number = emitter.number(emitter.axis_symbol(row))
            emitter.inner.append(Store(self.order, emitter.within(place, self.count + 1), number))

    @contextmanager
    def _each_index(self) -> Iterator[tuple[Axis, str]]:
        """Open a tile loop over the rows as one axis, and yield it and their indices."""
        emitter, rows = self.emitter, self.groups.rows
        with emitter.tile(rows, _INDICES, apart=True):
            yield emitter.joint(rows, apart=True), emitter.number(emitter.dynamic_index(self.groups.index))

    # Second grid: products.

    def _multiply(self) -> None:
        """Multiply the rows of a group by a block of columns of its matrix, and store the results."""
        emitter, column = self.emitter, self.groups.column
        start, stop = (
            emitter.within(emitter.load(buffer, _GROUP), self.count + 1) for buffer in (self.starts, self.stops)
        )
        place, columns = Axis(self.count), block_range(_BLOCK * self.width, self.width, length((column,)))
        with emitter.over(self.groups.rows) as row, emitter.loop(place, "tile", self.config.rows, start, stop):
            emitter.bind(row, emitter.load(self.order, emitter.axis_symbol(place)))
            emitter.choose(self.groups.index, _GROUP)
            with emitter.tile((column,), self.width, *columns, apart=True):
                for bound in dict.fromkeys(one.bound for one in self.groups.products):
                    self._sum_up(bound)
                for output in self.nest.outputs:
                    emitter.store(output)

    def _sum_up(self, bound: tuple[Axis, ...]) -> None:
        """Define the products that are summed over these axes."""
        emitter, depth = self.emitter, self.config.depth
        members = {one: pairs for one, pairs in self.groups.products.items() if one.bound == bound}
        totals = {one: emitter.accumulator("sum", accumulation(one.dtype)) for one in members}
        by_group = has_groups(bound) and not all(is_stored(right) for pairs in members.values() for _, right in pairs)
        depth = min(depth, power_of_two(length(bound[-1:]))) if by_group else depth
        with blocks_of_sum(emitter, bound, depth, by_group) as axis:
            for one, total in totals.items():
                for left, right in members[one]:
                    a, b = map(emitter.emit, (left, right))
                    dtype = multiplied(left, right)
                    emitter.inner.append(DotTiles(total, str(a), str(b), emitter.axis_name(axis), dtype))
        for one, total in totals.items():
            emitter.define(one, total)
