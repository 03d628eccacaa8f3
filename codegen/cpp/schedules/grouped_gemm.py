"""Schedule of grouped GEMMs: an index chooses the matrix that a row is multiplied by, as tokens choose experts.

Each thread sorts the rows by their index, which takes one pass over the indices. For each group in turn its rows are
copied to scratch, so that they are neighbours, and the threads share its blocks of columns. Each matrix that is chosen
is read once, others never. One that is computed, such as one unpacked from integers, is computed as it is read.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import sympy

from fusec.codegen.cpp.schedules.blocks import Block, at
from fusec.codegen.cpp.schedules.computed import computed_right
from fusec.codegen.cpp.schedules.groups import keep_scales, shared_by_groups
from fusec.codegen.tile.blocks import block_range
from fusec.codegen.tile.emitter import Emitter, static_size
from fusec.codegen.tile.kernel import (
    PARTS,
    Buffer,
    ComputedDot,
    Constant,
    Dot,
    Loop,
    Matrix,
    Statement,
    Store,
    index_symbol,
)
from fusec.codegen.tile.rows import Tiling
from fusec.ir.types import BF16, I64, DType, accumulation, contiguous_strides
from fusec.loops.affine import Axis
from fusec.loops.grouped import GroupedProducts, is_stored
from fusec.loops.indexing import IndexedExpr, LoopNest, stride

MOST_ROWS = 128
"""Rows of a group that are multiplied at a time."""
MOST_TILES = 4
"""Tiles of columns of a block: ``dot.h`` keeps as many in the first-level cache."""
_GROUP, _FIRST, _ROW = map(index_symbol, ("group", "first", "row"))


def schedule_grouped(
    emitter: Emitter, nest: LoopNest, groups: GroupedProducts, tiling: Tiling
) -> tuple[Statement, ...]:
    """Return the body of a kernel for a grouped GEMM and the operations on its rows."""
    return _GroupedGemm(emitter, nest, groups, tiling).run()


class _GroupedGemm:
    def __init__(self, emitter: Emitter, nest: LoopNest, groups: GroupedProducts, tiling: Tiling) -> None:
        self.emitter, self.nest, self.groups, self.tiling = emitter, nest, groups, tiling
        self.joint = emitter.joint(groups.rows)
        """The rows as one axis."""
        self.most = self.joint.size if isinstance(self.joint.size, int) else MOST_ROWS
        self.most = max(1, min(self.most, MOST_ROWS))

    def run(self) -> tuple[Statement, ...]:
        emitter = self.emitter
        with emitter.over(self.groups.rows):
            order, ends = self._sort()
            with emitter.repeat("group", 0, self.groups.count, 1):
                start, stop = (emitter.within(emitter.load(ends.name, _GROUP + i), self.joint.size + 1) for i in (0, 1))
                with emitter.repeat("first", start, stop, self.most):
                    self._products(order, sympy.Min(_FIRST + self.most, stop))
        return (Loop("part", 0, PARTS, 1, "grid", tuple(emitter.inner)),)

    # Rows, sorted by group.

    def _sort(self) -> tuple[Buffer, Buffer]:
        """Sort the numbers of the rows by group; return them, and for each group where it begins, and the last ends."""
        emitter, count = self.emitter, self.groups.count
        order = emitter.add_scratch(I64, self.joint.size, "order")
        ends = emitter.add_scratch(I64, count + 2, "ends")
        with emitter.repeat("n", 0, count + 2, 1):
            emitter.inner.append(Store(ends.name, index_symbol("n"), Constant(0)))
        with emitter.loop(self.joint, "serial"):
            self._increment(ends, emitter.dynamic_index(self.groups.index) + 2)
        with emitter.repeat("n", 0, count, 1):
            before, own = (emitter.load(ends.name, index_symbol("n") + i) for i in (1, 2))
            total = emitter.compute("add", before, own, dtype=I64)
            emitter.inner.append(Store(ends.name, index_symbol("n") + 2, total))
        with emitter.loop(self.joint, "serial"):
            place = self._increment(ends, emitter.dynamic_index(self.groups.index) + 1)
            row = emitter.number(emitter.axis_symbol(self.joint))
            emitter.inner.append(Store(order.name, emitter.within(place, self.joint.size), row))
        return order, ends

    def _increment(self, numbers: Buffer, offset: sympy.Expr) -> str:
        """Add one to a number in memory, and return what it was."""
        before = self.emitter.load(numbers.name, offset)
        after = self.emitter.compute("add", before, Constant(1), dtype=I64)
        self.emitter.inner.append(Store(numbers.name, offset, after))
        return before

    @contextmanager
    def _each_row(self, order: Buffer, stop: sympy.Expr) -> Iterator[None]:
        """Open a loop over the rows of a block, and bind their axes."""
        emitter = self.emitter
        with emitter.repeat("row", _FIRST, stop, 1):
            place = emitter.within(emitter.number(_ROW), self.joint.size)
            emitter.bind(self.joint, emitter.load(order.name, place))
            yield

    # Products of one block of rows.

    def _products(self, order: Buffer, stop: sympy.Expr) -> None:
        emitter, column = self.emitter, self.groups.column
        lefts = self._lefts(order, stop)
        n, lanes = static_size(column), self.tiling.lanes
        size = max(lanes, min(MOST_TILES * lanes, n // 64 * lanes))
        start, end = block_range(index_symbol("block") * size, size, n)
        with emitter.repeat("block", 0, -(-n // size), 1, "dynamic"):
            block = Block(column, start, end, size)
            for reduction in self.groups.products:
                self._product(order, reduction, lefts, block, stop - _FIRST)
            with self._each_row(order, stop), emitter.loop(column, "tile", lanes, start, end):
                for output in self.nest.outputs:
                    emitter.store(output)

    def _lefts(self, order: Buffer, stop: sympy.Expr) -> dict[IndexedExpr, Matrix]:
        """Copy the rows of each left operand, computed where it is not loaded."""
        emitter, lefts = self.emitter, dict[IndexedExpr, Matrix]()
        bounds = dict[IndexedExpr, tuple[Axis, ...]]()
        for reduction, pairs in self.groups.products.items():
            depth = math.prod(map(static_size, reduction.bound))
            for left, right in pairs:
                bounds[left] = reduction.bound
                name = emitter.add_scratch(self._left_dtype(left, right), self.most * depth, "left").name
                lefts.setdefault(left, Matrix(name, sympy.Integer(0), depth, 1))
        with self._each_row(order, stop):
            for left, copy in lefts.items():
                with self._each_k(bounds[left]) as k:
                    offset = (_ROW - _FIRST) * copy.row_stride + k
                    emitter.inner.append(Store(copy.buffer, sympy.expand(offset), emitter.emit(left)))
        return lefts

    @contextmanager
    def _each_k(self, bound: tuple[Axis, ...]) -> Iterator[sympy.Expr]:
        """Open loops over the axes that a product sums over, in tiles of the innermost; yield the index over all."""
        emitter, (*outer, inner) = self.emitter, bound
        steps = zip(bound, contiguous_strides(tuple(map(static_size, bound))), strict=True)
        with ExitStack() as loops:
            for axis in outer:
                loops.enter_context(emitter.loop(axis, "serial"))
            loops.enter_context(emitter.loop(inner, "tile", self.tiling.lanes))
            yield sum((emitter.axis_symbol(axis) * step for axis, step in steps), sympy.Integer(0))

    def _left_dtype(self, left: IndexedExpr, right: IndexedExpr) -> DType:
        """Return the dtype of the copy: bfloat16 if the machine multiplies it, else that of sums."""
        halves = left.dtype == right.dtype == BF16 and self.tiling.many_bf16_products
        return BF16 if halves else accumulation(left.dtype)

    def _product(
        self,
        order: Buffer,
        reduction: IndexedExpr,
        lefts: dict[IndexedExpr, Matrix],
        columns: Block,
        rows: sympy.Expr,
    ) -> None:
        """Multiply the rows by a block of columns of their group's matrix."""
        emitter, bound, pairs = self.emitter, reduction.bound, self.groups.products[reduction]
        sums, rights, own = accumulation(reduction.dtype), [right for _, right in pairs], [lefts[x] for x, _ in pairs]
        memory = emitter.add_scratch(sums, self.most * columns.size, "product")
        offset = (_ROW - _FIRST) * columns.size + emitter.axis_symbol(columns.axis) - columns.start
        emitter.kept[reduction] = (memory, sympy.expand(offset))
        target = Matrix(memory.name, sympy.Integer(0), columns.size, 1)
        if is_stored(rights[0]):
            weight, depth = self._matrix(rights[0], bound[0], columns), static_size(bound[0])
            emitter.inner.append(Dot(target, own[0], weight, rows, columns.length, depth, any_rows=True))
            return
        with self._each_row(order, _FIRST + 1):  # any row of the group chooses the matrix
            keep_scales(emitter, shared_by_groups(rights, bound[-1]), bound, columns, self.tiling.lanes)
            loop, values = computed_right(emitter, rights, sums, bound, columns, self.tiling.lanes)
            emitter.inner.append(ComputedDot(target, tuple(own), loop, values, rows, any_rows=True))

    def _matrix(self, right: IndexedExpr, k: Axis, columns: Block) -> Matrix:
        """Return a block of columns of the group's matrix in memory."""
        emitter, (matrix,) = self.emitter, right.bound
        name, offset = emitter.buffers[right.value].name, emitter.offset(right.index, right.value.tensor)
        starts = {matrix: _GROUP, k: 0, columns.axis: columns.start}
        return at(
            Matrix(name, offset, stride(right, k), stride(right, columns.axis)),
            {emitter.axis_symbol(axis): start for axis, start in starts.items()},
        )
