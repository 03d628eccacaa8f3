"""Schedule of attention: one pass over the keys in blocks, with online softmax.

Scores stay in the cache: one block of them between the two products. With many queries the lanes run along the
queries, so that the softmax needs no reduction across lanes; with few, as in decoding, along the keys. Queries are
read and results written along the head, which is contiguous in memory, where rows may be far apart.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import sympy

from fusec.codegen.cpp.schedules.blocked_attention import SHARE, BlockedAttention
from fusec.codegen.cpp.schedules.blocks import Block
from fusec.codegen.cpp.schedules.computed import computed_right, emit_rights
from fusec.codegen.cpp.schedules.gemm import LEAST_PAIRED
from fusec.codegen.tile.blocks import block_count, grid
from fusec.codegen.tile.emitter import Emitter, static_size
from fusec.codegen.tile.kernel import (
    Buffer,
    ColumnDot,
    ComputedDot,
    Constant,
    Dot,
    Loop,
    Matrix,
    Statement,
    Store,
    Update,
    index_symbol,
)
from fusec.codegen.tile.rows import Tiling
from fusec.ir.types import BF16, BOOL, F32, I64, DType, Size
from fusec.loops.affine import Axis
from fusec.loops.attention import FEW_QUERIES, Attention, Elements, has_rows, scale_behind
from fusec.loops.indexing import IndexedExpr, LoopNest, stride, walk
from fusec.loops.visible import Mask

_QUERIES = 64
_KEYS = 64
_KEYS_OF_FEW = 256
_MOST_UNPACKED = 8
"""The most queries beside which keys and values are unpacked in registers: for each of them once."""
_AHEAD = 32
"""Rows that are looked up ahead, as ``ListedRows`` (panel.h) prefetches them."""
_SHARED_KEYS = 512
"""The fewest keys of an iteration, where keys are split."""


def schedule_attention(emitter: Emitter, nest: LoopNest, attention: Attention, tiling: Tiling) -> tuple[Statement, ...]:
    """Return the body of a kernel for an attention region."""
    rows = math.prod(a.size if isinstance(a.size, int) else 2**30 for a in attention.queries)
    blocks: type[BlockedAttention] = _AlongKeys if rows <= FEW_QUERIES else _AlongQueries
    return blocks(emitter, nest, attention, tiling).run()


class _AlongQueries(BlockedAttention):
    """Lanes along the queries: scores and sums are transposed."""

    keys = _KEYS
    row_count = _QUERIES

    def __init__(self, emitter: Emitter, nest: LoopNest, attention: Attention, tiling: Tiling) -> None:
        super().__init__(emitter, nest, attention, tiling)
        self.lane = max(attention.queries, key=lambda a: a.size if isinstance(a.size, int) else math.inf)
        self.others = [a for a in attention.queries if a is not self.lane]
        self.outer = (*attention.batch, *self.others)
        self.block = f"{emitter.axis_name(self.lane)}_block"
        self.first = index_symbol(self.block) * _QUERIES
        size = self.lane.size
        whole = isinstance(size, int) and size % _QUERIES == 0
        self.stop = self.first + _QUERIES if whole else sympy.Min(self.first + _QUERIES, size)
        self.inner_range[emitter.axis_symbol(self.lane)] = (self.first, self.first + _QUERIES - 1)
        self.inside[self.lane] = (self.first, self.stop)
        self.current: tuple[Size, Size] = (self.first, self.stop)
        """The range of the queries that a block of keys is processed for."""
        self.count: Size = _QUERIES if whole else sympy.Min(_QUERIES, size - self.first)
        """The number of these queries."""

    def scratch(self, name: str, count: int, shares: int = 1, dtype: DType | None = None) -> str:
        return self.emitter.add_scratch(dtype or self.dtype, _QUERIES * count, name).name

    def row(self) -> sympy.Expr:
        return self.emitter.axis_symbol(self.lane) - self.first

    def place(self, count: int, position: sympy.Expr) -> sympy.Expr:
        return sympy.expand(position * _QUERIES + self.row())

    def rows(self) -> AbstractContextManager[None]:
        return self.emitter.loop(self.lane, "tile", self.tiling.lanes, *self.current)

    def seen(self, masks: list[Mask]) -> AbstractContextManager[None]:
        return self._of(*found) if (found := self._rows_that_see(masks)) else super().seen(masks)

    @contextmanager
    def left_out(self, masks: list[Mask]) -> Iterator[None]:
        """Open a loop over the queries before the range that has seen the block, and over those after it."""
        if (found := self._rows_that_see(masks)) is None:
            with super().left_out(masks):
                yield
            return
        (start, stop), side, finite = found, index_symbol("side"), self.finite(masks)
        before, after = (self.first, start), (sympy.Max(start, stop), self.stop)
        with ExitStack() as opened:
            if finite:
                opened.enter_context(self.emitter.when(finite))
            opened.enter_context(self.emitter.repeat(str(side), 0, 2, 1))
            opened.enter_context(self._of(*(a + side * (b - a) for a, b in zip(before, after, strict=True))))
            yield

    def _rows_that_see(self, masks: list[Mask]) -> tuple[sympy.Expr, sympy.Expr] | None:
        """Emit the range of the queries that see a key of the block, in whole vectors; None if masks are for all."""
        if not any(self.lane in mask.item.axes for mask in masks):
            return None
        emitter, lanes = self.emitter, self.tiling.lanes
        first, last = emitter.accumulator("min", I64), emitter.accumulator("max", I64)
        with self.one_by_one(self.inside):
            seen = emitter.accumulator("max", BOOL, True)
            self.update_seen(seen, masks)
            sees, row = emitter.fold("max", seen, BOOL), emitter.number(emitter.axis_symbol(self.lane))
            for op, end, none in (("min", first, emitter.number(self.stop)), ("max", last, Constant(-1))):
                emitter.inner.append(Update(end, op, (emitter.compute("where", sees, row, none, dtype=I64),)))
        start, stop = (emitter.bound(end, I64) for end in (first, last))
        return lanes * sympy.floor(start / lanes), lanes * sympy.floor((stop + lanes) / lanes)

    @contextmanager
    def _of(self, start: sympy.Expr, stop: sympy.Expr) -> Iterator[None]:
        """Open a conditional for a range of queries, which is not empty."""
        emitter = self.emitter
        begin, end = (emitter.number(place) for place in (start, stop))
        with emitter.when(emitter.compute("lt", begin, end, dtype=I64)):
            begin, end = (sympy.Symbol(name, integer=True) for name in (begin, end))
            before, start, stop = (self.current, self.count), sympy.Max(self.first, begin), sympy.Min(self.stop, end)
            self.current, self.count = (start, stop), stop - start
            yield
            self.current, self.count = before

    @contextmanager
    def cells(self, elements: Elements) -> Iterator[None]:
        with self.serial(elements.axes), self.rows():
            yield

    def block_keys(self) -> AbstractContextManager[None]:
        return self.emitter.loop(self.key_axis, "serial", 1, *self.block_keys_range())

    def folded(self, op: str, accumulator: str) -> str:
        return accumulator  # lanes are rows

    def score(self, queries: str) -> None:
        left, (scores, right) = self.matrix(self.key, self.parts.depth), map(self._queries, (self.scores, queries))
        self.emitter.inner.append(Dot(scores, left, right, self.key_count, self.count, self.depth))

    def weigh(self) -> None:
        left = _transposed(self.matrix(self.value, self.parts.columns))
        sums, weights = map(self._queries, (self.sums, self.weights))
        self.emitter.inner.append(Dot(sums, left, weights, self.columns, self.count, self.key_count, True))

    def _queries(self, buffer: str) -> Matrix:
        """Return a matrix in scratch, from the first of these queries on."""
        return replace(_rows(buffer, _QUERIES), offset=sympy.expand(self.current[0] - self.first))

    def grid(self) -> tuple[Statement, ...]:
        loops = [(self.emitter.axis_name(a), a.size) for a in self.outer]
        return grid(self.emitter.inner, [*loops, (self.block, block_count(self.lane.size, _QUERIES))])


class _AlongKeys(BlockedAttention):
    """Few queries: each block of keys and values is read once for all of them, with lanes along its rows."""

    keys = _KEYS_OF_FEW

    def __init__(self, emitter: Emitter, nest: LoopNest, attention: Attention, tiling: Tiling) -> None:
        super().__init__(emitter, nest, attention, tiling)
        # With so few queries, unpacking takes longer than the products.
        key, scale = scale_behind(attention.key, attention.depth)
        contiguous = self.is_in_place(key[0]) and has_rows(key[0], attention.depth.axes[-1], attention.keys[-1])
        if contiguous or self._are_looked_up(key, attention.depth):
            self.key, self.key_scale = key, scale
        value, scale = scale_behind(attention.value, attention.columns)
        contiguous = self.is_in_place(value[0]) and has_rows(value[0], attention.columns.axes[-1])
        if contiguous or self._are_looked_up(value, attention.columns):
            self.value, self.value_scale = value, scale
        self.outer = attention.batch
        self.row_count = math.prod(map(static_size, attention.queries))
        if self.is_unpacked(self.key, attention.depth) or self.is_unpacked(self.value, attention.columns):
            self.keys = _KEYS  # so that an unpacked block stays in the L1 cache
        self.shares = self._worthwhile_shares()
        ends = {emitter.axis_symbol(a): sympy.Integer(static_size(a) - 1) for a in attention.queries}
        self.inner_range = {place: (sympy.Integer(0), last) for place, last in ends.items()}
        self.inside = {axis: (0, axis.size) for axis in attention.queries}
        self.places: Buffer | None = None
        """Scratch for the places of a block of rows that are looked up."""

    def is_unpacked(self, items: tuple[IndexedExpr, ...], elements: Elements) -> bool:
        in_place = self._are_looked_up(items, elements) or self._are_computed(items)
        return super().is_unpacked(items, elements) and not in_place

    def _are_computed(self, items: tuple[IndexedExpr, ...]) -> bool:
        """Return whether products compute keys or values in registers: they are unpacked for few queries.

        There multiplication and addition are contracted, which is no error in float32, but is one of scales in float32
        where sums are float64.
        """
        in_order = all(item.dynamic_index is None for item in walk(items))
        return in_order and items[0].kind == "pointwise" and self.row_count <= _MOST_UNPACKED and self.dtype == F32

    @property
    def query_dtype(self) -> DType:
        """Type of the queries in scratch: bfloat16 where they are, and the machine multiplies pairs of it."""
        parts, computed = self.parts, self._are_computed(self.key)
        in_pairs = self.row_count >= LEAST_PAIRED if computed else self._are_contiguous(self.key, parts.depth)
        exact = not parts.factors and all(item.dtype == BF16 for item in (*parts.query, *self.key))
        return BF16 if self.tiling.bf16_products and in_pairs and exact else self.dtype

    @property
    def weight_dtype(self) -> DType:
        """Type of the weights in scratch: bfloat16 where the model rounds them, and pairs of values are multiplied."""
        rounded = all(item.dtype == BF16 for item in (self.parts.weights, *self.value))
        in_pairs = self.tiling.bf16_products and self._are_contiguous(self.value, self.parts.columns)
        return BF16 if rounded and in_pairs else self.dtype

    def _are_contiguous(self, items: tuple[IndexedExpr, ...], elements: Elements) -> bool:
        """Return whether products load keys or values as rows that are contiguous in memory."""
        return self._are_looked_up(items, elements) or (
            items[0].kind == "load" and has_rows(items[0], elements.axes[-1])
        )

    def _worthwhile_shares(self) -> int:
        """Return the number of key splits that occupies all cores equally; 1 if the batch suffices or is symbolic."""
        cores, keys, sizes = self.tiling.cores, self.key_axis.size, [a.size for a in self.outer]
        known = [n for n in sizes if isinstance(n, int)]
        iterations = math.prod(known)
        if len(known) < len(sizes) or iterations >= cores:
            return 1
        shares = cores // math.gcd(iterations, cores)
        return max(1, min(shares, keys // _SHARED_KEYS)) if isinstance(keys, int) else shares

    def scratch(self, name: str, count: int, shares: int = 1, dtype: DType | None = None) -> str:
        if shares == 1:
            return self.emitter.add_scratch(dtype or self.dtype, self.row_count * count, name).name
        everywhere = shares * math.prod(map(static_size, self.outer))
        return self.emitter.add_scratch(dtype or self.dtype, everywhere * self.row_count * count, name, "shared").name

    def row(self) -> sympy.Expr:
        place: sympy.Expr = sympy.Integer(0)
        for axis in self.parts.queries:
            place = place * static_size(axis) + self.emitter.axis_symbol(axis)
        return sympy.expand(place)

    def place(self, count: int, position: sympy.Expr) -> sympy.Expr:
        return sympy.expand(self.row() * count + position)

    def rows(self) -> AbstractContextManager[None]:
        return self.one_by_one(self.inside)

    def cells(self, elements: Elements) -> AbstractContextManager[None]:
        return self.elements(elements)

    def block_keys(self) -> AbstractContextManager[None]:
        return self.emitter.loop(self.key_axis, "tile", self.tiling.lanes, *self.block_keys_range())

    def folded(self, op: str, accumulator: str) -> str:
        return self.emitter.fold(op, accumulator, self.dtype)

    def score(self, queries: str) -> None:
        emitter, depth, target = self.emitter, self.parts.depth, _rows(self.scores, self.keys)
        left = _rows(queries, self.depth)
        if not self._are_computed(self.key):
            sizes, listed = (self.row_count, self.key_count, self.depth), self._list(self.key, depth)
            right = _transposed(self.matrix(self.key, depth))
            emitter.inner.append(Dot(target, left, right, *sizes, listed=listed))
            return
        lefts = _segments(left, depth.segments, self.depth)
        block = Block(self.key_axis, *self.block_keys_range(), self.keys)
        rows, keys = computed_right(emitter, self.key, self.dtype, depth.axes, block, self.tiling.lanes)
        emitter.inner.append(ComputedDot(target, lefts, rows, keys, self.row_count))

    def weigh(self) -> None:
        emitter, columns, left = self.emitter, self.parts.columns, _rows(self.weights, self.keys)
        target = Matrix(self.sums, self.slot(self.row_count * self.columns), self.columns, 1)
        if not self._are_computed(self.value):
            sizes, listed = (self.row_count, self.columns, self.key_count), self._list(self.value, columns)
            right = self.matrix(self.value, columns)
            emitter.inner.append(Dot(target, left, right, *sizes, adds=True, listed=listed))
            return
        *groups, last = columns.axes
        targets = _segments(target, columns.segments, self.columns)
        with self.serial(groups):
            place = self.position(Elements((*groups, last)), 0).subs(emitter.axis_symbol(last), 0)
            for value, segment in zip(self.value, targets, strict=True):
                rows, values = self._computed_values(value, last)
                sums = replace(segment, offset=sympy.expand(segment.offset + place))
                emitter.inner.append(ColumnDot(sums, (left,), rows, values, self.row_count, adds=True))

    def _computed_values(self, value: IndexedExpr, columns: Axis) -> tuple[Loop, tuple[str, ...]]:
        """Return the loops that compute values of the block, with lanes along the columns, and their tile."""
        emitter = self.emitter
        with (
            emitter.loop(columns, "tile", self.tiling.lanes),
            emitter.loop(self.key_axis, "serial", 1, *self.block_keys_range()),
        ):
            values = emit_rights(emitter, (value,), self.dtype)
        rows = emitter.inner.pop()
        assert isinstance(rows, Loop)
        return rows, values

    def matrix(self, items: tuple[IndexedExpr, ...], elements: Elements) -> Matrix:
        if not self._are_looked_up(items, elements):
            return super().matrix(items, elements)
        (item,) = items
        offset = self._first(item, (*item.bound, self.key_axis, *elements.axes))
        return Matrix(self.emitter.buffers[item.value].name, offset, self._step(item) or 0, 1)

    def _list(self, items: tuple[IndexedExpr, ...], elements: Elements) -> tuple[str, ...]:
        """Store the numbers of the block's rows, and of some to prefetch; return where, or () if none are looked up."""
        if not self._are_looked_up(items, elements):
            return ()
        (item,), emitter, keys = items, self.emitter, self.key_axis
        most, place = self.keys + _AHEAD, emitter.axis_symbol(keys) - self.first_key
        stop = sympy.Min(self.first_key + most, self.last_key)
        self.places = self.places or emitter.add_scratch(I64, most, "places")
        with emitter.loop(keys, "tile", self.tiling.lanes, self.first_key, stop):
            self.store(self.places.name, place, self._number(item, elements))
        with emitter.loop(keys, "tile", self.tiling.lanes, sympy.Max(self.first_key, stop), self.first_key + most):
            self.store(self.places.name, place, Constant(0))
        return (self.places.name,)

    def _number(self, item: IndexedExpr, elements: Elements) -> str:
        """Emit the number of a key's row: its distance from the first element of the tensor, in steps."""
        emitter, step, axes = self.emitter, self._step(item), (*item.bound, *elements.axes)
        assert item.dynamic_index is not None and step is not None
        in_order = sympy.expand((self._first(item, axes) - self._first(item, (*axes, self.key_axis))) / step)
        looked_up = sympy.expand(stride(item, item.bound[0]) / sympy.sympify(step))
        index = str(emitter.dynamic_index(item.dynamic_index))
        row = emitter.compute("mul", index, emitter.number(looked_up), dtype=I64)
        return emitter.compute("add", row, emitter.number(in_order), dtype=I64)

    def _first(self, item: IndexedExpr, axes: Iterable[Axis]) -> sympy.Expr:
        """Return the offset of an element where some axes start."""
        start = dict.fromkeys(map(self.emitter.axis_symbol, axes), 0)
        return sympy.expand(self.emitter.offset(item.index, item.value.tensor).subs(start))

    def _are_looked_up(self, items: tuple[IndexedExpr, ...], elements: Elements) -> bool:
        """Return whether keys or values are contiguous rows whose places an index has, as through a table of pages."""
        item, index = items[0], items[0].dynamic_index
        single = item.kind == "lookup" and len(elements.axes) == elements.segments == 1
        if not single or index is None or not index.value.axes.isdisjoint(elements.axes):
            return False
        return has_rows(item, *elements.axes) and self._step(item) is not None

    def _step(self, item: IndexedExpr) -> Size | None:
        """Return the distance of which those between rows that are looked up are multiples; None if it is unknown."""
        steps = [s for s in (stride(item, axis) for axis in (*item.bound, *self.parts.keys)) if s != 0]
        if len(steps) == 1:
            return steps[0]
        known = [s for s in steps if isinstance(s, int)]
        return math.gcd(*known) if known and len(known) == len(steps) else None

    def grid(self) -> tuple[Statement, ...]:
        loops: list[tuple[str, Size]] = [(self.emitter.axis_name(a), a.size) for a in self.outer]
        return grid(self.emitter.take(), [*loops, (str(SHARE), self.shares)] if self.shares > 1 else loops)

    def close(self) -> tuple[Statement, ...]:
        if self.shares == 1:
            return super().close()
        shared = self.grid()
        self._combine()
        self.share = sympy.Integer(0)
        self.finish()
        loops = [(self.emitter.axis_name(a), a.size) for a in self.outer]
        return (*shared, *grid(self.emitter.take(), loops, "serial"))

    def _combine(self) -> None:
        """Merge the results of all splits into the first, in order; there is too little work for threads."""
        emitter, first = self.emitter, sympy.Integer(0)
        with self.rows(), emitter.repeat(str(SHARE), 1, self.shares, 1):
            kept, other = self.load(self.largest, self.state(first)), self.load(self.largest, self.state())
            largest, factors = self.softmax.combine_maxima((kept, other))
            with self.along(self.parts.columns):
                for segment in self.segments:
                    self._add(self.sums, (self.sum(segment, first), self.sum(segment)), factors)
            self._add(self.total, (self.state(first), self.state()), factors)
            emitter.inner.append(Store(self.largest, self.state(first), largest))

    def _add(self, buffer: str, places: tuple[sympy.Expr, sympy.Expr], factors: list[str]) -> None:
        """Store ``a · fa + b · fb`` in place of ``a``, for two elements and their factors."""
        total = self.softmax.combine_sums((self.load(buffer, place) for place in places), factors)
        self.emitter.inner.append(Store(buffer, places[0], total))


def _segments(matrix: Matrix, count: int, length: int) -> tuple[Matrix, ...]:
    """Return the parts of rows of a length that segments of their elements are."""
    return tuple(replace(matrix, offset=sympy.expand(matrix.offset + i * (length // count))) for i in range(count))


def _rows(buffer: str, length: int) -> Matrix:
    return Matrix(buffer, sympy.Integer(0), length, 1)


def _transposed(matrix: Matrix) -> Matrix:
    return replace(matrix, row_stride=matrix.column_stride, column_stride=matrix.row_stride)
