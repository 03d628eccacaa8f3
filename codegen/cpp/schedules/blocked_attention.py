"""Attention over blocks of keys: the steps that both schedules share, whichever axis the lanes run along."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import sympy

from fusec.codegen.tile.blocks import block_range
from fusec.codegen.tile.emitter import Emitter, static_size
from fusec.codegen.tile.kernel import Buffer, Constant, Matrix, Operand, Statement, Store, Update, index_symbol
from fusec.codegen.tile.online_softmax import LOWEST, OnlineSoftmax
from fusec.codegen.tile.rows import Tiling
from fusec.codegen.tile.visible_keys import VisibleKeys, shown_by_all
from fusec.ir.types import BOOL, DType, Size, accumulation
from fusec.loops.affine import Axis
from fusec.loops.attention import Attention, Elements, is_in_place
from fusec.loops.indexing import IndexedExpr, LoopNest, stride
from fusec.loops.visible import Mask, loaded_masks

SHARE = index_symbol("share")
"""Split index, from 0 to the number of splits - 1."""


class BlockedAttention(ABC):
    """The steps; a subclass defines the layout of scratch and the loops."""

    keys: int
    """Keys in a block."""
    row_count: int
    """Queries that the scratch of an iteration holds."""
    outer: tuple[Axis, ...]
    """Axes of the grid."""
    share: sympy.Expr = SHARE
    """Index of the current split."""
    shares: int = 1
    """Number of key splits; their results are merged at the end."""

    @abstractmethod
    def scratch(self, name: str, count: int, shares: int = 1, dtype: DType | None = None) -> str:
        """Add memory for ``count`` elements of each query; visible to all iterations if keys are split."""

    @abstractmethod
    def row(self) -> sympy.Expr:
        """Return the offset of a query."""

    @abstractmethod
    def place(self, count: int, position: sympy.Expr) -> sympy.Expr:
        """Return the offset of one of the ``count`` elements of a query."""

    @abstractmethod
    def rows(self) -> AbstractContextManager[None]:
        """Loop over the queries."""

    @abstractmethod
    def cells(self, elements: Elements) -> AbstractContextManager[None]:
        """Loop over the queries and the elements of one segment."""

    @contextmanager
    def elements(self, elements: Elements) -> Iterator[None]:
        """Loop over the queries and the elements of one segment, with lanes along the last axis."""
        with self.one_by_one(self.inside), self.along(elements):
            yield

    @contextmanager
    def along(self, elements: Elements) -> Iterator[None]:
        """Loop over the elements of one segment, with lanes along the last axis."""
        *outer, last = elements.axes
        with self.serial(outer), self.emitter.loop(last, "tile", self.tiling.lanes):
            yield

    @contextmanager
    def serial(self, axes: Iterable[Axis]) -> Iterator[None]:
        """Loop over axes one by one, without lanes."""
        with ExitStack() as loops:
            for axis in axes:
                loops.enter_context(self.emitter.loop(axis, "serial"))
            yield

    def position(self, elements: Elements, segment: int) -> sympy.Expr:
        """Return the number of an element: those of a segment are in order, one segment after another."""
        position: sympy.Expr = sympy.Integer(segment)
        for axis in elements.axes:
            position = position * static_size(axis) + self.emitter.axis_symbol(axis)
        return sympy.expand(position)

    @contextmanager
    def one_by_one(self, axes: Iterable[Axis]) -> Iterator[None]:
        """Loop over some of the queries' axes, without lanes."""
        with ExitStack() as loops:
            for axis in axes:
                loops.enter_context(self.emitter.loop(axis, "serial", 1, *self.inside[axis]))
            yield

    @abstractmethod
    def block_keys(self) -> AbstractContextManager[None]:
        """Loop over the keys of this block."""

    @abstractmethod
    def folded(self, op: str, accumulator: str) -> str:
        """Return the result of a row, given the accumulator of the loop over its keys."""

    @abstractmethod
    def score(self, queries: str) -> None:
        """Emit the product of the queries with the keys of the block."""

    @abstractmethod
    def weigh(self) -> None:
        """Emit the product of the block's weights with its values, added to the sums."""

    @abstractmethod
    def grid(self) -> tuple[Statement, ...]:
        """Return the statements so far inside the loops of the grid."""

    def __init__(self, emitter: Emitter, nest: LoopNest, attention: Attention, tiling: Tiling) -> None:
        self.emitter, self.nest, self.parts, self.tiling = emitter, nest, attention, tiling
        self.softmax, self.load = OnlineSoftmax(emitter, attention), emitter.load
        self.dtype = self.softmax.dtype
        self.depth, self.columns = attention.depth.count, attention.columns.count
        self.key, self.value = attention.key, attention.value
        self.key_scale: IndexedExpr | None = None
        """Multiplies the products with the keys, where the keys are read without it."""
        self.value_scale: IndexedExpr | None = None
        heads, columns = (*attention.batch, *attention.queries), attention.columns.axes
        self.key_axis = emitter.joint(attention.keys)
        for axis in (*heads, *columns, self.key_axis, *attention.depth.axes):
            emitter.axis_name(axis)
        self.inner_range: dict[sympy.Symbol, tuple[Size, Size]] = {}
        """First and last value of the queries' axes that loop inside an iteration of the grid."""
        self.inside: dict[Axis, tuple[Size, Size]] = {}
        """Start and stop of those axes."""
        self.first_key = index_symbol("key_block")
        self.last_key: sympy.Expr = sympy.sympify(self.key_axis.size)
        """End of the keys that any query of an iteration can see."""

    def is_in_place(self, item: IndexedExpr) -> bool:
        """Return whether products read keys or values from where they are, rather than from scratch."""
        return is_in_place(item, self.parts.keys)

    @property
    def query_dtype(self) -> DType:
        """Type of the queries in scratch."""
        return self.dtype

    @property
    def weight_dtype(self) -> DType:
        """Type of a block's weights in scratch."""
        return self.dtype

    def is_unpacked(self, items: tuple[IndexedExpr, ...], elements: Elements) -> bool:
        """Return whether blocks of keys or values are stored as rows in scratch first."""
        return not self.is_in_place(items[0])

    def slot(self, size: int, share: sympy.Expr | None = None) -> sympy.Expr:
        """Return the offset of ``size`` elements of one share, by default the current one, in memory of all shares."""
        place: sympy.Expr = sympy.Integer(0)
        if self.shares > 1:
            for axis in self.outer:
                place = place * static_size(axis) + self.emitter.axis_symbol(axis)
            place = place * self.shares + (self.share if share is None else share)
        return sympy.expand(place * size)

    def state(self, share: sympy.Expr | None = None) -> sympy.Expr:
        """Return the offset of a query's maximum and of its sum of exponentials."""
        return sympy.expand(self.row() + self.slot(self.row_count, share))

    def sum(self, segment: int, share: sympy.Expr | None = None) -> sympy.Expr:
        """Return the offset of an element of a query's sum of values."""
        place = self.place(self.columns, self.position(self.parts.columns, segment))
        return sympy.expand(place + self.slot(self.row_count * self.columns, share))

    @property
    def segments(self) -> range:
        """The segments of the columns."""
        return range(self.parts.columns.segments)

    def run(self) -> tuple[Statement, ...]:
        """Return the statements of the kernel."""
        emitter = self.emitter
        emitter.levels[0].axes = frozenset(self.outer)
        queries = self.scratch("query", self.depth, dtype=self.query_dtype)
        self.scores = self.weights = self.scratch("scores", self.keys)
        if self.weight_dtype != self.dtype:
            self.weights = self.scratch("weights", self.keys, dtype=self.weight_dtype)
        self.sums = self.scratch("sums", self.columns, self.shares)
        self.largest, self.total = (self.scratch(n, 1, self.shares) for n in ("largest", "total"))
        self.factor = self.scratch("factor", 1)
        if self.is_unpacked(self.key, self.parts.depth) or self.is_unpacked(self.value, self.parts.columns):
            size = self.keys * max(self.depth, self.columns)
            self.unpacked = emitter.add_scratch(self.dtype, size, "unpacked").name
        self._start(queries)
        start, stop = VisibleKeys(emitter, self.parts, self.inner_range, self._at_run_time).range(self.keys)
        self.last_key = stop
        first = start if self.shares == 1 else start + SHARE * self.keys
        masks = loaded_masks(self.parts.scores, self.parts.keys)
        self._visit(queries, first, lambda: self.seen(masks) if masks else nullcontext())
        if any(mask.least != -math.inf for mask in masks):
            # Where no key of a row is shown, those with the lowest number for a score count.
            with emitter.when(self._sees_nothing(max(mask.least for mask in masks))):
                self._visit(queries, first, lambda: self.left_out(masks))
        return self.close()

    def _visit(self, queries: str, first: Size, part: Callable[[], AbstractContextManager[None]]) -> None:
        """Emit a loop over the blocks of keys, and process a part of each."""
        emitter = self.emitter
        blocks = emitter.repeat(str(self.first_key), first, self.last_key, self.shares * self.keys)
        with emitter.over(self.parts.keys), blocks, part():
            self._block(queries)

    def _start(self, queries: str) -> None:
        """Copy the queries, scaled, and fill in the state before any key."""
        emitter, parts = self.emitter, self.parts
        with self.elements(parts.depth):
            for segment, item in enumerate(parts.query):
                query = emitter.emit(item)
                for scale, factor in parts.factors:
                    query = self.softmax.compute(scale, query, emitter.emit(factor))
                self.store(queries, self.place(self.depth, self.position(parts.depth, segment)), query)
        with self.cells(parts.columns):
            for segment in self.segments:
                self.store(self.sums, self.sum(segment), Constant(0.0))
        with self.rows():
            self.store(self.largest, self.state(), LOWEST)
            self.store(self.total, self.state(), Constant(0.0))

    def close(self) -> tuple[Statement, ...]:
        """Finish an iteration and return the statements inside the loops around it."""
        self.finish()
        return self.grid()

    def finish(self) -> None:
        """Divide the sums after the last block of keys, and store what follows."""
        if not self.parts.is_plain:
            self._shift()
        with self.elements(self.parts.columns):
            self.softmax.define_maxima(self.load(self.largest, self.state()))
            total = None if self.parts.total is None else self.load(self.total, self.state())
            self.softmax.define_result(total, [self.load(self.sums, self.sum(s)) for s in self.segments])
            for output in self.nest.outputs:
                self.emitter.store(output)

    def _block(self, queries: str) -> None:
        """Process one block of keys: scores, softmax, weighted values."""
        parts = self.parts
        self._unpack(self.key, parts.depth)
        self.score(queries)
        with self.rows():
            self._softmax()
        self._rescale_sums()
        self._unpack(self.value, parts.columns)
        self.weigh()

    def _unpack(self, items: tuple[IndexedExpr, ...], elements: Elements) -> None:
        """Store the block of keys or values, where they are computed, as rows in scratch."""
        if not self.is_unpacked(items, elements):
            return
        emitter, keys = self.emitter, self.key_axis
        row = (emitter.axis_symbol(keys) - self.first_key) * elements.count
        with emitter.loop(keys, "serial", 1, *self.block_keys_range()), self.along(elements):
            for segment, item in enumerate(items):
                place = sympy.expand(row + self.position(elements, segment))
                self.store(self.unpacked, place, emitter.emit(item))

    def seen(self, masks: list[Mask]) -> AbstractContextManager[None]:
        """Open a conditional: some query sees a key of the block."""
        return self.emitter.when(self.sees_any(masks))

    def left_out(self, masks: list[Mask]) -> AbstractContextManager[None]:
        """Open a conditional: a block was left out although not all its scores are -inf."""
        hidden = self.emitter.compute("not", self.sees_any(masks), dtype=BOOL)
        finite = self.finite(masks)
        return self.emitter.when(self.emitter.compute("and", hidden, finite, dtype=BOOL) if finite else hidden)

    def finite(self, masks: list[Mask]) -> str | None:
        """Emit whether not all scores of a block are -inf; None if that is not known from a mask."""
        infinite = [mask for mask in masks if mask.leaves_infinity]
        return self.sees_any(infinite, True) if infinite else None

    def sees_any(self, masks: list[Mask], lowest: bool = False) -> str:
        """Emit whether any query here sees any key of the block; ``lowest`` as for ``shown_by_all``."""
        emitter = self.emitter
        seen = emitter.accumulator("max", BOOL, True)
        axes = [a for a in self.inside if any(a in m.item.axes for m in masks)]
        with self.one_by_one(axes):
            self.update_seen(seen, masks, lowest)
        return emitter.fold("max", seen, BOOL)

    def update_seen(self, seen: str, masks: list[Mask], lowest: bool = False) -> None:
        """Emit the loop over the keys of the block that finds those that a query sees."""
        emitter = self.emitter
        with emitter.loop(self.key_axis, "tile", self.tiling.lanes, *self.block_keys_range()):
            emitter.inner.append(Update(seen, "max", (shown_by_all(emitter, masks, lowest),)))

    def _sees_nothing(self, least: float) -> str:
        """Emit whether a query here has seen no score but hidden ones, which are at most about this number."""
        emitter = self.emitter
        found = emitter.accumulator("max", BOOL)
        with self.one_by_one(self.inside):
            largest = self.load(self.largest, self.state())
            shown = emitter.compute("gt", largest, Constant(least / 2), dtype=self.dtype)
            emitter.inner.append(Update(found, "max", (emitter.compute("not", shown, dtype=BOOL),)))
        return found

    def _at_run_time(self, item: IndexedExpr, op: str) -> sympy.Symbol:
        """Emit the greatest or least value of an integer over the queries of one iteration, for bounds of loops."""
        emitter, inside = self.emitter, [axis for axis in self.inside if axis in item.axes]
        if not inside:
            return emitter.bound(emitter.emit(item), item.dtype)
        found = emitter.accumulator(op, accumulation(item.dtype))
        with self.one_by_one(inside):
            emitter.inner.append(Update(found, op, (emitter.emit(item),)))
        return emitter.bound(found, item.dtype)

    def _softmax(self) -> None:
        """Store the exponentials of one row of a block's scores, and update the row's maximum and sum."""
        emitter, parts, softmax = self.emitter, self.parts, self.softmax
        place = self.place(self.keys, emitter.axis_symbol(self.key_axis) - self.first_key)
        scores = next(b for b in emitter.scratch if b.name == self.scores)
        emitter.kept = {parts.product: (scores, place)}
        peak = emitter.accumulator("max", self.dtype, True)
        with self.block_keys():
            if self.key_scale is not None:
                found = self.load(self.scores, place)
                emitter.define(parts.product, softmax.compute("mul", found, emitter.emit(self.key_scale)))
            score = emitter.emit(parts.scores)
            if parts.scores is not parts.product or self.key_scale is not None:
                self.store(self.scores, place, score)
            emitter.inner.append(Update(peak, "max", (score,)))
        emitter.kept = {parts.scores: (scores, place)}
        old = self.load(self.largest, self.state())
        largest, base = softmax.maximum((old, self.folded("max", peak)))
        factor = softmax.exponential(old, base)
        sums = emitter.accumulator("sum", self.dtype, True)
        with self.block_keys():
            weight = softmax.exponential(emitter.emit(parts.scores), base)
            scaled = weight
            if self.value_scale is not None:
                scaled = softmax.compute("mul", weight, emitter.emit(self.value_scale))
            self.store(self.weights, place, scaled)
            emitter.inner.append(Update(sums, "sum", (weight,)))
        before = softmax.rescaled(self.load(self.total, self.state()), factor)
        total = softmax.compute("add", before, self.folded("sum", sums))
        self.store(self.largest, self.state(), largest)
        self.store(self.total, self.state(), total)
        self.store(self.factor, self.row(), factor)
        emitter.kept = {}

    def _shift(self) -> None:
        """Rescale the state where the softmax subtracts something else than the largest score."""
        emitter, parts, softmax = self.emitter, self.parts, self.softmax
        kept: dict[IndexedExpr, tuple[Buffer, sympy.Expr]] = {}
        with self.rows():
            softmax.define_maxima(self.load(self.largest, self.state()))
            factor = softmax.shift()
            total = softmax.rescaled(self.load(self.total, self.state()), factor)
            if parts.total is not None:
                emitter.define(parts.total, total)
            for item in parts.fixed:
                buffer = self.scratch("fixed", 1)
                self.store(buffer, self.row(), emitter.emit(item))
                kept[item] = (emitter.scratch[-1], self.row())
            self.store(self.factor, self.row(), factor)
            self.store(self.total, self.state(), total)
        self._rescale_sums()
        emitter.kept = kept

    def _rescale_sums(self) -> None:
        """Multiply the sums of each row by its factor."""
        with self.cells(self.parts.columns):
            factor = self.load(self.factor, self.row())
            for segment in self.segments:
                old = self.load(self.sums, self.sum(segment))
                self.store(self.sums, self.sum(segment), self.softmax.rescaled(old, factor))

    def store(self, buffer: str, offset: sympy.Expr, value: Operand) -> None:
        """Append a store."""
        self.emitter.inner.append(Store(buffer, offset, value))

    def matrix(self, items: tuple[IndexedExpr, ...], elements: Elements) -> Matrix:
        """Return keys or values as a matrix of one row for each key, from the first key of the block on."""
        emitter, keys, item = self.emitter, self.key_axis, items[0]
        if not self.is_in_place(item):
            return Matrix(self.unpacked, sympy.Integer(0), elements.count, 1)
        first = {emitter.axis_symbol(a): sympy.Integer(0) for a in elements.axes} | {
            emitter.axis_symbol(keys): self.first_key
        }
        offset = sympy.expand(emitter.offset(item.index, item.value.tensor).subs(first))
        return Matrix(
            emitter.buffers[item.value].name, offset, stride(item, self.parts.keys[-1]), stride(item, elements.axes[-1])
        )

    @property
    def key_count(self) -> Size:
        """Keys in this block."""
        start, stop = self.block_keys_range()
        return self.keys if stop == start + self.keys else sympy.Min(self.keys, self.last_key - start)

    def block_keys_range(self) -> tuple[Size, Size]:
        """Return the range of the keys of this block that any query here can see."""
        return block_range(self.first_key, self.keys, self.last_key)
