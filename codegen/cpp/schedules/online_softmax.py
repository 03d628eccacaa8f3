"""Attention's steps: keys in blocks, the softmax corrected as larger scores turn up; whichever way the lanes run.

Method: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import reduce

import sympy

from fusec.codegen.tile.emitter import Emitter, block_range, static_size
from fusec.codegen.tile.kernel import (
    Buffer,
    Compute,
    Constant,
    Dot,
    Fold,
    Init,
    Load,
    Matrix,
    Operand,
    Statement,
    Store,
    Update,
    index_symbol,
)
from fusec.codegen.tile.rows import Tiling
from fusec.ir.types import BOOL, DType, Size, accumulation
from fusec.loops.affine import Axis
from fusec.loops.attention import Attention, at_largest, summed
from fusec.loops.indexing import IndexedExpr, LoopNest, stride
from fusec.loops.visible import Bound, loaded_masks, visible_keys

_LOWEST = Constant(-math.inf)
SHARE = index_symbol("share")
"""Number of an iteration among those that the keys of one are dealt out to."""


class OnlineSoftmax(ABC):
    """The steps; a subclass says where things lie and how the loops run."""

    keys: int
    """Keys in a block."""
    row_count: int
    """Queries that an iteration has place for."""
    outer: tuple[Axis, ...]
    """Axes of the grid."""
    share: sympy.Expr = SHARE
    """Which of the shares is at work."""
    shares: int = 1
    """Iterations that the keys of one are dealt out to, block by block; what they find is combined at the end."""

    @abstractmethod
    def scratch(self, name: str, count: int, shares: int = 1) -> str:
        """Memory for ``count`` elements of each query; of all iterations, if each has but a share of the keys."""

    @abstractmethod
    def row(self) -> sympy.Expr:
        """Place of a query."""

    @abstractmethod
    def place(self, count: int, axis: Axis, start: Size = 0) -> sympy.Expr:
        """Place of an element of a query, of which it has ``count``; ``axis`` counts them from ``start`` on."""

    @abstractmethod
    def rows(self) -> AbstractContextManager[None]:
        """Loop over the queries."""

    @abstractmethod
    def cells(self, axis: Axis) -> AbstractContextManager[None]:
        """Loop over the queries and an axis."""

    @contextmanager
    def elements(self, axis: Axis) -> Iterator[None]:
        """Loop over the queries and an axis whose elements memory holds side by side: lanes run along it."""
        with self.one_by_one(self.inside), self.emitter.loop(axis, "tile", self.tiling.lanes):
            yield

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
        """The result of a row, of what the loop over its keys left in an accumulator."""

    @abstractmethod
    def scoring(self, queries: str) -> Dot:
        """Products of the queries with the keys of the block."""

    @abstractmethod
    def weighing(self) -> Dot:
        """Weights of the block times its values, added to the sums."""

    @abstractmethod
    def grid(self) -> tuple[Statement, ...]:
        """The loops around everything."""

    def __init__(self, emitter: Emitter, nest: LoopNest, attention: Attention, tiling: Tiling) -> None:
        self.emitter, self.nest, self.parts, self.tiling = emitter, nest, attention, tiling
        self.dtype = accumulation(attention.product.dtype)
        self.depth, self.columns = static_size(attention.depth), static_size(attention.columns)
        for axis in (*attention.batch, *attention.queries, attention.columns, attention.keys, attention.depth):
            emitter.axis_name(axis)
        self.inner_range: dict[sympy.Symbol, tuple[sympy.Expr, sympy.Expr]] = {}
        """First and last value of the queries' axes that loop inside an iteration of the grid."""
        self.inside: dict[Axis, tuple[Size, Size]] = {}
        """Where those axes start and stop."""
        self.first_key = index_symbol("key_block")
        self.last_key: sympy.Expr = sympy.sympify(attention.keys.size)
        """Where the keys stop that any query of an iteration can see."""

    def slot(self, size: int, share: sympy.Expr | None = None) -> sympy.Expr:
        """Where ``size`` elements of one share (by default the present one) lie, in memory that all shares see."""
        place: sympy.Expr = sympy.Integer(0)
        if self.shares > 1:
            for axis in self.outer:
                place = place * static_size(axis) + self.emitter.axis_symbol(axis)
            place = place * self.shares + (self.share if share is None else share)
        return sympy.expand(place * size)

    def state(self, share: sympy.Expr | None = None) -> sympy.Expr:
        """Place of what is known of a query's softmax."""
        return sympy.expand(self.row() + self.slot(self.row_count, share))

    def sum(self, share: sympy.Expr | None = None) -> sympy.Expr:
        """Place of an element of the sum of a query's values."""
        place = self.place(self.columns, self.parts.columns)
        return sympy.expand(place + self.slot(self.row_count * self.columns, share))

    def run(self) -> tuple[Statement, ...]:
        """The statements of the whole kernel."""
        emitter, parts = self.emitter, self.parts
        emitter.levels[0].axes = frozenset(self.outer)
        queries = self.scratch("query", self.depth)
        self.scores = self.scratch("scores", self.keys)
        self.sums = self.scratch("sums", self.columns, self.shares)
        self.largest, self.total = (self.scratch(n, 1, self.shares) for n in ("largest", "total"))
        self.factor = self.scratch("factor", 1)
        with self.elements(parts.depth):
            query = emitter.emit(parts.query)
            for scale, factor in parts.factors:
                query = self.compute(scale, query, emitter.emit(factor))
            emitter.inner.append(Store(queries, self.place(self.depth, parts.depth), query))
        with self.cells(parts.columns):
            emitter.inner.append(Store(self.sums, self.sum(), Constant(0.0)))
        with self.rows():
            emitter.inner.append(Store(self.largest, self.state(), _LOWEST))
            emitter.inner.append(Store(self.total, self.state(), Constant(0.0)))
        start, stop = self._visible()
        self.last_key = stop
        first = start if self.shares == 1 else start + SHARE * self.keys
        with emitter.repeat(str(self.first_key), first, stop, self.shares * self.keys):
            seen = self._seen()
            with emitter.when(seen) if seen else nullcontext():
                self._take_in(queries)
        return self.close()

    def close(self) -> tuple[Statement, ...]:
        """The end of an iteration, and the loops around it."""
        self.finish()
        return self.grid()

    def finish(self) -> None:
        """What is left to do once all keys are taken in."""
        if not self.parts.is_plain:
            self._shift()
        with self.elements(self.parts.columns):
            self._finish()

    def _take_in(self, queries: str) -> None:
        """One block of keys: its scores, what they make of the softmax, and its values."""
        emitter = self.emitter
        emitter.inner.append(self.scoring(queries))
        with self.rows():
            self._softmax()
        self._scale_sums()
        emitter.inner.append(self.weighing())

    def _seen(self) -> str | None:
        """Whether any query here sees any key of the block, as far as a loaded mask says; None where there is none."""
        emitter, masks = self.emitter, loaded_masks(self.parts.scores, self.parts.keys)
        if not masks:
            return None
        seen = emitter.fresh("acc")
        emitter.inner.append(Init(seen, "max", BOOL, True))
        axes, (start, stop) = [a for a in self.inside if any(a in m.axes for m, _ in masks)], self.block_keys_range()
        with self.one_by_one(axes), emitter.loop(self.parts.keys, "tile", self.tiling.lanes, start, stop):
            shown = [self._shown(mask, hidden) for mask, hidden in masks]
            every = reduce(lambda a, b: self.compute("and", a, b, dtype=BOOL), shown)
            emitter.inner.append(Update(seen, "max", (every,)))
        name = emitter.fresh("r")
        emitter.inner.append(Fold(name, "max", seen, BOOL))
        return name

    def _shown(self, mask: IndexedExpr, hidden: bool | float) -> Operand:
        """Whether a mask lets a score through: whether it is not what hides one."""
        value = self.emitter.emit(mask)
        return value if hidden is False else self.compute("ne", value, Constant(hidden), dtype=accumulation(mask.dtype))

    def _visible(self) -> tuple[Size, Size]:
        """The keys that any query here can see, from the start of a block on."""
        bounds = visible_keys(self.parts.scores, self.parts.keys, self.emitter.axis_symbol)
        starts = [self.extreme(bound, -1) for bound in bounds if not bound.upper]
        stops = [self.extreme(bound, 1) for bound in bounds if bound.upper]
        start = sympy.Max(0, *(sympy.floor(s / self.keys) * self.keys for s in starts if s is not None))
        return start, sympy.Min(self.parts.keys.size, *(s + 1 for s in stops if s is not None))

    def extreme(self, limit: Bound, sign: int) -> sympy.Expr | None:
        """The least (-1) or greatest (1) value of a bound over the queries of one iteration; None if not known."""
        bound = limit.value
        for number, item in limit.numbers.items():
            slope = bound.coeff(number, 1)
            bound = bound.subs(number, self._at_run_time(item, "max" if slope * sign > 0 else "min"))
        for axis in self.parts.queries:
            place = self.emitter.axis_symbol(axis)
            slope = bound.coeff(place, 1)
            if place in sympy.expand(bound - slope * place).free_symbols or not slope.is_Integer:
                return None
            if slope != 0 and place in self.inner_range:
                bound = bound.subs(place, self.inner_range[place][0 if slope * sign < 0 else 1])
        return sympy.expand(bound)

    def _at_run_time(self, item: IndexedExpr, op: str) -> sympy.Symbol:
        """The greatest or least value of a number over the queries of one iteration, for bounds of loops."""
        emitter, inside = self.emitter, [axis for axis in self.inside if axis in item.axes]
        if inside:
            found = emitter.fresh("acc")
            emitter.inner.append(Init(found, op, accumulation(item.dtype), False))
            with self.one_by_one(inside):
                emitter.inner.append(Update(found, op, (emitter.emit(item),)))
        return emitter.bound(found if inside else emitter.emit(item), item.dtype)

    def _softmax(self) -> None:
        """One row of a block: its scores become exponentials, and the row's maximum and sum take them in."""
        emitter, parts = self.emitter, self.parts
        place = self.place(self.keys, parts.keys, self.first_key)
        scores, sums = next(b for b in emitter.scratch if b.name == self.scores), emitter.fresh("acc")
        emitter.kept = {parts.product: (scores, place)}
        peak = emitter.fresh("acc")
        emitter.inner.append(Init(peak, "max", self.dtype, True))
        with self.block_keys():
            score = emitter.emit(parts.scores)
            if parts.scores is not parts.product:
                emitter.inner.append(Store(self.scores, place, score))
            emitter.inner.append(Update(peak, "max", (score,)))
        emitter.kept = {parts.scores: (scores, place)}
        old = self.load(self.largest, self.state())
        largest, base = self.raised(old, self.folded("max", peak))
        factor = self.compute("exp", self.compute("sub", old, base))
        emitter.inner.append(Init(sums, "sum", self.dtype, True))
        with self.block_keys():
            weight = self.compute("exp", self.compute("sub", emitter.emit(parts.scores), base))
            emitter.inner.append(Store(self.scores, place, weight))
            emitter.inner.append(Update(sums, "sum", (weight,)))
        before = self.compute("mul", self.load(self.total, self.state()), factor)
        total = self.compute("add", before, self.folded("sum", sums))
        emitter.inner.append(Store(self.largest, self.state(), largest))
        emitter.inner.append(Store(self.total, self.state(), total))
        emitter.inner.append(Store(self.factor, self.row(), factor))
        emitter.kept = {}

    def raised(self, old: Operand, new: Operand) -> tuple[str, str]:
        """The larger of two maxima of a row, and what is taken from its scores."""
        largest = self.compute("maximum", old, new)
        # A row of which nothing but -inf was seen has no exponentials yet, rather than those of -inf + inf.
        empty = self.compute("eq", largest, _LOWEST)
        return largest, self.compute("where", empty, Constant(0.0), largest)

    def _shift(self) -> None:
        """Where the softmax takes something else away than the largest score, as with sinks: make up for it."""
        emitter, parts = self.emitter, self.parts
        kept: dict[IndexedExpr, tuple[Buffer, sympy.Expr]] = {}
        with self.rows():
            self._define_largest()
            factor = emitter.emit(self._of_largest(parts.exponential))
            total = self.compute("mul", self.load(self.total, self.state()), factor)
            if parts.total is not None:
                emitter.define(parts.total, total)
            for item in parts.fixed:
                buffer = self.scratch("fixed", 1)
                emitter.inner.append(Store(buffer, self.row(), emitter.emit(item)))
                kept[item] = (emitter.scratch[-1], self.row())
            emitter.inner.append(Store(self.factor, self.row(), factor))
            emitter.inner.append(Store(self.total, self.state(), total))
        self._scale_sums()
        emitter.kept = kept

    def _define_largest(self) -> None:
        """The maxima over all keys, of one row."""
        emitter, parts = self.emitter, self.parts
        emitter.define(parts.largest, self.load(self.largest, self.state()))
        for item in parts.maxima:
            emitter.define(item, emitter.emit(self._of_largest(item.operands[0])))

    def _of_largest(self, item: IndexedExpr) -> IndexedExpr:
        return at_largest(item, self.parts.scores, self.parts.largest, self.parts.keys)

    def _scale_sums(self) -> None:
        """The sums of each row times its factor."""
        with self.cells(self.parts.columns):
            old, factor = self.load(self.sums, self.sum()), self.load(self.factor, self.row())
            self.emitter.inner.append(Store(self.sums, self.sum(), self.compute("mul", old, factor)))

    def _finish(self) -> None:
        """Divide by the row's sum, or whatever the weights do with it, and store what follows."""
        emitter, parts = self.emitter, self.parts
        self._define_largest()
        if parts.total is not None:
            emitter.define(parts.total, self.load(self.total, self.state()))
        total = replace(parts.weighted, kind="load", operands=())
        emitter.define(total, self.load(self.sums, self.sum()))
        emitter.define(parts.weighted, emitter.emit(summed(parts.weights, parts.exponential, parts.keys, total)))
        for output in self.nest.outputs:
            emitter.store(output)

    def load(self, buffer: str, offset: sympy.Expr) -> str:
        """The name of what lies in a buffer."""
        name = self.emitter.fresh()
        self.emitter.inner.append(Load(name, buffer, offset))
        return name

    def compute(self, op: str, *operands: Operand, dtype: DType | None = None) -> str:
        """The name of a result, by default in the type of the sums."""
        name = self.emitter.fresh()
        self.emitter.inner.append(Compute(name, op, operands, dtype or self.dtype))
        return name

    def matrix(self, item: IndexedExpr, down: Axis, right: Axis) -> Matrix:
        """A loaded operand as a matrix, from the first key of the block on."""
        emitter, parts = self.emitter, self.parts
        first = {emitter.axis_symbol(a): 0 for a in (parts.depth, parts.columns)}
        first[emitter.axis_symbol(parts.keys)] = self.first_key
        offset = sympy.expand(emitter.offset(item.index, item.value.tensor).subs(first))
        return Matrix(emitter.buffers[item.value].name, offset, stride(item, down), stride(item, right))

    @property
    def key_count(self) -> Size:
        """Keys in this block."""
        start, stop = self.block_keys_range()
        return self.keys if stop == start + self.keys else sympy.Min(self.keys, self.last_key - start)

    def block_keys_range(self) -> tuple[Size, Size]:
        """The keys of this block that any query here can see."""
        return block_range(self.first_key, self.keys, self.last_key)
