"""Schedule of attention on tiles: one pass over the keys in blocks, the softmax corrected as larger scores turn up.

Queries of one program are the rows of a tile: a block of positions, or where they are few all of them, together with
those of the heads that share a key. Scores never leave the program, nor do maxima and sums, unless heads are too few to
keep enough keys on their way: then the keys that are seen are dealt out to several programs of each head, and a second
grid brings together what they found, always in the same order.
Method: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022,
and "Flash-Decoding for long-context inference", 2023.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, reduce

import sympy

from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.emitter import Emitter, block_range, grid, static_size
from fusec.codegen.tile.kernel import (
    Assign,
    Buffer,
    Compute,
    Constant,
    DotTiles,
    Fold,
    Init,
    Load,
    Operand,
    Statement,
    Store,
    index_symbol,
)
from fusec.codegen.triton.schedules.operands import MATRIX_ROWS, multiplied, power_of_two
from fusec.ir.types import BOOL, DType, Size, TensorType, accumulation, contiguous_strides, simplify
from fusec.loops.affine import Affine, Axis
from fusec.loops.attention import FEW_QUERIES, Attention, at_largest, summed
from fusec.loops.indexing import IndexedExpr, LoopNest
from fusec.loops.visible import Bound, loaded_masks, visible_keys

_LOWEST = Constant(-math.inf)
_PART, _COLUMN_BLOCK = index_symbol("part"), index_symbol("column_block")
_FOUND = 8192
"""Elements of all parts' sums that one program brings together: compilers load them all at once."""


def schedule_tiled_attention(
    emitter: Emitter, nest: LoopNest, attention: Attention, config: KernelConfig
) -> tuple[Statement, ...]:
    """The body of a kernel for an attention region."""
    return _TiledAttention(emitter, nest, attention, config).run()


class _TiledAttention:
    def __init__(self, emitter: Emitter, nest: LoopNest, attention: Attention, config: KernelConfig) -> None:
        self.emitter, self.nest, self.parts = emitter, nest, attention
        self.dtype = accumulation(attention.product.dtype)
        for axis in (*attention.batch, *attention.queries, attention.columns, attention.keys, attention.depth):
            emitter.axis_name(axis)
        self.rows, self.keys, self.splits = config.rows, config.depth, config.splits
        self.few = attention.rows <= FEW_QUERIES
        self.lane = max(attention.queries, key=lambda a: a.size if isinstance(a.size, int) else math.inf, default=None)
        self.block = index_symbol("query_block")

    def run(self) -> tuple[Statement, ...]:
        """The statements of the whole kernel: one grid, or one for parts of the keys and one for what follows."""
        self.emitter.levels[0].axes = frozenset(self._outer())
        if self.splits == 1:
            with self._queries(), self._passed():
                self._finish()
            return self._grid()
        with self._queries(), self._passed():
            self._store_part()
        parts = self._grid((_PART.name, self.splits))
        # No product follows, which would ask for rows: the fewer lanes, the more programs and parts at once.
        rows, columns = power_of_two(self.parts.rows), static_size(self.parts.columns)
        width = min(power_of_two(columns), max(MATRIX_ROWS, _FOUND // (rows * self.splits)))
        tiles = self.emitter.tile((self.parts.columns,), width, *block_range(_COLUMN_BLOCK * width, width, columns))
        with self._queries(rows), tiles:
            self._bring_together()
            self._finish()
        return (*parts, *self._grid((_COLUMN_BLOCK.name, -(-columns // width))))

    @contextmanager
    def _passed(self) -> Iterator[None]:
        """What follows a pass over the keys: the largest score, sums of exponentials and of values weighted by them."""
        emitter, parts = self.emitter, self.parts
        with self._whole(parts.depth):
            query = emitter.emit(parts.query)
            with self._whole(parts.columns):
                self.largest, self.total, self.sums = (self._accumulator(op) for op in ("max", "sum", "sum"))
                with emitter.loop(parts.keys, "tile", self.keys, *self._own(*self._visible())):
                    seen = self._seen()
                    with emitter.when(seen) if seen else nullcontext():
                        self._take_in(query)
                yield

    # Loops.

    def _outer(self) -> tuple[Axis, ...]:
        """Axes of the grid; the block of queries comes behind them."""
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

    def _whole(self, axis: Axis) -> AbstractContextManager[None]:
        """One tile over a whole axis of a head."""
        return self.emitter.tile((axis,), max(MATRIX_ROWS, power_of_two(static_size(axis))))

    def _grid(self, *inner: tuple[str, Size]) -> tuple[Statement, ...]:
        loops = [*((self.emitter.axis_name(a), a.size) for a in self._outer()), *inner]
        if not self.few:
            assert self.lane is not None
            n = self.lane.size
            count = -(-n // self.rows) if isinstance(n, int) else sympy.floor((n + self.rows - 1) / self.rows)
            loops.append((self.block.name, count))
        return grid(self.emitter.take(), loops)

    def _visible(self) -> tuple[Size, Size]:
        """The keys that any query here can see, from the start of a block on."""
        bounds = visible_keys(self.parts.scores, self.parts.keys, self.emitter.axis_symbol)
        starts = [self._extreme(bound, -1) for bound in bounds if not bound.upper]
        stops = [self._extreme(bound, 1) for bound in bounds if bound.upper]
        start = sympy.Max(0, *(sympy.floor(s / self.keys) * self.keys for s in starts if s is not None))
        return start, sympy.Min(self.parts.keys.size, *(s + 1 for s in stops if s is not None))

    def _own(self, start: Size, stop: Size) -> tuple[Size, Size]:
        """Those of the keys that one part of them has, in whole blocks."""
        if self.splits == 1:
            return start, stop
        span = simplify(sympy.ceiling((sympy.sympify(stop) - start) / (self.keys * self.splits)) * self.keys)
        first = sympy.Max(0, start + _PART * span)
        return first, sympy.Min(stop, first + span)

    def _extreme(self, limit: Bound, sign: int) -> sympy.Expr | None:
        """The least (-1) or greatest (1) value of a bound over the queries of one program; None if not known."""
        bound = limit.value
        for number, item in limit.numbers.items():
            slope = bound.coeff(number, 1)
            bound = bound.subs(number, self._at_run_time(item, "max" if slope * sign > 0 else "min"))
        for axis in self.parts.queries:
            place = self.emitter.axis_symbol(axis)
            slope = bound.coeff(place, 1)
            if place in sympy.expand(bound - slope * place).free_symbols or not slope.is_Integer:
                return None
            if self.few:
                bound = bound.subs(place, 0 if slope * sign < 0 else static_size(axis) - 1)
            elif axis is self.lane:
                first = self.block * self.rows
                bound = bound.subs(place, first if slope * sign < 0 else first + self.rows - 1)
        return sympy.expand(bound)

    def _at_run_time(self, item: IndexedExpr, op: str) -> sympy.Symbol:
        """The greatest or least value of a number over the queries of one program, for bounds of loops."""
        value = self.emitter.emit(item)
        inside = self.parts.queries if self.few else (self.lane,)
        if any(axis in item.axes for axis in inside):
            axis = self.emitter.joint(self.parts.queries) if self.few else self.lane
            value = self._folded(op, value, accumulation(item.dtype), axis)
        return self.emitter.bound(value, item.dtype)

    # Blocks of keys.

    def _seen(self) -> str | None:
        """Whether any of few queries sees any key of the block, as far as a loaded mask says; None where nobody looks.

        With many queries a look would keep a chip from loading the next block meanwhile.
        """
        emitter, parts = self.emitter, self.parts
        masks = loaded_masks(parts.scores, parts.keys) if self.few else []
        if not masks:
            return None
        seen = reduce(lambda a, b: self._compute("and", a, b, dtype=BOOL), [self._shown(*mask) for mask in masks])
        seen = self._folded("max", seen, BOOL)
        if any(axis in mask.axes for mask, _ in masks for axis in parts.queries):
            seen = self._folded("max", seen, BOOL, emitter.joint(parts.queries))
        return seen

    def _shown(self, mask: IndexedExpr, hidden: bool | float) -> Operand:
        """Whether a mask lets a score through: whether it is not what hides one."""
        value = self.emitter.emit(mask)
        return (
            value if hidden is False else self._compute("ne", value, Constant(hidden), dtype=accumulation(mask.dtype))
        )

    def _take_in(self, query: Operand) -> None:
        """One block of keys: its exponentials, corrected sums of those so far, and the values weighted by them."""
        emitter, parts = self.emitter, self.parts
        key = emitter.emit(parts.key)
        product: Operand = self._dot(self._accumulator("sum"), query, key, parts.depth, parts.query, parts.key)
        for scale, factor in parts.factors:
            product = self._compute(scale, product, emitter.emit(factor))
        emitter.define(parts.product, product)
        score = emitter.emit(parts.scores)
        largest = self._compute("maximum", self.largest, self._folded("max", score))
        base = self._base(largest)
        correction = self._compute("exp_of_weight", self._compute("sub", self.largest, base))
        weight = self._compute("exp_of_weight", self._compute("sub", score, base))
        emitter.define(parts.exponential, weight)
        before = self._compute("mul", self.total, correction)
        self._assign(self.total, self._compute("add", before, self._folded("sum", weight)))
        self._assign(self.sums, self._compute("mul", self.sums, correction))
        self._dot(self.sums, weight, emitter.emit(parts.value), parts.keys, parts.weights, parts.value)
        self._assign(self.largest, largest)

    def _base(self, largest: str) -> str:
        """What exponents are taken of: a row of which nothing but -inf was seen has none, rather than -inf + inf."""
        return self._compute("where", self._compute("eq", largest, _LOWEST), Constant(0.0), largest)

    def _finish(self) -> None:
        """Divide by the row's sum, or whatever the weights do with it, and store what follows."""
        emitter, parts = self.emitter, self.parts
        emitter.define(parts.largest, self.largest)
        for item in parts.maxima:
            emitter.define(item, emitter.emit(self._of_largest(item.operands[0])))
        sums, row = self.sums, self.total
        if not parts.is_plain:
            # The softmax takes something else away than the largest score, as with sinks: make up for it.
            factor = emitter.emit(self._of_largest(parts.exponential))
            sums, row = (self._compute("mul", x, factor) for x in (sums, row))
        if parts.total is not None:
            emitter.define(parts.total, row)
        total = replace(parts.weighted, kind="load", operands=())
        emitter.define(total, sums)
        emitter.define(parts.weighted, emitter.emit(summed(parts.weights, parts.exponential, parts.keys, total)))
        for output in self.nest.outputs:
            emitter.store(output)

    # Parts of the keys.

    def _store_part(self) -> None:
        """Store what was found for the grid that follows."""
        found = {"largest": self.largest, "total": self.total, "sums": self.sums}
        self.found = {name: self._shared(name, name == "sums") for name in found}
        for name, value in found.items():
            self.emitter.inner.append(Store(self.found[name].name, self._place(_PART, name == "sums"), value))

    def _bring_together(self) -> None:
        """What all parts found as one, always in the same order."""
        found = [{name: self._load(name, part) for name in self.found} for part in range(self.splits)]
        self.largest = reduce(partial(self._compute, "maximum"), [part["largest"] for part in found])
        base = self._base(self.largest)
        factors = [self._compute("exp_of_weight", self._compute("sub", part["largest"], base)) for part in found]
        self.total, self.sums = (
            reduce(partial(self._compute, "add"), map(partial(self._compute, "mul"), factors, (p[name] for p in found)))
            for name in ("total", "sums")
        )

    def _load(self, name: str, part: int) -> str:
        loaded = self.emitter.fresh()
        self.emitter.inner.append(Load(loaded, self.found[name].name, self._place(part, name == "sums")))
        return loaded

    def _shared(self, name: str, of_sums: bool) -> Buffer:
        return self.emitter.add_scratch(self.dtype, self._found_by_part(of_sums).numel * self.splits, name, "shared")

    def _place(self, part: Size, of_sums: bool) -> sympy.Expr:
        """Where what a part found lies, all of one part in a row."""
        type = self._found_by_part(of_sums)
        index = tuple(Affine.of([(axis, 1)]) for axis in self._found_along(of_sums))
        return sympy.expand(part * type.numel + self.emitter.offset(index, type))

    def _found_by_part(self, of_sums: bool) -> TensorType:
        sizes = tuple(axis.size for axis in self._found_along(of_sums))
        return TensorType(self.dtype, sizes, contiguous_strides(sizes))

    def _found_along(self, of_sums: bool) -> tuple[Axis, ...]:
        return (*self.parts.batch, *self.parts.queries, *((self.parts.columns,) if of_sums else ()))

    def _of_largest(self, item: IndexedExpr) -> IndexedExpr:
        return at_largest(item, self.parts.scores, self.parts.largest, self.parts.keys)

    def _accumulator(self, op: str) -> str:
        name = self.emitter.fresh("acc")
        self.emitter.inner.append(Init(name, op, self.dtype, False))
        return name

    def _dot(self, acc: str, left: Operand, right: Operand, axis: Axis, first: IndexedExpr, second: IndexedExpr) -> str:
        assert isinstance(left, str) and isinstance(right, str)  # both depend on what is summed
        dtype = multiplied(first, second)
        self.emitter.inner.append(DotTiles(acc, left, right, self.emitter.axis_name(axis), dtype))
        return acc

    def _folded(self, op: str, tile: Operand, dtype: DType | None = None, axis: Axis | None = None) -> str:
        """The lanes of a tile as one, by default those of the keys in the type of the sums."""
        assert isinstance(tile, str)
        name = self.emitter.fresh("r")
        along = self.emitter.axis_name(axis or self.parts.keys)
        self.emitter.inner.append(Fold(name, op, tile, dtype or self.dtype, along))
        return name

    def _assign(self, acc: str, value: str) -> None:
        self.emitter.inner.append(Assign(acc, value))

    def _compute(self, op: str, *operands: Operand, dtype: DType | None = None) -> str:
        name = self.emitter.fresh()
        self.emitter.inner.append(Compute(name, op, operands, dtype or self.dtype))
        return name
