"""Schedule of GEMMs on tiles: each program computes a block of rows and columns.

Every program computes the left operand with its prologue for itself, block by block along the summed axes: a few
kilobytes, which a shared cache holds. One row is multiplied and summed lane by lane, as it is memory-bound; several
use the matrix unit. Few rows are one block. With many, programs that run concurrently share few blocks of rows and of
columns, so that both come from the cache.

Where there are too few columns to keep enough of a weight in flight, the sums are split as well. A second grid adds
the splits in a fixed order, and computes the epilogue.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from typing import TypeAlias

import sympy

from fusec.codegen.tile.blocks import block_count, block_range, grid, part_range
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.kernel import Constant, DotTiles, Index, Statement, Update, index_symbol
from fusec.codegen.tile.rows import reduction_levels
from fusec.codegen.triton.schedules.descriptors import described
from fusec.codegen.triton.schedules.operands import Range, TiledProducts, blocks_of_sum, length, multiplied
from fusec.codegen.triton.schedules.partial_results import PartialResults
from fusec.ir.types import I8, I64, Size, accumulation, simplify
from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr, LoopNest, Output
from fusec.loops.kinds import Shape

_GROUP = 8
"""Blocks of rows that consecutive programs compute before those of the next columns."""
_BLOCK, _PART = index_symbol("block"), index_symbol("part")
_Multiply: TypeAlias = Callable[[tuple[Axis, ...], list[IndexedExpr]], object]


def schedule_tiled_contraction(
    emitter: Emitter, nest: LoopNest, shape: Shape, config: KernelConfig
) -> tuple[Statement, ...]:
    """Return the body of a kernel for a GEMM region.

    Raises:
        ScheduleError: for shapes it does not cover.
    """
    statements = _TiledContraction(emitter, TiledProducts(nest, shape), config).run()
    return described(statements, emitter.sizes, emitter.buffers.values()) if config.descriptors else statements


class _TiledContraction:
    def __init__(self, emitter: Emitter, products: TiledProducts, config: KernelConfig) -> None:
        self.emitter, self.products, self.config = emitter, products, config
        self.parts: dict[IndexedExpr, PartialResults] = {}
        """The sums of each split, by product."""

    def run(self) -> tuple[Statement, ...]:
        """Return the statements of the kernel: one grid, or one for the splits of the sums and one for the epilogue."""
        products, outputs = self.products, [o.root for o in self.products.outputs]
        if self.config.splits == 1:
            return self._grid(self._multiply, products.reductions(outputs))
        sums = self._grid(self._store_part, products.reductions(products.shape.contractions), self.config.splits)
        return (*sums, *self._grid(self._add_parts, products.reductions(outputs, prologue=False)))

    def _grid(self, multiply: _Multiply, needed: list[IndexedExpr], splits: int = 1) -> tuple[Statement, ...]:
        """Return one grid.

        Args:
            multiply: emits the products of a block.
            needed: the reductions that come first.
            splits: the number of splits; with several, no output is stored.
        """
        emitter, programs = self.emitter, self.products.programs(self.config)
        program = _BLOCK if len(self.products.sections) == 1 else index_symbol("program")
        outer = [axis for axis in self.products.shape.rows if axis not in self.products.blocked_rows]
        emitter.levels[0].axes = frozenset(outer)
        blocks = block_count(self.products.count, self.config.rows)
        group = min(blocks, _GROUP) if isinstance(blocks, int) else _GROUP
        groups = block_count(blocks, group)
        loops = [(emitter.axis_name(axis), axis.size) for axis in outer]
        block: sympy.Expr = sympy.Integer(0)
        if splits > 1:
            loops.append((_PART.name, splits))
        if groups != 1:
            loops.append(("row_group", groups))
            block = block + index_symbol("row_group") * group
        loops.append((program.name, programs))
        if group != 1:
            loops.append(("row_block", group))
            block = block + index_symbol("row_block")
        with self._in_range(block, blocks) if simplify(groups * group - blocks) != 0 else nullcontext():
            with self._rows(block):
                for bound, reductions in reduction_levels(needed):
                    self._reduce(bound, reductions)
                if self.products.side and splits == 1:
                    with emitter.repeat("once", program, 1, programs):
                        self._store_side()
                self._blocks(program, programs, multiply, stores=splits == 1)
        return grid(emitter.take(), loops)

    def _blocks(self, program: sympy.Symbol, programs: int, multiply: _Multiply, stores: bool) -> None:
        """Emit the columns of one program: one block of one section."""
        emitter, alone, before = self.emitter, len(self.products.sections) == 1, 0
        for columns, results in self.products.sections.items():
            count = self.products.blocks(columns, self.config)
            width, size = self.products.width(columns, self.config), length(columns)
            first = program if before == 0 else sympy.Mod(program + programs - before, programs)
            with nullcontext() if alone else emitter.repeat(_BLOCK.name, first, count, programs):
                with emitter.tile(columns, width, *block_range(_BLOCK * width, width, size), apart=True):
                    multiply(columns, self.products.of(results))
                    if stores:
                        for output in results:
                            emitter.store(output)
            before += count

    # Loops.

    def _in_range(self, block: sympy.Expr, blocks: Size) -> AbstractContextManager[None]:
        """Skip blocks of rows beyond the last: all groups have the same size."""
        return self.emitter.when(self.emitter.compute("lt", self._index(block), self._index(blocks), dtype=I64))

    def _index(self, value: Size) -> str | Constant:
        if isinstance(value, int):
            return Constant(value)
        name = self.emitter.fresh("n")
        self.emitter.inner.append(Index(name, value))
        return name

    def _rows(self, block: sympy.Expr) -> AbstractContextManager[None]:
        """Open the tile of the rows of one program."""
        axes, count, rows = self.products.blocked_rows, self.products.count, self.config.rows
        return self.emitter.tile(axes, rows, *block_range(block * rows, rows, count)) if axes else nullcontext()

    def _along(self, bound: tuple[Axis, ...]) -> AbstractContextManager[None]:
        return self.emitter.tile(bound, self.config.depth)

    def _reduce(self, bound: tuple[Axis, ...], reductions: list[IndexedExpr]) -> None:
        emitter = self.emitter
        names = {r: emitter.accumulator(r.node.op.name, accumulation(r.dtype), True) for r in reductions}
        with self._along(bound):
            for r, name in names.items():
                emitter.inner.append(Update(name, r.node.op.name, (emitter.element(r),)))
        for r, name in names.items():
            emitter.define(r, emitter.fold(r.node.op.name, name, accumulation(r.dtype), emitter.joint(bound)))

    def _store_side(self) -> None:
        groups: dict[tuple[Axis, ...], list[Output]] = {}
        for output in self.products.side:
            groups.setdefault(self.products.columns(output), []).append(output)
        for columns, outputs in groups.items():
            with self._along(columns) if columns else nullcontext():
                for output in outputs:
                    self.emitter.store(output)

    # Products.

    def _multiply(self, columns: tuple[Axis, ...], products: list[IndexedExpr]) -> None:
        """Compute products over the whole range of their sums."""
        self._sum_up(products, lambda block, size: (0, size))

    def _store_part(self, columns: tuple[Axis, ...], products: list[IndexedExpr]) -> None:
        """Compute the sums of one split, and store them for the next grid."""
        totals = self._sum_up(products, partial(part_range, _PART, self.config.splits))
        for one in products:
            axes = (*self.products.shape.rows, *columns)
            results = PartialResults(self.emitter, accumulation(one.dtype), axes, self.config.splits, "sums")
            self.parts[one] = results
            results.store(_PART, totals[one])

    def _add_parts(self, columns: tuple[Axis, ...], products: list[IndexedExpr]) -> None:
        """Add the sums of all splits, in a fixed order."""
        for one in products:
            sums = [self.parts[one].load(split) for split in range(self.config.splits)]
            add = partial(self.emitter.compute, "add", dtype=accumulation(one.dtype))
            self.emitter.define(one, reduce(add, sums))

    def _sum_up(self, products: list[IndexedExpr], over: Range) -> dict[IndexedExpr, str]:
        """Define products as sums over a range of the summed axes, those over the same axes in one loop."""
        emitter, on_matrix_unit, totals = self.emitter, self.products.on_matrix_unit, dict[IndexedExpr, str]()
        for bound in dict.fromkeys(p.bound for p in products):
            members = [p for p in products if p.bound == bound]
            sums = {p: emitter.accumulator("sum", accumulation(p.dtype), not on_matrix_unit) for p in members}
            with self._depth(bound, over) as axis:
                for p, name in sums.items():
                    for left, right in p.pairs:
                        emitter.inner.append(self._products(name, left, right, axis))
            for p, name in sums.items():
                totals[p] = name if on_matrix_unit else emitter.fold("sum", name, accumulation(p.dtype), axis)
                emitter.define(p, totals[p])
        return totals

    def _depth(self, bound: tuple[Axis, ...], over: Range) -> AbstractContextManager[Axis]:
        """Open the loops over a range of the summed axes."""
        depth, by_group = self.config.depth, bound in self.products.grouped
        depth = min(depth, self.products.block_of_group(bound[-1])) if by_group else depth
        return blocks_of_sum(self.emitter, bound, depth, by_group, over)

    def _products(self, name: str, left: IndexedExpr, right: IndexedExpr, axis: Axis) -> Statement:
        """Return the statement that adds the products of two blocks, both of which depend on the axis."""
        if self.products.on_matrix_unit:
            a, b = map(self.emitter.emit, (left, right))
            return DotTiles(name, str(a), str(b), self.emitter.axis_name(axis), multiplied(left, right))
        widened = self.emitter.widened if left.dtype == I8 else self.emitter.emit
        return Update(name, "sum", (widened(left), widened(right)))
