"""Schedule of pointwise and row regions: a grid over rows, and one loop over the columns per reduction level."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import cast

import sympy

from fusec.codegen.tile.chains import Run, chained
from fusec.codegen.tile.emitter import Emitter, grid
from fusec.codegen.tile.kernel import Compute, Constant, Fold, Init, Operand, Statement, Store, Update, index_symbol
from fusec.ir.types import DType, Size, TensorType, accumulation
from fusec.loops.affine import Affine, Axis
from fusec.loops.indexing import IndexedExpr, LoopNest, Output, walk
from fusec.loops.kinds import Shape
from fusec.loops.updates import loads_of

# Recomputing something dearer than this in a second loop over the row costs more than keeping it in the cache.
_DEAR = 8
_MAX_SCRATCH = 16384


@dataclass(frozen=True)
class Tiling:
    """How a target cuts its loops."""

    lanes: int
    """Elements of a tile."""
    grain: int = 4
    """Tiles in one grid iteration, where a single axis is all there is to split."""
    longest_row: int | None = None
    """Elements of the longest row that one tile may hold; None where tiles are registers."""
    cuts: int = 4
    """How often a long sum is cut along one axis; see ``chained``."""
    has_scratch: bool = True
    """Whether a grid iteration has memory of its own."""
    bf16_products: bool = False
    """Whether the machine multiplies bfloat16 and adds into float32 in one instruction."""
    cores: int = 1
    """How many iterations of a grid run at once."""


def schedule_rows(emitter: Emitter, nest: LoopNest, shape: Shape, tiling: Tiling) -> tuple[Statement, ...]:
    """The body of a kernel for a pointwise or row region.

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
        """Values to be kept in scratch once computed: where, and how many elements a row has."""
        self.in_columns = False
        """Whether lanes run along what stays, inside which the reductions loop."""

    def run(self) -> tuple[Statement, ...]:
        """The statements of the whole nest."""
        for axis in (*self.shape.rows, *(a for dim in self.nest.axes for a in dim)):
            self.emitter.axis_name(axis)
        if self.shape.kind == "pointwise":
            return self._pointwise()
        lane = self._lane_among(self.shape.rows)
        if lane is not None and self._is_column(lane):
            return self._columns(lane)
        self.emitter.levels[0].axes = frozenset(self.shape.rows)
        self.fill()
        return self._grid(self.shape.rows)

    # Pointwise.

    def _pointwise(self) -> tuple[Statement, ...]:
        outputs = self.nest.outputs
        updated = [o.destination for o in outputs if o.destination is not None]
        for number in [i for value in updated for i in loads_of(self.nest, value) if not i.axes]:
            self.emitter.emit(number)  # before a store replaces it
        lane = self._lane_among([a for dim in self.nest.axes for a in dim])
        shared = [a for dim in self.nest.axes for a in dim if all(a in o.axes for o in outputs)]
        outer = [a for a in shared if a is not lane]
        if lane is None or outer or any(o.axes != {lane} for o in outputs):
            self.emitter.levels[0].axes = frozenset(outer)
            self.stores(outputs)
            return self._grid(outer)
        return self._blocks(lane, outer, lambda: self._put(outputs))

    def _blocks(self, lane: Axis, outer: Sequence[Axis], fill: Callable[[], None]) -> tuple[Statement, ...]:
        """A grid over blocks of one axis as well, for ranges that have no other axis to split."""
        lanes = self._lanes(lane)
        block = lanes * self.tiling.grain
        if isinstance(lane.size, int) and lane.size <= block:
            with self.emitter.loop(lane, "tile", lanes):
                fill()
            return self._grid(outer)
        name = f"{self.emitter.axis_name(lane)}_block"
        start = index_symbol(name) * block
        with self.emitter.loop(lane, "tile", lanes, start, sympy.Min(start + block, lane.size)):
            fill()
        count = (lane.size + block - 1) // block if isinstance(lane.size, int) else _ceiling(lane.size, block)
        return grid(self.emitter.inner, [(name, count), *((self.emitter.axis_name(a), a.size) for a in outer)])

    # Rows.

    def fill(self) -> None:
        """Reductions level by level; what can be stored along the way is, in the same loop."""
        phases = self._phases()
        if self._fits_one_tile(phases):
            self._whole_row(phases)
            return
        self._plan_scratch(phases)
        for bound, reductions, outputs in phases:
            if reductions:
                self._reduce(bound, reductions, outputs)
            else:
                self.stores(outputs)

    def _phases(self) -> list[tuple[tuple[Axis, ...], list[IndexedExpr], list[Output]]]:
        """Loops over columns in order: the reductions each makes, and the outputs each stores."""
        rows = frozenset(self.shape.rows)
        reductions = self.shape.reductions
        pending = list(self.nest.outputs)
        phases: list[tuple[tuple[Axis, ...], list[IndexedExpr], list[Output]]] = []
        for depth in sorted({r.depth for r in reductions}):
            here = [r for r in reductions if r.depth == depth]
            for bound in dict.fromkeys(r.bound for r in here):
                # Only a whole set of segments may move: otherwise what they share would be computed twice.
                ready = [o for o in pending if o.root.depth < depth and o.axes - rows == frozenset(bound)]
                pending = [o for o in pending if o not in ready]
                phases.append((bound, [r for r in here if r.bound == bound], ready))
        return [*phases, ((), [], pending)]

    def _reduce(self, bound: tuple[Axis, ...], reductions: list[IndexedExpr], outputs: list[Output]) -> None:
        """The loops over one set of columns, with lanes along one of them unless a tile loop is open already."""
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
        """New accumulators, and the loops that fill them; gives the names of the totals."""
        emitter = self.emitter
        chain = next((i for i, loop in enumerate(loops) if loop.ends_chain), len(loops))
        tiled = self.in_columns or (lane is not None and chain == len(loops))
        totals = {r: emitter.fresh("acc") for r in reductions}
        emitter.inner.extend(Init(name, _fold(r), _accumulator(r), tiled) for r, name in totals.items())
        with ExitStack() as opened:
            for loop in loops[: chain + 1]:
                opened.enter_context(self._open(loop, lane))
            if chain < len(loops):
                parts = self._accumulate(loops[chain + 1 :], lane, reductions, outputs)
                emitter.inner.extend(Update(totals[r], _fold(r), (part,)) for r, part in parts.items())
            else:
                for r, name in totals.items():
                    emitter.inner.append(Update(name, _fold(r), self._addends(r)))
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
        total = self.emitter.fresh("r")
        self.emitter.inner.append(Fold(total, _fold(reduction), accumulator, _accumulator(reduction)))
        return total

    def _addends(self, reduction: IndexedExpr) -> tuple[Operand, ...]:
        """What is added per element: the two factors of a product that nobody else wants, so that they fuse."""
        (x,) = reduction.operands
        if reduction.node.is_op("sum") and x.kind == "pointwise" and x.node.is_op("mul") and len(x.value.users) == 1:
            return tuple(self.emitter.emit(o) for o in x.operands)
        return (self.emitter.emit(x),)

    def _fits_one_tile(self, phases: list[tuple[tuple[Axis, ...], list[IndexedExpr], list[Output]]]) -> bool:
        bounds = {bound for bound, reductions, _ in phases if reductions}
        if len(bounds) != 1 or len(next(iter(bounds))) != 1:
            return False
        size, longest = next(iter(bounds))[0].size, self.tiling.longest_row
        return longest is not None and isinstance(size, int) and size <= longest

    def _whole_row(self, phases: list[tuple[tuple[Axis, ...], list[IndexedExpr], list[Output]]]) -> None:
        """One tile holds the row: everything is loaded once and reduced in place."""
        ((axis,),) = {bound for bound, reductions, _ in phases if reductions}
        rows = frozenset(self.shape.rows)
        emitter = self.emitter
        outside: list[Output] = []
        with emitter.loop(axis, "tile", self._lanes(axis)):
            for _, reductions, outputs in phases:
                for r in reductions:
                    value = emitter.emit(r.operands[0])
                    if isinstance(value, Constant):
                        value = _materialise(emitter, value, _accumulator(r))
                    total = emitter.fresh("r")
                    emitter.inner.append(Fold(total, _fold(r), value, _accumulator(r)))
                    emitter.define(r, total)
                inside = [o for o in outputs if o.axes - rows <= {axis}]
                outside += [o for o in outputs if o not in inside]
                self._put(inside)
            totals = dict(emitter.levels[-1].names)
        # A loop that is one tile opens no scope: its sums stay known for the segments behind it.
        for r in self.shape.reductions:
            emitter.define(r, totals[r])
        self.stores(outside)

    # Columns: a reduction over outer axes, lanes along the axis that stays.

    def _is_column(self, lane: Axis) -> bool:
        """Whether elements lie side by side along an axis that stays, and not where that is reduced."""
        bound = {a for r in self.shape.reductions for a in r.bound}
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

    # Stores.

    def stores(self, outputs: Iterable[Output], tiled: bool = True) -> None:
        """Store outputs in loops over whatever axes are not open yet, those over the same axes together.

        Args:
            outputs: what to store.
            tiled: whether the innermost of these loops goes in tiles; not where a tile loop is open already.
        """
        opened = self.emitter.levels[-1].axes
        groups: dict[tuple[Axis, ...], list[Output]] = {}
        for output in outputs:
            missing = tuple(a for dim in self.nest.axes for a in dim if a in output.axes and a not in opened)
            groups.setdefault(missing, []).append(output)
        for missing, members in groups.items():
            lane = self._lane_among(missing) if tiled else None
            with ExitStack() as loops:
                for axis in missing:
                    if axis is not lane:
                        loops.enter_context(self.emitter.loop(axis, "serial"))
                if lane is not None:
                    loops.enter_context(self.emitter.loop(lane, "tile", self._lanes(lane)))
                self._put(members)

    def _put(self, outputs: Sequence[Output]) -> None:
        if any(output.destination is not None for output in outputs):
            for output in outputs:  # a store may replace what another output reads
                self.emitter.emit(output.root)
        for output in outputs:
            self.emitter.store(output)

    # Scratch: dear values that several loops over the row need.

    def _plan_scratch(self, phases: list[tuple[tuple[Axis, ...], list[IndexedExpr], list[Output]]]) -> None:
        if not self.tiling.has_scratch:
            return
        rows = frozenset(self.shape.rows)
        uses: Counter[IndexedExpr] = Counter()
        for _, reductions, outputs in phases:
            roots = [r.operands[0] for r in reductions] + [o.root for o in outputs]
            uses.update(walk(roots, lambda item: not item.axes <= rows and item.kind != "reduction"))
        for item, count in uses.items():
            dear = item.kind == "pointwise" and item.node.op.cost >= _DEAR
            axes = tuple(a for dim in self.nest.axes for a in dim if a in item.axes - rows)
            if not dear or count < 2 or len(axes) != len(item.axes - rows):
                continue
            numel, offset = 1, sympy.Integer(0)
            for axis in reversed(axes):
                if not isinstance(axis.size, int) or numel * axis.size > _MAX_SCRATCH:
                    break
                offset = offset + self.emitter.axis_symbol(axis) * numel
                numel *= axis.size
            else:
                self.wanted[item] = offset, numel

    def _keep(self) -> None:
        """At the end of a loop: store what later loops want and this one has computed."""
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
        """The axis to run lanes along: the one that most accesses have at unit stride, the innermost of equals."""
        inner_first = [axis for axis in axes if axis.size != 1][::-1]
        return max(inner_first, key=self.strides.__getitem__, default=None)

    def _lanes(self, axis: Axis) -> int:
        """Elements of a tile along an axis: those of a register, or the power of two that holds the axis."""
        if not self.tiling.longest_row or not isinstance(axis.size, int):
            return self.tiling.lanes
        limit = self.tiling.longest_row if self.shape.kind == "row" else self.tiling.lanes
        return min(1 << (axis.size - 1).bit_length(), limit)


def unit_strides(accesses: Iterable[tuple[tuple[Affine, ...], TensorType]]) -> Counter[Axis]:
    """How many loads and stores have each axis at unit stride."""
    counts: Counter[Axis] = Counter()
    for index, type in accesses:
        for part, stride in zip(index, type.strides, strict=True):
            for axis, coefficient in part.terms:
                if stride == 1 and coefficient == 1:
                    counts[axis] += 1
    return counts


def _accesses(nest: LoopNest, output_types: Sequence[TensorType]) -> Iterator[tuple[tuple[Affine, ...], TensorType]]:
    """Where each load and store of a nest lies, and in what."""
    yield from ((i.index, i.value.tensor) for i in nest.walk() if i.kind in ("load", "lookup"))
    yield from ((o.index, output_types[o.position]) for o in nest.outputs)


def _fold(reduction: IndexedExpr) -> str:
    return reduction.node.op.name


def _accumulator(reduction: IndexedExpr) -> DType:
    return accumulation(reduction.dtype)


def _ceiling(size: Size, block: int) -> sympy.Expr:
    return sympy.floor((size + block - 1) / block)


def _materialise(emitter: Emitter, value: Constant, dtype: DType) -> str:
    name = emitter.fresh()
    emitter.inner.append(Compute(name, "cast", (value,), dtype))
    return name
