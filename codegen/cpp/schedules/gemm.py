"""Schedule of GEMMs. Small M: the weight is read once, at the speed of memory.

Each thread computes the left operand, with its prologue, into its own cache, then takes the next block of the
weight's rows: dot products with accumulators in registers, then the epilogue on the block. A weight that is computed,
such as one unpacked from integers, is computed in registers.

A large-M GEMM has no prologue; its rows are processed in blocks, each with a block of the weight that stays in cache.
"""

import math
from contextlib import ExitStack

import sympy

from fusec.codegen.cpp.schedules.blocks import Block, Left, at, even_blocks, most_rows
from fusec.codegen.cpp.schedules.column_lanes import column_dot, column_in_lanes
from fusec.codegen.cpp.schedules.computed import computed_right, looked_up_in_pairs, paired_right
from fusec.codegen.cpp.schedules.groups import keep_scales, shared_by_groups
from fusec.codegen.tile.blocks import block_range
from fusec.codegen.tile.emitter import Emitter, static_size
from fusec.codegen.tile.kernel import (
    PARTS,
    ComputedDot,
    Constant,
    Dot,
    GroupedDot,
    Loop,
    Matrix,
    Operand,
    Statement,
    index_symbol,
)
from fusec.codegen.tile.products import Products
from fusec.codegen.tile.rows import Rows, Tiling
from fusec.errors import ScheduleError
from fusec.ir.types import (
    BF16,
    F32,
    I8,
    I32,
    DType,
    Size,
    TensorType,
    accumulation,
    contiguous_strides,
    estimate,
    product,
    simplify,
)
from fusec.loops.affine import Affine, Axis
from fusec.loops.byte_groups import ByteGroups, find_byte_groups
from fusec.loops.indexing import IndexedExpr, LoopNest, Output, is_even, stride
from fusec.loops.kinds import FEW_ROWS, Shape, is_computed, weight_of

PANEL_TILES = 4
"""The most tiles of columns of a block: ``dot.h`` keeps them in the first-level cache, contiguous if transposed."""
BLOCK_OF_ROWS = 512
"""The most columns of a block of a computed weight whose rows are contiguous: as much as possible of each."""
LEAST_PACKED = {(16, F32): 2, (8, F32): 9, (16, BF16): FEW_ROWS + 1}
"""The fewest rows for which a frozen weight is prepacked transposed, by lanes of a register and type. With fewer,
it is memory-bound and the horizontal sums are cheap; few rows of bfloat16 are multiplied in pairs, which are
contiguous without prepacking."""
LEAST_PAIRED = 3
"""The fewest rows for which a computed weight is rounded to bfloat16 and multiplied in pairs: rounding takes time."""
LEAST_IN_BYTES = 128
"""The fewest elements of a group for which several rows are multiplied in bytes rather than in pairs of bfloat16, where
the machine has both: each group of each row has a scale to multiply by."""
_NEVER = 1 << 62
_QUAD_BYTES = 32
"""Bytes of a register of sums in groups: four in each of eight lanes."""
_PART = index_symbol("part")


def schedule_contraction(emitter: Emitter, nest: LoopNest, shape: Shape, tiling: Tiling) -> tuple[Statement, ...]:
    """Return the body of a kernel for a GEMM region.

    Raises:
        ScheduleError: for shapes it does not cover.
    """
    return _Contraction(emitter, nest, shape, tiling).run()


class _Contraction:
    def __init__(self, emitter: Emitter, nest: LoopNest, shape: Shape, tiling: Tiling) -> None:
        self.emitter, self.nest, self.shape, self.tiling = emitter, nest, shape, tiling
        self.most_columns = PANEL_TILES * tiling.lanes
        self.products = Products(nest, shape)
        self.rows = shape.rows
        self.joint: dict[tuple[Axis, ...], Axis] = {}
        self.blocked_rows = self._most_rows() if shape.many else ()
        """The axes of the rows that are processed in blocks, as one."""
        self.groups = {} if shape.many else {c: g for c in shape.contractions if (g := self._byte_groups(c))}
        """The products that are summed in bytes."""

    def _most_rows(self) -> tuple[Axis, ...]:
        """Return the longest axis of the rows, or adjacent ones that are one axis in the layout of all left operands.

        Where sizes are unknown it is the innermost, as sequences are longer than batches.
        """
        count = len(self.rows)
        runs = [self.rows[i:j] for i in range(count) for j in range(i + 1, count + 1)]
        even = [run for run in runs if all(is_even(c.operands[0], run) for c in self.shape.contractions)]
        return max(reversed(even), key=lambda run: estimate(product(tuple(axis.size for axis in run))))

    def _byte_groups(self, contraction: IndexedExpr) -> ByteGroups | None:
        """Return a product as sums of bytes, if whole registers fill a group and that is predicted to be fastest."""
        found, length = find_byte_groups(contraction), static_size(contraction.bound[-1])
        if found is None or length % _QUAD_BYTES or column_in_lanes(contraction) is not None:
            return None
        short = self._row_count(contraction) >= LEAST_PAIRED and length * len(found.rights) < LEAST_IN_BYTES
        return None if short and self.tiling.bf16_products and contraction.dtype == BF16 else found

    def _lefts(self, contraction: IndexedExpr) -> tuple[IndexedExpr, ...]:
        """Return the left operands of a product, as they are multiplied."""
        found = self.groups.get(contraction)
        return found.lefts if found else tuple(left for left, _ in contraction.pairs)

    def run(self) -> tuple[Statement, ...]:
        if not self.blocked_rows:
            return self._run()
        with self.emitter.over(self.blocked_rows):
            return self._run()

    def _run(self) -> tuple[Statement, ...]:
        lefts = self._prologue()
        if self.products.side:
            with self.emitter.repeat("once", _PART, 1, PARTS):
                self._rows(self.products.side)
        with ExitStack() as loops:
            rows = self._row_blocks(loops)
            for outer, results in self._sections().items():
                if all(len(self._columns(o)) == 1 for o in results):
                    self._blocks(outer, results, lefts, rows)
                    continue
                with self.emitter.loop(outer, "dynamic", stop=static_size(outer)):
                    self._block(results, lefts, None, rows)
        return (Loop("part", 0, PARTS, 1, "grid", tuple(self.emitter.inner)),)

    def _sections(self) -> dict[Axis, list[Output]]:
        """Return the outputs by their outermost column axis, which is split into blocks for the threads."""
        sections: dict[Axis, list[Output]] = {}
        for output in self.products.results:
            columns = self._columns(output)
            if not columns:
                raise ScheduleError("a contraction without columns")
            sections.setdefault(columns[0], []).append(output)
        return sections

    # Prologue.

    def _prologue(self) -> dict[IndexedExpr, Left]:
        lefts: dict[IndexedExpr, Left] = {}
        pending: list[Output] = []
        for contraction in self.shape.contractions:
            bound, dtype = contraction.bound, self._left_dtype(contraction)
            for left in dict.fromkeys(left for left in self._lefts(contraction) if left not in lefts):
                loaded = left.kind == "load" and left.dtype == dtype and self._is_dense(left, bound)
                if self.blocked_rows or loaded:
                    offset = self.emitter.offset(left.index, left.value.tensor)
                    if is_even(left, bound):
                        offset = self._joined(offset, bound)
                    else:
                        offset = offset.subs({self.emitter.axis_symbol(a): 0 for a in bound})
                    buffer, step = self.emitter.buffers[left.value].name, stride(left, bound[-1])
                    lefts[left] = Left(buffer, offset, self._row_stride(left), step)
                    continue
                output, lefts[left] = self._left_output(left, bound, dtype)
                pending.append(output)
        statistics = {
            r: self._scratch_output(r, self.rows, accumulation(r.dtype), "row") for r in self._shared_reductions()
        }
        if pending:
            self._rows([*pending, *(output for output, _ in statistics.values())])
        self.emitter.kept |= {r: (self.emitter.outputs[o.position], offset) for r, (o, offset) in statistics.items()}
        return lefts

    def _shared_reductions(self) -> list[IndexedExpr]:
        """Return the reductions of the prologue that the epilogue reads as well, such as the mean of a norm."""
        if not self.rows:
            return []  # a single row keeps them in scope
        return self.products.reductions((o.root for o in self.products.results), prologue=False)

    def _left_dtype(self, contraction: IndexedExpr) -> DType:
        """Return the type of the left operand in scratch: bfloat16 if the machine multiplies it, else that of sums."""
        if contraction in self.groups:
            return I8
        left, right = contraction.pairs[0]
        if not is_computed(contraction):
            paired = stride(right, contraction.bound[-1]) == 1
        elif self.blocked_rows:
            paired = False  # left operands of many rows are loaded as they are, and their number may be unknown
        else:
            paired = self._row_count(contraction) >= LEAST_PAIRED or looked_up_in_pairs(contraction)
            paired = paired and column_in_lanes(contraction) is None
        multiplied = self.tiling.many_bf16_products if self.blocked_rows else self.tiling.bf16_products
        if multiplied and paired and left.dtype == right.dtype == BF16:
            return BF16
        return accumulation(left.dtype)

    def _left_output(self, left: IndexedExpr, bound: tuple[Axis, ...], dtype: DType) -> tuple[Output, Left]:
        """Return the left operand as an additional output: a matrix in scratch with contiguous contracted axes."""
        output, offset = self._scratch_output(left, (*self._rows_of(left), *bound), dtype, "left")
        row_stride = math.prod(static_size(a) for a in bound)
        return output, Left(self.emitter.outputs[output.position].name, self._joined(offset, bound), row_stride)

    def _scratch_output(
        self, item: IndexedExpr, axes: tuple[Axis, ...], dtype: DType, hint: str
    ) -> tuple[Output, sympy.Expr]:
        """Return a value as an additional output, an array in scratch over these axes, and the offset of an element."""
        sizes = tuple(static_size(a) for a in axes)
        type = TensorType(dtype, sizes, contiguous_strides(sizes))
        self.emitter.outputs.append(self.emitter.add_scratch(type.dtype, type.numel, hint))
        self.emitter.output_types.append(type)
        index = tuple(Affine.of([(a, 1)]) for a in axes)
        return Output(len(self.emitter.outputs) - 1, item, index), self.emitter.offset(index, type)

    def _row_stride(self, left: IndexedExpr) -> Size:
        """Return the stride of the rows."""
        return stride(left, (self.blocked_rows or self.rows)[-1]) if self.rows else 0

    def _is_dense(self, left: IndexedExpr, bound: tuple[Axis, ...]) -> bool:
        """Return whether a loaded left operand is a matrix in memory: one row stride, and contiguous rows."""
        return is_even(left, self.rows) and is_even(left, bound) and stride(left, bound[-1]) == 1

    def _joined(self, offset: sympy.Expr, bound: tuple[Axis, ...]) -> sympy.Expr:
        """Return an offset over contiguous contracted axes as one over a single axis."""
        if len(bound) == 1:
            return offset
        inner, k = self.emitter.axis_symbol(bound[-1]), self.emitter.axis_symbol(self._k(bound))
        return offset.subs({self.emitter.axis_symbol(a): 0 for a in bound[:-1]}).subs(inner, k)

    def _k(self, bound: tuple[Axis, ...]) -> Axis:
        """Return the contracted axes as one."""
        if len(bound) == 1:
            return bound[0]
        return self.joint.setdefault(bound, Axis(math.prod(map(static_size, bound)), "k"))

    def _rows(self, outputs: list[Output]) -> None:
        """Compute outputs row by row, with the reductions they need."""
        kept, self.emitter.kept = self.emitter.kept, {}
        needed = self.products.reductions(o.root for o in outputs)
        axes = tuple(tuple(a for a in dim) for dim in self.nest.axes)
        columns = dict.fromkeys(a for o in outputs for part in o.index for a in part.axes if a not in self.rows)
        nest = LoopNest(outputs, (*axes, tuple(a for a in columns if not any(a in dim for dim in axes))))
        with ExitStack() as loops:
            for axis in self.rows:
                loops.enter_context(self.emitter.loop(axis, "serial"))
            shape = Shape("row", self.rows, reductions=tuple(needed))
            Rows(self.emitter, nest, shape, self.tiling).fill()
        self.emitter.kept = kept

    # Blocks of columns.

    def _columns(self, output: Output) -> tuple[Axis, ...]:
        """Return the axes of an output's columns, ordered by their stride in the weight, largest first."""
        axes = [a for dim in self.nest.axes for a in dim if a in output.axes and a not in self.rows]
        return tuple(self._by_stride(axes, self.products.of([output])))

    def _by_stride(self, axes: list[Axis], products: list[IndexedExpr]) -> list[Axis]:
        """Sort axes by their stride in the weights of products, largest first."""
        return sorted(axes, key=lambda a: max(estimate(stride(weight_of(c), a)) for c in products), reverse=True)

    def _row_blocks(self, loops: ExitStack) -> Block | None:
        """Open loops over blocks of rows and return the block; None where all rows are processed at once."""
        if not self.blocked_rows:
            return None
        for axis in self.rows:
            if axis not in self.blocked_rows:
                loops.enter_context(self.emitter.loop(axis, "serial"))
        joint = self.emitter.joint(self.blocked_rows)
        n, most = joint.size, self._most_in_block()
        size = even_blocks(n, most, self.tiling.tile_rows) if isinstance(n, int) else most
        start, stop = block_range(index_symbol("rows") * size, size, n)
        loops.enter_context(self.emitter.repeat("rows", 0, simplify(sympy.ceiling(sympy.sympify(n) / size)), 1))
        return Block(joint, start, stop, size)

    def _most_in_block(self) -> int:
        """Return the rows of a block, which transposes the weight again and rereads its rows per block of columns."""
        products = self.shape.contractions
        read = max(c.operands[0].dtype.bytes * static_size(self._k(c.bound)) for c in products)
        summed = sum(accumulation(c.dtype).bytes * self.most_columns for c in products)
        return most_rows(read + summed, self.tiling)

    def _blocks(self, axis: Axis, results: list[Output], lefts: dict[IndexedExpr, Left], rows: Block | None) -> None:
        """Emit the loop over blocks of the only column axis."""
        n = static_size(axis)
        size = max(8, min(self.most_columns, n // 64 * 8))
        weights = ((weight_of(c), c.bound[-1]) for c in self.products.of(results))
        if any(stride(weight, axis) == 1 and stride(weight, bound) != 1 for weight, bound in weights):
            size = max(size, 4 * self.tiling.lanes)
        if any(column_in_lanes(c) is axis for c in self.products.of(results)):
            size = min(BLOCK_OF_ROWS, max(size, n // 32 * 8))
        start, stop = block_range(index_symbol("block") * size, size, n)
        with self.emitter.repeat("block", 0, -(-n // size), 1, "dynamic"):
            self._block(results, lefts, Block(axis, start, stop, size), rows)

    def _block(
        self, results: list[Output], lefts: dict[IndexedExpr, Left], columns: Block | None, rows: Block | None
    ) -> None:
        """Emit the products of one block, then its outputs."""
        for contraction in self.products.of(results):
            self._dots(contraction, [lefts[left] for left in self._lefts(contraction)], columns, rows)
        self._epilogue(results, columns, rows)

    def _epilogue(self, results: list[Output], columns: Block | None, block: Block | None) -> None:
        rows = Rows(self.emitter, self.nest, Shape("pointwise", ()), self.tiling)
        with ExitStack() as loops:
            for axis in self.rows if block is None else ():
                loops.enter_context(self.emitter.loop(axis, "serial"))
            if block is not None:
                loops.enter_context(self.emitter.loop(block.axis, "serial", 1, block.start, block.stop))
            if columns is None:
                rows.stores(results)
                return
            with self.emitter.loop(columns.axis, "tile", self.tiling.lanes, columns.start, columns.stop):
                for output in results:
                    self.emitter.store(output)

    # Dot products.

    def _dots(self, contraction: IndexedExpr, lefts: list[Left], columns: Block | None, block: Block | None) -> None:
        """Compute one product of the block in scratch, where the epilogue reads it."""
        emitter, opened = self.emitter, {*self.rows, *self.emitter.levels[-1].axes}
        inner = [a for dim in self.nest.axes for a in dim if a in contraction.axes and a not in opened]
        inner = self._by_stride(inner, [contraction])
        if not inner:
            raise ScheduleError("a contraction with a single column in each block")
        axis = inner[-1]
        columns = columns or Block(axis, 0, axis.size, static_size(axis))
        own = self._rows_of(contraction.operands[0])
        rows = {a: static_size(a) for a in own} if block is None else {block.axis: block.size}
        sizes = (*rows.values(), *map(static_size, inner[:-1]), columns.size)
        steps = zip((*rows, *inner), contiguous_strides(sizes), strict=True)
        offset = sum((emitter.axis_symbol(a) * step for a, step in steps), sympy.Integer(0))
        row_stride = math.prod(sizes[len(rows) :])
        for cut, step in ((columns, 1), (block, row_stride)):
            offset = sympy.expand(offset - cut.start * step) if cut else offset
        target = emitter.add_scratch(accumulation(contraction.dtype), math.prod(sizes), "product")
        emitter.kept[contraction] = (target, offset)
        with ExitStack() as loops:
            for a in inner[:-1]:
                loops.enter_context(emitter.loop(a, "serial"))
            result = Matrix(target.name, offset, row_stride, 1)
            if block is None and column_in_lanes(contraction) is columns.axis:
                first = {emitter.axis_symbol(a): 0 for a in (*self.rows, self._k(contraction.bound))}
                matrices = [at(Matrix(m.buffer, m.offset, m.row_stride, m.column_stride), first) for m in lefts]
                starts = self._starts(contraction.bound, columns, None)
                lanes, count = self.tiling.lanes, self._row_count(contraction)
                emitter.inner.append(
                    column_dot(emitter, contraction, matrices, at(result, starts), count, columns, lanes)
                )
                return
            if block is None and is_computed(contraction):
                groups = self.groups.get(contraction)
                rights = [right for _, right in contraction.pairs]
                shared = groups.rights[0].scales if groups else shared_by_groups(rights, contraction.bound[-1])
                keep_scales(emitter, shared, contraction.bound, columns, self.tiling.lanes)
            if contraction in self.groups:
                emitter.inner.append(self._grouped_dot(self.groups[contraction], contraction, lefts, result, columns))
            elif is_computed(contraction):
                emitter.inner.append(self._computed_dot(contraction, lefts, result, columns, block))
            else:
                emitter.inner.append(self._dot(contraction, lefts[0], result, columns, block))

    def _dot(self, contraction: IndexedExpr, left: Left, target: Matrix, columns: Block, block: Block | None) -> Dot:
        """Return the product itself, which begins at the first row and column of the block."""
        emitter, right, bound = self.emitter, contraction.operands[1], contraction.bound
        k, n = self._k(bound), columns.axis
        count = block.size if block else self._row_count(contraction)
        least = LEAST_PACKED.get((self.tiling.lanes, right.dtype), _NEVER)
        packs = count >= least and self._packs(contraction, left, n, columns.size)
        emitter.packed.setdefault(right.value, set()).add(columns.size if packs else 0)
        weight = self._joined(emitter.offset(right.index, right.value.tensor), bound)
        starts = self._starts(bound, columns, block)
        rights = Matrix(emitter.buffers[right.value].name, weight, stride(right, bound[-1]), stride(right, n))
        return Dot(
            at(target, starts),
            at(Matrix(left.buffer, left.offset, left.row_stride, left.column_stride), starts),
            at(rights, starts),
            block.length if block else count,
            columns.length,
            static_size(k),
        )

    def _computed_dot(
        self,
        contraction: IndexedExpr,
        lefts: list[Left],
        target: Matrix,
        columns: Block,
        block: Block | None,
    ) -> ComputedDot:
        """Return the product with a right operand that is computed."""
        bound, rights = contraction.bound, [right for _, right in contraction.pairs]
        paired = self._left_dtype(contraction) == BF16 and looked_up_in_pairs(contraction)
        if paired:
            right, values = paired_right(self.emitter, rights, bound, columns)
        else:
            sums = accumulation(contraction.dtype)
            right, values = computed_right(self.emitter, rights, sums, bound, columns, self.tiling.lanes)
        offsets = self._steps(contraction) if self.blocked_rows else ()
        starts = self._starts(bound, columns, block)
        matrices = (Matrix(left.buffer, left.offset, left.row_stride, left.column_stride) for left in lefts)
        return ComputedDot(
            at(target, starts),
            tuple(at(matrix, starts) for matrix in matrices),
            right,
            values,
            block.length if block else self._row_count(contraction),
            offsets,
            paired=paired,
        )

    def _grouped_dot(
        self, groups: ByteGroups, contraction: IndexedExpr, lefts: list[Left], target: Matrix, columns: Block
    ) -> GroupedDot:
        """Return the product of bytes, of few rows."""
        emitter, (*outer, inner), first = self.emitter, contraction.bound, groups.rights[0]
        with ExitStack() as loops:
            loops.enter_context(emitter.loop(columns.axis, "serial", 1, columns.start, columns.stop))
            if outer:
                loops.enter_context(emitter.loop(loops.enter_context(emitter.over(tuple(outer))), "serial"))
            scale = emitter.compute("cast", emitter.emit(first.scales[0]), dtype=F32)
            for factor in first.scales[1:]:
                scale = emitter.compute("mul", scale, emitter.emit(factor), dtype=F32)
            number: Operand = Constant(first.zero) if isinstance(first.zero, int) else emitter.emit(first.zero)
            zero = emitter.compute("cast", number, dtype=I32)
            loops.enter_context(emitter.loop(inner, "tile", _QUAD_BYTES))
            values = tuple(str(emitter.emit(right.codes)) for right in groups.rights)
        right, starts = emitter.inner.pop(), self._starts(contraction.bound, columns, None)
        assert isinstance(right, Loop)
        matrices = tuple(at(Matrix(left.buffer, left.offset, left.row_stride, 1), starts) for left in lefts)
        low, high = zip(*(codes.range for codes in groups.rights), strict=True)
        bounds, rows = (min(low), max(high)), self._row_count(contraction)
        count = 8 * rows * math.prod(map(static_size, outer))
        totals = emitter.add_scratch(I32, count, "totals").name
        return GroupedDot(
            at(target, starts), matrices, right, values, rows, scale=scale, zero=zero, bounds=bounds, totals=totals
        )

    def _steps(self, contraction: IndexedExpr) -> tuple[sympy.Expr, ...]:
        """Return the distance of each left operand's elements at an outer step of k from those at the first.

        None where rows follow one another, as they do in scratch.
        """
        emitter, (*outer, inner) = self.emitter, contraction.bound
        lefts = [left for left, _ in contraction.pairs]
        if all(is_even(left, contraction.bound) for left in lefts):
            return ()
        symbols = [emitter.axis_symbol(a) for a in (inner, *self.rows, emitter.joint(self.blocked_rows))]
        with emitter.over(tuple(outer)) as steps:
            offsets = [emitter.offset(left.index, left.value.tensor).subs(dict.fromkeys(symbols, 0)) for left in lefts]
            first = {emitter.axis_symbol(steps): 0}
            return tuple(sympy.expand(offset - offset.subs(first)) for offset in offsets)

    def _starts(self, bound: tuple[Axis, ...], columns: Block, block: Block | None) -> dict[sympy.Symbol, Size]:
        """Return the first index of a product's block along each of its axes."""
        starts: dict[Axis, Size] = dict.fromkeys((self._k(bound), *(() if block else self.rows)), 0)
        starts |= {cut.axis: cut.start for cut in (columns, block) if cut}
        return {self.emitter.axis_symbol(axis): start for axis, start in starts.items()}

    def _rows_of(self, left: IndexedExpr) -> tuple[Axis, ...]:
        """Return the rows of a left operand: all, or none for a single one whose products are the same for all."""
        return self.rows if left.axes.intersection(self.rows) else ()

    def _row_count(self, contraction: IndexedExpr) -> int:
        return math.prod(map(static_size, self._rows_of(contraction.operands[0])))

    def _packs(self, contraction: IndexedExpr, left: Left, n: Axis, width: int) -> bool:
        """Return whether the weight, if frozen, may be prepacked in transposed blocks of so many rows."""
        right, bound = contraction.operands[1], contraction.bound
        type, k = right.value.tensor, static_size(self._k(bound))
        if not right.value.frozen or type.rank != 2 or not type.is_contiguous or not 0 < k == type.shape[1]:
            return False
        if left.column_stride != 1:
            return False
        summed = zip(bound, contiguous_strides(tuple(map(static_size, bound))), strict=True)
        if right.index[1] != Affine.of(summed) or self._left_dtype(contraction) != right.dtype:
            return False
        if right.dtype == BF16 and (k % 2 or not isinstance(left.row_stride, int) or left.row_stride % 2):
            return False  # pairs along k need even sizes
        rows, total = right.index[0], type.shape[0]
        if rows == Affine.of([(n, 1)]) and n.size == total:
            return True  # the last block may be shorter
        steps = (rows.offset, *(step for axis, step in rows.terms if axis is not n))
        whole = rows.coefficient(n) == 1 and static_size(n) % width == 0
        return whole and all(isinstance(step, int) and step % width == 0 for step in (*steps, total))
