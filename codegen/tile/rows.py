"""Schedule of pointwise and row regions: a grid over rows, and one loop over the columns per reduction level."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TypeAlias, cast

import sympy

from fusec.codegen.tile.blocks import block_count, grid
from fusec.codegen.tile.chains import Run, chained
from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.in_order import may_have_lanes
from fusec.codegen.tile.kernel import Buffer, Constant, Operand, Sort, Statement, Store, Update, index_symbol
from fusec.codegen.tile.sort_tile import emit_sort
from fusec.ir.graph import Node
from fusec.ir.types import I64, DType, Size, TensorType, accumulation, estimate, product
from fusec.loops.affine import Affine, Axis
from fusec.loops.indexing import IndexedExpr, LoopNest, Output, ordered, walk
from fusec.loops.kinds import Shape, nodes_in_order
from fusec.loops.sorts import sort_of
from fusec.loops.updates import loads_of

# Above this cost, recomputing a value in a second loop over the row is slower than keeping it in the cache.
_EXPENSIVE = 8
_VERY_EXPENSIVE = 16
_BLOCKS_PER_CORE = 2
"""Blocks of columns for each core, where a block is a part of every row."""
_MAX_SCRATCH, _MAX_LONG_SCRATCH = 1 << 14, 1 << 18
"""Elements of a row up to which values are kept in scratch, and those that are very expensive."""


@dataclass(frozen=True)
class Tiling:
    """The tile sizes of a target."""

    lanes: int
    """Elements of a tile."""
    grain: int = 4
    """Tiles in one grid iteration, where there is a single axis to split."""
    longest_row: int | None = None
    """Elements of the longest row that one tile may hold; None where tiles are registers."""
    serial_lanes: int = 0
    """Elements of a tile over kept axes, where a serial loop goes through rows; needed with ``longest_row``."""
    cuts: int = 4
    """Maximum nesting of blocked summation along one axis; see ``chained``."""
    has_scratch: bool = True
    """A grid iteration may have scratch memory."""
    bf16_products: bool = False
    """The machine multiplies bfloat16 and adds into float32 in one instruction."""
    many_bf16_products: bool = False
    """The same for many rows at once."""
    cache_bytes: int = 1 << 20
    """Size of the second-level cache."""
    tile_rows: int = 6
    """Rows of a large-M GEMM that fill register tiles of all dtypes."""
    cores: int = 1
    """Number of cores."""


_Phase: TypeAlias = tuple[tuple[Axis, ...], list[IndexedExpr], list[Output]]
"""One loop over columns: its axes, the reductions that it computes, and the outputs that it stores."""


def schedule_rows(emitter: Emitter, nest: LoopNest, shape: Shape, tiling: Tiling) -> tuple[Statement, ...]:
    """Return the body of a kernel for a pointwise or row region.

    Raises:
        ScheduleError: where a value would be needed in a loop that is not open.
    """
    return Rows(emitter, nest, shape, tiling).run()


class Rows:
    """The loops of one nest; ``fill`` and ``stores`` serve schedules that open outer loops of their own."""

    def __init__(self, emitter: Emitter, nest: LoopNest, shape: Shape, tiling: Tiling) -> None:
        self.emitter, self.nest, self.shape, self.tiling = emitter, nest, shape, tiling
        self.strides = unit_strides(_accesses(nest, emitter.output_types))
        self.wanted: dict[IndexedExpr, tuple[sympy.Expr, int]] = {}
        """Values to be kept in scratch once computed: offset, and elements of a row."""
        self.sorted: dict[tuple[Node, tuple[Affine, ...]], tuple[Buffer, Buffer]] = {}
        """The order of sorted rows, and their elements."""
        self.workspaces: dict[tuple[str, DType, Size], Buffer] = {}
        """Memory that sorts use while they run, by purpose and type."""
        self.in_columns = False
        """Column reduction: vectorized over a kept axis, with the reductions inside."""

    def run(self) -> tuple[Statement, ...]:
        """Return the statements of the nest."""
        for axis in (*self.shape.rows, *(a for dim in self.nest.axes for a in dim)):
            self.emitter.axis_name(axis)
        if self.shape.kind == "pointwise":
            return self._pointwise()
        lane = self._lane_among(self.shape.rows)
        if lane is not None and self._may_be_columns() and self._is_column(lane):
            return self._scattered(lane) if self._is_scattered_alone() else self._columns(lane)
        self.emitter.levels[0].axes = frozenset(self.shape.rows)
        self.fill()
        return self._grid(self.shape.rows)

    # Pointwise.

    def _pointwise(self) -> tuple[Statement, ...]:
        outputs = self.nest.outputs
        updated = [o.destination for o in outputs if o.destination is not None]
        for number in [i for value in updated for i in loads_of(self.nest, value) if not i.axes]:
            self.emitter.emit(number)  # before a store overwrites it
        lane = self._lane_among([a for dim in self.nest.axes for a in dim])
        shared = [a for dim in self.nest.axes for a in dim if all(a in o.axes for o in outputs)]
        outer = [a for a in shared if a is not lane]
        if lane is None or outer or any(o.axes != {lane} for o in outputs):
            self.emitter.levels[0].axes = frozenset(outer)
            self.stores(outputs)
            return self._grid(outer)
        return self._blocks(lane, outer, lambda: self._put(outputs))

    def _blocks(
        self, lane: Axis, outer: Sequence[Axis], fill: Callable[[], None], around: Sequence[Axis] = (), grain: int = 0
    ) -> tuple[Statement, ...]:
        """Return a grid over blocks of one axis as well, for nests without another axis to split.

        Args:
            lane: the axis.
            outer: the axes of the grid besides it.
            fill: appends the statements of a tile.
            around: axes of serial loops within a block, outside of its tiles.
            grain: tiles of a block; as many as usual if 0.
        """
        lanes = self._lanes(lane)
        block = lanes * (grain or self.tiling.grain)
        whole = isinstance(lane.size, int) and lane.size <= block
        name = f"{self.emitter.axis_name(lane)}_block"
        start = 0 if whole else index_symbol(name) * block
        with ExitStack() as loops:
            for axis in around:
                loops.enter_context(self.emitter.loop(axis, "serial"))
            stop = lane.size if whole else sympy.Min(start + block, lane.size)
            loops.enter_context(self.emitter.loop(lane, "tile", lanes, start, stop))
            fill()
        if whole:
            return self._grid(outer)
        count = block_count(lane.size, block)
        return grid(self.emitter.inner, [(name, count), *((self.emitter.axis_name(a), a.size) for a in outer)])

    # Rows.

    def fill(self) -> None:
        """Emit reductions level by level; outputs that are ready are stored in the same loop."""
        phases = self._phases()
        sorts = [item for item in self.shape.scans if item.kind == "sort"]
        if not sorts and self._fits_one_tile(phases):
            self._whole_row(phases)
            return
        self._plan_scratch(phases)
        for bound, reductions, outputs in phases:
            depth = reductions[0].depth if reductions else math.inf
            for item in [i for i in sorts if i.depth <= depth]:
                self._sort(item)
                sorts.remove(item)
            if reductions:
                self._reduce(bound, reductions, outputs)
            else:
                self.stores(outputs)

    def _sort(self, item: IndexedExpr) -> None:
        """Emit a sort of the row, whose result is kept in scratch, or is a tile."""
        if not self.tiling.has_scratch:
            emit_sort(self.emitter, item, self.shape.scans, self._lanes(item.bound[0]))
            return
        (x,), (axis,), emitter = item.operands, item.bound, self.emitter
        at = item.index[:-1]
        sort = sort_of(item.node)
        assert sort is not None
        found, count = self.sorted.get((sort, at)), item.value.shape[-1]
        if found is None:
            keys = self._workspace(accumulation(x.dtype), axis.size, "keys")
            order, values = (emitter.add_scratch(t, count, "sorted") for t in (I64, keys.dtype))
            found = self.sorted[sort, at] = order, values
            with emitter.loop(axis, "tile", self._lanes(axis)):
                emitter.inner.append(Store(keys.name, emitter.axis_symbol(axis), emitter.rounded(x, emitter.emit(x))))
            descending = sort.attributes["descending"]
            memory = self._workspace(I64, axis.size * (4 if keys.dtype.bytes == 8 else 2), "entries")
            buffers = order.name, values.name, keys.name, memory.name
            emitter.inner.append(Sort(*buffers, axis.size, count, descending))
        emitter.kept[item] = (found[item.node is not sort], emitter.expression(item.index[-1]))

    def _workspace(self, dtype: DType, numel: Size, hint: str) -> Buffer:
        """Return memory that a sort needs while it runs, the same for all sorts."""
        key = hint, dtype, numel
        if key not in self.workspaces:
            self.workspaces[key] = self.emitter.add_scratch(dtype, numel, hint)
        return self.workspaces[key]

    def _phases(self) -> list[_Phase]:
        """Return the loops over columns in order: the reductions each computes, and the outputs each stores."""
        rows = frozenset(self.shape.rows)
        pending = list(self.nest.outputs)
        phases: list[_Phase] = []
        for bound, level in reduction_levels(self.shape.reductions):
            # Move all segments of an output together or none: otherwise values that they share would be computed twice.
            ready = [
                o for o in pending
                if _depth(o) < level[0].depth and o.axes - rows == frozenset(bound)
                and (self.in_columns or may_have_lanes(o, bound))
            ]  # fmt: skip
            pending = [o for o in pending if o not in ready]
            phases.append((bound, level, ready))
        return [*phases, ((), [], pending)]

    def _reduce(self, bound: tuple[Axis, ...], reductions: list[IndexedExpr], outputs: list[Output]) -> None:
        """Emit the loops over one set of columns, with lanes along one of them unless a tile loop is open already."""
        lane = None if self.in_columns else self._lane_among(bound)
        steps = [(axis, 1) for axis in bound if axis is not lane]
        if lane is not None:
            steps.append((lane, self._lanes(lane)))
        loops = [Run(axis, step) for axis, step in steps]
        if any(r.node.is_op("sum") and r.dtype.is_float for r in reductions):
            loops = chained(steps, self.tiling.cuts)
        for r, name in self._accumulate(loops, lane, reductions, outputs).items():
            self.emitter.define(r, name)

    def _accumulate(
        self, loops: Sequence[Run], lane: Axis | None, reductions: list[IndexedExpr], outputs: list[Output]
    ) -> dict[IndexedExpr, str]:
        """Emit accumulators and the loops that fill them; return the names of the totals."""
        emitter = self.emitter
        chain = next((i for i, loop in enumerate(loops) if loop.ends_chain), len(loops))
        tiled = self.in_columns or (lane is not None and chain == len(loops))
        totals = {r: emitter.accumulator(r.node.op.name, _accumulator(r), tiled) for r in reductions}
        with ExitStack() as opened:
            for loop in loops[: chain + 1]:
                opened.enter_context(self._open(loop, lane))
            if chain < len(loops):
                parts = self._accumulate(loops[chain + 1 :], lane, reductions, outputs)
                emitter.inner.extend(Update(totals[r], r.node.op.name, (part,)) for r, part in parts.items())
            else:
                for r, name in totals.items():
                    emitter.inner.append(Update(name, r.node.op.name, self._addends(r)))
                self._put(outputs)
                if not self.in_columns:
                    self._keep()
        return {r: self._folded(r, name) for r, name in totals.items()} if tiled and not self.in_columns else totals

    def _open(self, loop: Run, lane: Axis | None) -> AbstractContextManager[None]:
        """Open one loop of a chain: over an axis itself, or over the starts of runs along it."""
        axis, start, stop = loop.axis, cast(Size, 0), loop.axis.size
        if loop.within:
            start = self._run_start(axis, loop.within)
            stop = sympy.Min(start + loop.within, axis.size)
        if loop.covers:
            return self.emitter.repeat(str(self._run_start(axis, loop.covers)), start, stop, loop.covers)
        return self.emitter.loop(axis, "tile" if axis is lane else "serial", loop.step, start, stop)

    def _run_start(self, axis: Axis, length: int) -> sympy.Symbol:
        return index_symbol(f"{self.emitter.axis_name(axis)}_run{length}")

    def _folded(self, reduction: IndexedExpr, accumulator: str) -> str:
        return self.emitter.fold(reduction.node.op.name, accumulator, _accumulator(reduction))

    def _addends(self, reduction: IndexedExpr) -> tuple[Operand, ...]:
        """Return the addends of an element: two factors of a product without other uses, for a fused multiply-add."""
        x, *others = reduction.operands
        if others:
            return (self.emitter.element(reduction),)
        if reduction.node.is_op("sum") and x.kind == "pointwise" and x.node.is_op("mul") and len(x.value.users) == 1:
            return tuple(self.emitter.emit(o) for o in x.operands)
        return (self.emitter.emit(x),)

    def _fits_one_tile(self, phases: list[_Phase]) -> bool:
        bounds = {bound for bound, reductions, _ in phases if reductions}
        if len(bounds) != 1 or len(next(iter(bounds))) != 1:
            return False
        size, longest = next(iter(bounds))[0].size, self.tiling.longest_row
        return longest is not None and isinstance(size, int) and size <= longest

    def _whole_row(self, phases: list[_Phase]) -> None:
        """Emit a row that one tile holds: everything is loaded once and reduced in registers."""
        ((axis,),) = {bound for bound, reductions, _ in phases if reductions}
        rows = frozenset(self.shape.rows)
        emitter = self.emitter
        outside: list[Output] = []
        with emitter.loop(axis, "tile", self._lanes(axis)):
            for _, reductions, outputs in phases:
                for r in reductions:
                    value = emitter.element(r)
                    if isinstance(value, Constant):
                        value = emitter.compute("cast", value, dtype=_accumulator(r))
                    emitter.define(r, self._folded(r, value))
                inside = [o for o in outputs if o.axes - rows <= {axis}]
                outside += [o for o in outputs if o not in inside]
                self._put(inside)
            totals = dict(emitter.levels[-1].names)
        # A loop that is one tile opens no scope: its sums stay visible to the segments after it.
        for r in self.shape.reductions:
            emitter.define(r, totals[r])
        self.stores(outside)

    # Columns: a reduction over outer axes, lanes along the axis that is kept.

    def _may_be_columns(self) -> bool:
        """Return whether nothing is in order along the rows, or scanned only, which blocks may do in a serial loop."""
        scans = self.shape.scans
        return not scans or (self.tiling.longest_row is not None and all(item.kind == "scan" for item in scans))

    def _is_column(self, lane: Axis) -> bool:
        """Return whether memory is contiguous along an axis that is kept, and not along the reduced ones."""
        bound = {a for r in (*self.shape.reductions, *self.shape.scans) for a in r.bound}
        across = [(index, type) for index, type in _accesses(self.nest, self.emitter.output_types)
                  if any(lane in part.axes for part in index)]  # fmt: skip
        return bool(self.strides[lane]) and bound.isdisjoint(unit_strides(across))

    def _columns(self, lane: Axis) -> tuple[Statement, ...]:
        outer = [a for a in self.shape.rows if a is not lane]
        self.emitter.levels[0].axes = frozenset(outer)
        return self._blocks(lane, outer, self._column_phases)

    def _column_phases(self) -> None:
        self.in_columns = True
        for bound, reductions, outputs in self._phases():
            if reductions:
                self._reduce(bound, reductions, outputs)
            else:
                self.stores(outputs, tiled=False)

    # Scatters of rows: elements in order, lanes along the axis that is kept.

    def _is_scattered_alone(self) -> bool:
        """Return whether all outputs have one set of loops, and nothing is reduced or scanned before."""
        return (
            not (self.shape.reductions or self.shape.scans) and len({output.axes for output in self.nest.outputs}) == 1
        )

    def _scattered(self, lane: Axis) -> tuple[Statement, ...]:
        """Return a grid over few long blocks, since a block of columns is a part of each row."""
        rows, outputs = self.shape.rows, self.nest.outputs
        outer = [a for a in rows if a is not lane]
        around = ordered(self.nest, outputs[0].axes.difference(rows))
        self.emitter.levels[0].axes = frozenset(outer)
        count = estimate(product(tuple(a.size for a in outer)))
        tiles = -(-estimate(lane.size) // self._lanes(lane))
        grain = max(self.tiling.grain, -(-tiles * count // (_BLOCKS_PER_CORE * self.tiling.cores)))
        return self._blocks(lane, outer, lambda: self._put(outputs), around, grain)

    # Stores.

    def stores(self, outputs: Iterable[Output], tiled: bool = True) -> None:
        """Store outputs in loops over the axes that are not open yet, those over the same axes together.

        Args:
            outputs: the outputs.
            tiled: make the innermost of these loops a tile loop; not where one is open already.
        """
        opened = self.emitter.levels[-1].axes
        groups: dict[tuple[Axis, ...], list[Output]] = {}
        for output in outputs:
            missing = tuple(a for dim in self.nest.axes for a in dim if a in output.axes and a not in opened)
            groups.setdefault(missing, []).append(output)
        for missing, members in groups.items():
            lane = self._lane_among(missing) if tiled and all(may_have_lanes(o, missing) for o in members) else None
            with ExitStack() as loops:
                for axis in missing:
                    if axis is not lane:
                        loops.enter_context(self.emitter.loop(axis, "serial"))
                if lane is not None:
                    loops.enter_context(self.emitter.loop(lane, "tile", self._lanes(lane)))
                self._put(members)

    def _put(self, outputs: Sequence[Output]) -> None:
        if any(output.destination is not None for output in outputs):
            for output in outputs:  # a store may overwrite what another output reads
                self.emitter.emit(output.root)
        for output in outputs:
            self.emitter.store(output)

    # Scratch: costly values that several loops over the row need.

    def _plan_scratch(self, phases: list[_Phase]) -> None:
        if not self.tiling.has_scratch:
            return
        rows = frozenset(self.shape.rows)

        def varies(item: IndexedExpr) -> bool:
            return not item.axes <= rows and item.kind not in ("reduction", "sort")

        for item in _read_in_several(phases, varies):
            within = [i.node.op.cost for i in walk([item], varies) if i.kind == "pointwise"]
            if max(within, default=0) < _EXPENSIVE:
                continue
            most = _MAX_SCRATCH if sum(within) < _VERY_EXPENSIVE else _MAX_LONG_SCRATCH
            numel, offset = 1, sympy.Integer(0)
            for axis in reversed(ordered(self.nest, item.axes - rows)):
                if not isinstance(axis.size, int) or numel * axis.size > most:
                    break
                offset = offset + self.emitter.axis_symbol(axis) * numel
                numel *= axis.size
            else:
                self.wanted[item] = offset, numel

    def _keep(self) -> None:
        """Store the values of this loop that later loops need."""
        names = self.emitter.levels[-1].names
        for item in [i for i in self.wanted if i in names]:
            offset, numel = self.wanted.pop(item)
            buffer = self.emitter.add_scratch(accumulation(item.dtype), numel)
            self.emitter.inner.append(Store(buffer.name, offset, names[item]))
            self.emitter.kept[item] = (buffer, offset)

    # Loops.

    def _grid(self, axes: Sequence[Axis]) -> tuple[Statement, ...]:
        return grid(self.emitter.inner, [(self.emitter.axis_name(a), a.size) for a in axes])

    def _lane_among(self, axes: Iterable[Axis]) -> Axis | None:
        """Return the axis for the lanes: the one with unit stride in most accesses, the innermost of equals."""
        inner_first = [axis for axis in axes if axis.size != 1][::-1]
        return max(inner_first, key=self.strides.__getitem__, default=None)

    def _lanes(self, axis: Axis) -> int:
        """Return the lanes of a tile along an axis: those of a register, or the power of two that holds the axis."""
        lanes, longest = self.tiling.lanes, self.tiling.longest_row
        if longest is None:
            return lanes
        # The first elements in order are in a tile with all others.
        axis = next((i.bound[0] for i in self.shape.scans if i.kind == "sort" and axis in i.index[-1].axes), axis)
        if axis in self.shape.rows and nodes_in_order(self.nest, self.shape.scans):
            limit = self.tiling.serial_lanes
        elif self.shape.kind == "row":
            is_whole = isinstance(axis.size, int) and axis.size <= longest
            limit = longest if is_whole or not self.shape.scans else lanes
        else:
            limit = lanes
        if not isinstance(axis.size, int):
            return min(lanes, limit)
        return min(1 << (axis.size - 1).bit_length(), limit)


def _depth(output: Output) -> int:
    """Return the depth of what an output stores and of where it stores it."""
    return max(output.root.depth, output.dynamic_index.value.depth if output.dynamic_index is not None else 0)


def _read_in_several(phases: Iterable[_Phase], varies: Callable[[IndexedExpr], bool]) -> list[IndexedExpr]:
    """Return the largest expressions that loops over the columns compute and later ones read."""
    computed: set[IndexedExpr] = set()
    found: dict[IndexedExpr, None] = {}
    for _, reductions, outputs in phases:
        roots = [*(x for r in reductions for x in r.operands), *(o.root for o in outputs)]
        reached = list(walk(roots, lambda item: item not in computed and varies(item)))
        read = [*roots, *(operand for item in reached for operand in item.operands)]
        found |= dict.fromkeys(item for item in read if item in computed)
        computed.update(walk(roots, varies))
    return list(found)


def reduction_levels(reductions: Iterable[IndexedExpr]) -> list[tuple[tuple[Axis, ...], list[IndexedExpr]]]:
    """Group reductions over the same axes, those first that others need."""
    levels: dict[tuple[int, tuple[Axis, ...]], list[IndexedExpr]] = {}
    for reduction in sorted(reductions, key=lambda r: r.depth):
        levels.setdefault((reduction.depth, reduction.bound), []).append(reduction)
    return [(bound, members) for (_, bound), members in levels.items()]


def unit_strides(accesses: Iterable[tuple[tuple[Affine, ...], TensorType]]) -> Counter[Axis]:
    """Count the loads and stores with unit stride along each axis."""
    counts: Counter[Axis] = Counter()
    for index, type in accesses:
        for part, stride in zip(index, type.strides, strict=True):
            for axis, coefficient in part.terms:
                if stride == 1 and coefficient == 1:
                    counts[axis] += 1
    return counts


def _accesses(nest: LoopNest, output_types: Sequence[TensorType]) -> Iterator[tuple[tuple[Affine, ...], TensorType]]:
    """Yield the index of each load and store of a nest, and the type of its tensor."""
    yield from ((i.index, i.value.tensor) for i in nest.walk() if i.kind in ("load", "lookup"))
    yield from ((o.index, output_types[o.position]) for o in nest.outputs)


def _accumulator(reduction: IndexedExpr) -> DType:
    return accumulation(reduction.dtype)
