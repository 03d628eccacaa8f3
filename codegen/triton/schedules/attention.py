"""Schedule of attention on tiles: one pass over the keys in blocks, with online softmax.

The queries of a program are the rows of a tile: a block of positions, or all positions where they are few, together
with those of the heads that share a key. Scores, maxima and sums stay in registers. Where there are too few heads to
keep enough keys in flight, the visible keys are split among several programs of each head, and a second grid combines
their results in a fixed order.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import sympy

from fusec.codegen.tile.blocks import block_count, block_range, grid
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.emitter import Emitter, static_size
from fusec.codegen.tile.kernel import Assign, DotTiles, Operand, Statement, index_symbol
from fusec.codegen.tile.online_softmax import OnlineSoftmax
from fusec.codegen.tile.visible_keys import VisibleKeys, shown_by_all
from fusec.codegen.triton.schedules.operands import MATRIX_ROWS, multiplied, power_of_two
from fusec.codegen.triton.schedules.partial_results import PartialResults
from fusec.ir.types import BOOL, DType, Size, accumulation, simplify
from fusec.loops.affine import Axis
from fusec.loops.attention import FEW_QUERIES, Attention, Elements
from fusec.loops.indexing import IndexedExpr, LoopNest
from fusec.loops.visible import loaded_masks

_PART, _COLUMN_BLOCK = index_symbol("part"), index_symbol("column_block")
_FOUND = 8192
"""The most elements of all parts' sums that one program combines: compilers load them all at once."""


def schedule_tiled_attention(
    emitter: Emitter, nest: LoopNest, attention: Attention, config: KernelConfig
) -> tuple[Statement, ...]:
    """Return the body of a kernel for an attention region."""
    return _TiledAttention(emitter, nest, attention, config).run()


class _TiledAttention:
    def __init__(self, emitter: Emitter, nest: LoopNest, attention: Attention, config: KernelConfig) -> None:
        self.emitter, self.nest, self.parts = emitter, nest, attention
        self.softmax = OnlineSoftmax(emitter, attention, "exp_of_weight")
        self.dtype = self.softmax.dtype
        self.depth, self.columns = (emitter.joint(x.axes) for x in (attention.depth, attention.columns))
        self.key_axis = emitter.joint(attention.keys)
        for axis in (*attention.batch, *attention.queries, self.columns, self.key_axis, self.depth):
            emitter.axis_name(axis)
        self.rows, self.keys, self.splits = config.rows, config.depth, config.splits
        self.few = attention.rows <= FEW_QUERIES
        self.lane = max(attention.queries, key=lambda a: a.size if isinstance(a.size, int) else math.inf, default=None)
        self.block = index_symbol("query_block")

    def run(self) -> tuple[Statement, ...]:
        """Return the statements of the kernel: one grid, or one for parts of the keys and one that combines them."""
        self.emitter.levels[0].axes = frozenset(self._outer())
        if self.splits == 1:
            with self._queries(), self._pass_over_keys():
                self._finish()
            return self._grid()
        with self._queries(), self._pass_over_keys():
            self._store_part()
        parts = self._grid((_PART.name, self.splits))
        # No product follows that would need rows: the fewer lanes, the more programs and parts at once.
        rows, columns = power_of_two(self.parts.rows), static_size(self.columns)
        width = min(power_of_two(columns), max(MATRIX_ROWS, _FOUND // (rows * self.splits)))
        tiles = self.emitter.tile(self.parts.columns.axes, width, *block_range(_COLUMN_BLOCK * width, width, columns))
        with self._queries(rows), tiles:
            self._combine_parts()
            self._finish()
        return (*parts, *self._grid((_COLUMN_BLOCK.name, -(-columns // width))))

    @contextmanager
    def _pass_over_keys(self) -> Iterator[None]:
        """Emit a pass over the keys; its maximum and sums are visible inside."""
        emitter, parts = self.emitter, self.parts
        with self._whole(parts.depth):
            query = [emitter.emit(item) for item in parts.query]
            with self._whole(parts.columns):
                self.largest, self.total, *self.sums = (
                    emitter.accumulator(op, self.dtype) for op in ("max", "sum", *["sum"] * parts.columns.segments)
                )
                blocks = emitter.loop(self.key_axis, "tile", self.keys, *self._own(*self._visible()))
                with emitter.over(parts.keys), blocks:
                    seen = self._seen()
                    with emitter.when(seen) if seen else nullcontext():
                        self._block(query)
                yield

    # Loops.

    def _outer(self) -> tuple[Axis, ...]:
        """Return the axes of the grid, without the block of queries, which is innermost."""
        return (*self.parts.batch, *(() if self.few else (a for a in self.parts.queries if a is not self.lane)))

    def _queries(self, rows: int | None = None) -> AbstractContextManager[None]:
        if not self.parts.queries:
            return nullcontext()
        if self.few:
            return self.emitter.tile(self.parts.queries, rows or self.rows)
        assert self.lane is not None
        return self.emitter.tile(
            (self.lane,), self.rows, *block_range(self.block * self.rows, self.rows, self.lane.size)
        )

    def _whole(self, elements: Elements) -> AbstractContextManager[None]:
        """Open one tile over a segment of the elements of a head."""
        length = elements.count // elements.segments
        return self.emitter.tile(elements.axes, max(MATRIX_ROWS, power_of_two(length)))

    def _grid(self, *inner: tuple[str, Size]) -> tuple[Statement, ...]:
        loops = [*((self.emitter.axis_name(a), a.size) for a in self._outer()), *inner]
        if not self.few:
            assert self.lane is not None
            loops.append((self.block.name, block_count(self.lane.size, self.rows)))
        return grid(self.emitter.take(), loops)

    def _visible(self) -> tuple[Size, Size]:
        """Return the range of the keys that any query of a program sees."""
        symbols = {axis: self.emitter.axis_symbol(axis) for axis in self.parts.queries}
        ranges: dict[sympy.Symbol, tuple[Size, Size]] = {}
        if self.few:
            ranges = {symbol: (0, static_size(axis) - 1) for axis, symbol in symbols.items()}
        elif self.lane is not None:
            first = self.block * self.rows
            ranges[symbols[self.lane]] = first, first + self.rows - 1
        return VisibleKeys(self.emitter, self.parts, ranges, self._at_run_time).range(self.keys)

    def _own(self, start: Size, stop: Size) -> tuple[Size, Size]:
        """Return the range of one part of the keys, in whole blocks."""
        if self.splits == 1:
            return start, stop
        span = simplify(sympy.ceiling((sympy.sympify(stop) - start) / (self.keys * self.splits)) * self.keys)
        first = sympy.Max(0, start + _PART * span)
        return first, sympy.Min(stop, first + span)

    def _at_run_time(self, item: IndexedExpr, op: str) -> sympy.Symbol:
        """Emit the greatest or least value of an integer over the queries of one program, for bounds of loops."""
        value = self.emitter.emit(item)
        inside = self.parts.queries if self.few else (self.lane,)
        if any(axis in item.axes for axis in inside):
            axis = self.emitter.joint(self.parts.queries) if self.few else self.lane
            value = self._folded(op, value, accumulation(item.dtype), axis)
        return self.emitter.bound(value, item.dtype)

    # Blocks of keys.

    def _seen(self) -> str | None:
        """Emit whether any of few queries sees any key of the block, according to the loaded mask; None for no test.

        With many queries the test would keep the chip from prefetching the next block.
        """
        emitter, parts = self.emitter, self.parts
        found = loaded_masks(parts.scores, parts.keys) if self.few else []
        masks = [mask for mask in found if mask.leaves_infinity]
        if not masks:
            return None
        seen = shown_by_all(emitter, masks, lowest=True)
        seen = self._folded("max", seen, BOOL)
        if any(axis in mask.item.axes for mask in masks for axis in parts.queries):
            seen = self._folded("max", seen, BOOL, emitter.joint(parts.queries))
        return seen

    def _block(self, query: list[Operand]) -> None:
        """Process one block of keys: scores, softmax, weighted values."""
        emitter, parts, softmax = self.emitter, self.parts, self.softmax
        product: Operand = emitter.accumulator("sum", self.dtype)
        for part, *operands in zip(query, parts.query, parts.key, strict=True):
            self._dot(product, part, self.depth, *operands)
        for scale, number in parts.factors:
            product = softmax.compute(scale, product, emitter.emit(number))
        emitter.define(parts.product, product)
        score = emitter.emit(parts.scores)
        largest, base = softmax.maximum((self.largest, self._folded("max", score)))
        factor = softmax.exponential(self.largest, base)
        weight = softmax.exponential(score, base)
        emitter.define(parts.exponential, weight)
        before = softmax.rescaled(self.total, factor)
        self._assign(self.total, softmax.compute("add", before, self._folded("sum", weight)))
        for sums, value in zip(self.sums, parts.value, strict=True):
            self._assign(sums, softmax.rescaled(sums, factor))
            self._dot(sums, weight, self.key_axis, parts.weights, value)
        self._assign(self.largest, largest)

    def _finish(self) -> None:
        """Divide the sums and store what follows."""
        softmax, sums, total = self.softmax, self.sums, self.total
        softmax.define_maxima(self.largest)
        if not self.parts.is_plain:
            factor = softmax.shift()
            total, *sums = (softmax.rescaled(x, factor) for x in (total, *sums))
        softmax.define_result(total, sums)
        for output in self.nest.outputs:
            self.emitter.store(output)

    # Parts of the keys.

    def _store_part(self) -> None:
        """Store the state for the next grid."""
        parts, splits = self.parts, self.splits
        rows = (*parts.batch, *parts.queries)
        axes = {"largest": rows, "total": rows}
        axes |= {f"sums{segment}": (*rows, *parts.columns.axes) for segment in range(len(self.sums))}
        self.found = [PartialResults(self.emitter, self.dtype, over, splits, name) for name, over in axes.items()]
        for part, value in zip(self.found, (self.largest, self.total, *self.sums), strict=True):
            part.store(_PART, value)

    def _combine_parts(self) -> None:
        """Combine the states of all parts, in a fixed order."""
        loaded = [[result.load(split) for result in self.found] for split in range(self.splits)]
        maxima, *sums = zip(*loaded, strict=True)
        self.largest, factors = self.softmax.combine_maxima(maxima)
        self.total, *self.sums = (self.softmax.combine_sums(parts, factors) for parts in sums)

    def _dot(self, acc: Operand, left: Operand, axis: Axis, first: IndexedExpr, second: IndexedExpr) -> None:
        """Add the product of a tile, which is ``first``, with ``second``."""
        right = self.emitter.emit(second)
        assert isinstance(acc, str) and isinstance(left, str) and isinstance(right, str)
        dtype = multiplied(first, second)
        self.emitter.inner.append(DotTiles(acc, left, right, self.emitter.axis_name(axis), dtype))

    def _folded(self, op: str, tile: Operand, dtype: DType | None = None, axis: Axis | None = None) -> str:
        """Reduce the lanes of a tile, by default along the keys and in the type of the sums."""
        assert isinstance(tile, str)
        return self.emitter.fold(op, tile, dtype or self.dtype, axis or self.key_axis)

    def _assign(self, acc: str, value: str) -> None:
        self.emitter.inner.append(Assign(acc, value))
