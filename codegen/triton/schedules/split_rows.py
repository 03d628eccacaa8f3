"""Schedule of few long rows on a GPU: each part of a row has programs of its own.

One program per row would leave most processors idle. A grid reduces parts; the next one combines them in a fixed
order and goes on: it reduces parts of values that depend on the results, as softmax does after its maximum, or stores
outputs, in parts again if they are as long as the rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from fusec.codegen.tile.blocks import block_range, grid, part_range
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.kernel import Operand, Statement, Update, index_symbol
from fusec.codegen.tile.rows import reduction_levels
from fusec.codegen.triton.schedules.operands import power_of_two
from fusec.codegen.triton.schedules.partial_results import PartialResults
from fusec.ir.types import DType, accumulation, product
from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr, LoopNest, Output, stride
from fusec.loops.kinds import Shape

_JOINED = 4096
"""Elements of a block of parts that are combined."""
_BLOCK, _PART = index_symbol("block"), index_symbol("part")


def may_split(nest: LoopNest, shape: Shape) -> bool:
    """Return whether reductions are over the same static axes, and outputs are rows or one element of each."""
    if shape.kind != "row" or not shape.reductions or shape.scans:
        return False
    bound, rows = shape.reductions[0].bound, frozenset(shape.rows)
    alike = all(r.bound == bound for r in shape.reductions)
    whole = all(o.axes in (rows, rows.union(bound)) and o.destination is None for o in nest.outputs)
    return alike and whole and all(isinstance(a.size, int) for a in (*shape.rows, *bound))


def levels(shape: Shape) -> list[list[IndexedExpr]]:
    """Return the reductions of a row, each list computed from those before it."""
    return [reductions for _, reductions in reduction_levels(shape.reductions)]


def side_by_side(nest: LoopNest, shape: Shape) -> bool:
    """Return whether memory is contiguous along the reduced axes."""
    bound = shape.reductions[0].bound
    return any(stride(i, axis) == 1 for i in nest.walk() if i.kind == "load" for axis in bound)


def schedule_split_rows(emitter: Emitter, nest: LoopNest, shape: Shape, config: KernelConfig) -> tuple[Statement, ...]:
    """Return the body of a kernel for a region that ``may_split``: a grid for each level, and for the outputs."""
    return _Split(emitter, nest, shape, config).run()


class _Split:
    def __init__(self, emitter: Emitter, nest: LoopNest, shape: Shape, config: KernelConfig) -> None:
        self.emitter, self.nest, self.shape, self.config = emitter, nest, shape, config
        self.bound = shape.reductions[0].bound
        self.count = product(tuple(axis.size for axis in shape.rows))
        self.parts: dict[IndexedExpr, PartialResults] = {}
        """The results of all parts, by reduction."""

    def run(self) -> tuple[Statement, ...]:
        """Return the statements of the kernel."""
        grids: list[Statement] = []
        blocks, parts = (_BLOCK.name, -(-self.count // self.config.rows)), (_PART.name, self.config.splits)
        for reductions in levels(self.shape):
            with self._rows():
                self._store_parts(reductions)
            grids += grid(self.emitter.take(), [blocks, parts])
        long = [o for o in self.nest.outputs if o.axes.intersection(self.bound)]
        if short := [o for o in self.nest.outputs if o not in long]:
            with self._rows():
                self._store(short)
            grids += grid(self.emitter.take(), [blocks])
        if long:
            with self._rows(), self._part():
                self._store(long)
            grids += grid(self.emitter.take(), [blocks, parts])
        return tuple(grids)

    @contextmanager
    def _rows(self) -> Iterator[None]:
        """Open the tile of the rows of one program, with the results of earlier reductions."""
        rows = self.config.rows
        tile = self.emitter.tile(self.shape.rows, rows, *block_range(_BLOCK * rows, rows, self.count))
        with tile if self.shape.rows else nullcontext():
            if self.parts:
                self._join_parts()
            yield

    def _part(self) -> AbstractContextManager[None]:
        """Open the tiles over one program's part of a row."""
        length, depth = product(tuple(axis.size for axis in self.bound)), self.config.depth
        return self.emitter.tile(self.bound, depth, *part_range(_PART, self.config.splits, depth, length))

    def _store_parts(self, reductions: Sequence[IndexedExpr]) -> None:
        with self._reduced(reductions, self.bound, self._part()) as values:
            values |= {r: self.emitter.element(r) for r in reductions}
        for r in reductions:
            self.parts[r] = PartialResults(self.emitter, self._type(r), self.shape.rows, self.config.splits, "parts")
            self.parts[r].store(_PART, self.emitter.emit(r))

    def _join_parts(self) -> None:
        part = Axis(self.config.splits)
        lanes = min(power_of_two(self.config.splits), max(1, _JOINED // self.config.rows))
        with self._reduced(self.parts, (part,), self.emitter.tile((part,), lanes)) as values:
            values |= {r: results.load(self.emitter.axis_symbol(part)) for r, results in self.parts.items()}

    @contextmanager
    def _reduced(
        self, reductions: Iterable[IndexedExpr], axes: tuple[Axis, ...], tile: AbstractContextManager[None]
    ) -> Iterator[dict[IndexedExpr, Operand]]:
        """Open tiles over some axes, and reduce the values that are set inside for each reduction."""
        emitter, values = self.emitter, dict[IndexedExpr, Operand]()
        names = {r: emitter.accumulator(r.node.op.name, self._type(r), True) for r in reductions}
        with tile:
            yield values
            emitter.inner.extend(Update(name, r.node.op.name, (values[r],)) for r, name in names.items())
        for r, name in names.items():
            emitter.define(r, emitter.fold(r.node.op.name, name, self._type(r), emitter.joint(axes)))

    def _store(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self.emitter.store(output)

    def _type(self, reduction: IndexedExpr) -> DType:
        return accumulation(reduction.dtype)
