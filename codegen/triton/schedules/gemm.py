"""Schedule of matrix products on tiles: each program takes a block of rows and a block of the weight's.

Every program computes the left operand with its prologue for itself, block by block along what is summed: a few
kilobytes, which lie in a cache that all share. One row is multiplied and added up, as memory is the limit; several
go to the matrix unit. Few rows are one block. Of many, programs that run at the same time have few blocks of rows
and few of columns between them, so that both come from the cache.

Where columns are too few to keep enough of a weight on its way, what is summed is cut into parts as well. A second
grid adds them up, always in the same order, and does whatever follows the products.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import sympy

from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.emitter import Emitter, block_range, grid, part_range
from fusec.codegen.tile.kernel import (
    Buffer,
    Compute,
    Constant,
    DotTiles,
    Fold,
    Index,
    Init,
    Load,
    Statement,
    Store,
    Update,
    index_symbol,
)
from fusec.codegen.triton.schedules.descriptors import described
from fusec.codegen.triton.schedules.operands import Products, length, multiplied
from fusec.ir.types import I64, DType, Size, TensorType, accumulation, contiguous_strides, product, simplify
from fusec.loops.affine import Affine, Axis
from fusec.loops.indexing import IndexedExpr, LoopNest, Output, walk
from fusec.loops.kinds import Shape

_GROUP = 8
"""Blocks of rows that programs in a row take in turn, before they go on to other columns."""
_BLOCK, _PART = index_symbol("block"), index_symbol("part")
_Multiply: TypeAlias = Callable[[tuple[Axis, ...], list[IndexedExpr]], object]


def schedule_tiled_contraction(
    emitter: Emitter, nest: LoopNest, shape: Shape, config: KernelConfig
) -> tuple[Statement, ...]:
    """The body of a kernel for a contraction region.

    Raises:
        ScheduleError: for shapes it does not cover.
    """
    statements = _TiledContraction(emitter, Products(nest, shape), config).run()
    return described(statements, emitter.sizes, emitter.buffers.values()) if config.descriptors else statements


class _TiledContraction:
    def __init__(self, emitter: Emitter, products: Products, config: KernelConfig) -> None:
        self.emitter, self.products, self.config = emitter, products, config
        self.parts: dict[IndexedExpr, Buffer] = {}
        """Where the sums of each part lie, all of one product in a row."""

    def run(self) -> tuple[Statement, ...]:
        """The statements of the whole kernel: one grid, or one for each part of the sums and one for what follows."""
        products, outputs = self.products, [o.root for o in self.products.outputs]
        if self.config.splits == 1:
            return self._grid(self._multiply, walk(outputs))
        sums = self._grid(self._store_part, walk(products.shape.contractions), self.config.splits)
        rest = walk(outputs, lambda item: item.kind != "contraction")
        return (*sums, *self._grid(self._add_parts, rest))

    def _grid(self, multiply: _Multiply, needed: Iterable[IndexedExpr], splits: int = 1) -> tuple[Statement, ...]:
        """One grid.

        Args:
            multiply: what is done about the products of a block.
            needed: what is computed, of which the reductions come first.
            splits: into how many parts sums are cut; nothing else is stored then.
        """
        emitter, programs = self.emitter, self.products.programs(self.config)
        program = _BLOCK if len(self.products.sections) == 1 else index_symbol("program")
        outer = [axis for axis in self.products.shape.rows if axis not in self.products.taken]
        emitter.levels[0].axes = frozenset(outer)
        blocks = _quotient(self.products.count, self.config.rows)
        group = min(blocks, _GROUP) if isinstance(blocks, int) else _GROUP
        groups = _quotient(blocks, group)
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
        with self._if_there(block, blocks) if simplify(groups * group - blocks) != 0 else nullcontext():
            with self._rows(block):
                for bound, reductions in _in_order(item for item in needed if item.kind == "reduction"):
                    self._reduce(bound, reductions)
                if self.products.side and splits == 1:
                    with emitter.repeat("once", program, 1, programs):
                        self._store_side()
                self._blocks(program, programs, multiply, stores=splits == 1)
        return grid(emitter.take(), loops)

    def _blocks(self, program: sympy.Symbol, programs: int, multiply: _Multiply, stores: bool) -> None:
        """The columns of one program: it comes to one block of one section."""
        emitter, alone, before = self.emitter, len(self.products.sections) == 1, 0
        for columns, results in self.products.sections.items():
            count = self.products.blocks(columns, self.config)
            width, size = self.products.width(columns, self.config), length(columns)
            first = program if before == 0 else sympy.Mod(program + programs - before, programs)
            with nullcontext() if alone else emitter.repeat(_BLOCK.name, first, count, programs):
                with emitter.tile(columns, width, *block_range(_BLOCK * width, width, size), apart=True):
                    multiply(columns, self.products.of(results))
                    if stores:
                        self._store(results)
            before += count

    # Loops.

    def _if_there(self, block: sympy.Expr, blocks: Size) -> AbstractContextManager[None]:
        """Nothing is done for blocks of rows that there are not: groups are of one size."""
        name, operands = self.emitter.fresh(), (self._index(block), self._index(blocks))
        self.emitter.inner.append(Compute(name, "lt", operands, I64))
        return self.emitter.when(name)

    def _index(self, value: Size) -> str | Constant:
        if isinstance(value, int):
            return Constant(value)
        name = self.emitter.fresh("n")
        self.emitter.inner.append(Index(name, value))
        return name

    def _rows(self, block: sympy.Expr) -> AbstractContextManager[None]:
        """The rows of one program."""
        if not self.products.taken:
            return nullcontext()
        rows = self.config.rows
        return self.emitter.tile(self.products.taken, rows, *block_range(block * rows, rows, self.products.count))

    def _along(self, bound: tuple[Axis, ...]) -> AbstractContextManager[None]:
        return self.emitter.tile(bound, self.config.depth)

    def _reduce(self, bound: tuple[Axis, ...], reductions: list[IndexedExpr]) -> None:
        emitter = self.emitter
        names = {r: self._accumulator(r.node.op.name, accumulation(r.dtype), True) for r in reductions}
        with self._along(bound):
            for r, name in names.items():
                emitter.inner.append(Update(name, r.node.op.name, (emitter.emit(r.operands[0]),)))
        for r, name in names.items():
            emitter.define(r, self._folded(r.node.op.name, name, accumulation(r.dtype), bound))

    def _store_side(self) -> None:
        groups: dict[tuple[Axis, ...], list[Output]] = {}
        for output in self.products.side:
            groups.setdefault(self.products.columns(output), []).append(output)
        for columns, outputs in groups.items():
            with self._along(columns) if columns else nullcontext():
                self._store(outputs)

    # Products.

    def _multiply(self, columns: tuple[Axis, ...], products: list[IndexedExpr]) -> None:
        """Compute them."""
        self._sum_up(products, lambda bound: (0, length(bound)))

    def _store_part(self, columns: tuple[Axis, ...], products: list[IndexedExpr]) -> None:
        """Compute the sums of one part, and store them for the grid that follows."""
        totals = self._sum_up(products, self._part)
        for one in products:
            numel = self._size_of_part(columns)
            sums = self.emitter.add_scratch(self.products.dtype, numel * self.config.splits, "sums", "shared")
            self.parts[one] = sums
            offset = sympy.expand(_PART * numel + self._place(columns))
            self.emitter.inner.append(Store(sums.name, offset, totals[one]))

    def _add_parts(self, columns: tuple[Axis, ...], products: list[IndexedExpr]) -> None:
        """Add what the programs of each part have stored, always in the same order."""
        emitter, numel = self.emitter, self._size_of_part(columns)
        for one in products:
            names = [emitter.fresh() for _ in range(self.config.splits)]
            for part, name in enumerate(names):
                offset = sympy.expand(part * numel + self._place(columns))
                emitter.inner.append(Load(name, self.parts[one].name, offset))
            total, *others = names
            for name in others:
                before, total = total, emitter.fresh()
                emitter.inner.append(Compute(total, "add", (before, name), self.products.dtype))
            emitter.define(one, total)

    def _part(self, bound: tuple[Axis, ...]) -> tuple[Size, Size]:
        """The range of one part of a sum."""
        return part_range(_PART, self.config.splits, self.config.depth, length(bound))

    def _size_of_part(self, columns: tuple[Axis, ...]) -> Size:
        """How many sums of one product there are."""
        return product(tuple(axis.size for axis in (*self.products.shape.rows, *columns)))

    def _place(self, columns: tuple[Axis, ...]) -> sympy.Expr:
        """Where a sum lies among those of its part."""
        axes = (*self.products.shape.rows, *columns)
        sizes = tuple(axis.size for axis in axes)
        type = TensorType(self.products.dtype, sizes, contiguous_strides(sizes))
        return self.emitter.offset(tuple(Affine.of([(axis, 1)]) for axis in axes), type)

    def _sum_up(
        self, products: list[IndexedExpr], over: Callable[[tuple[Axis, ...]], tuple[Size, Size]]
    ) -> dict[IndexedExpr, str]:
        """Define products as sums over a range of what is summed, those over the same axes in one loop."""
        emitter, on_matrix_unit, totals = self.emitter, self.products.on_matrix_unit, dict[IndexedExpr, str]()
        for bound in dict.fromkeys(p.bound for p in products):
            members = [p for p in products if p.bound == bound]
            sums = {p: self._accumulator("sum", accumulation(p.dtype), not on_matrix_unit) for p in members}
            with emitter.tile(bound, self.config.depth, *over(bound)):
                for p, name in sums.items():
                    left, right = map(emitter.emit, p.operands)
                    assert isinstance(left, str) and isinstance(right, str)  # both depend on what is summed
                    if on_matrix_unit:
                        axis, dtype = emitter.axis_name(emitter.joint(bound)), multiplied(*p.operands)
                        emitter.inner.append(DotTiles(name, left, right, axis, dtype))
                    else:
                        emitter.inner.append(Update(name, "sum", (left, right)))
            for p, name in sums.items():
                totals[p] = name if on_matrix_unit else self._folded("sum", name, accumulation(p.dtype), bound)
                emitter.define(p, totals[p])
        return totals

    def _accumulator(self, op: str, dtype: DType, partial: bool) -> str:
        name = self.emitter.fresh("acc")
        self.emitter.inner.append(Init(name, op, dtype, partial))
        return name

    def _folded(self, op: str, accumulator: str, dtype: DType, bound: tuple[Axis, ...]) -> str:
        name = self.emitter.fresh("r")
        axis = self.emitter.axis_name(self.emitter.joint(bound))
        self.emitter.inner.append(Fold(name, op, accumulator, dtype, axis))
        return name

    def _store(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.emitter.store(output)


def _in_order(reductions: Iterable[IndexedExpr]) -> Iterable[tuple[tuple[Axis, ...], list[IndexedExpr]]]:
    """Reductions over the same axes together, those in front that others need."""
    groups: dict[tuple[int, tuple[Axis, ...]], list[IndexedExpr]] = {}
    for reduction in sorted(reductions, key=lambda r: r.depth):
        groups.setdefault((reduction.depth, reduction.bound), []).append(reduction)
    return ((bound, members) for (_, bound), members in groups.items())


def _quotient(size: Size, length: Size) -> Size:
    """How many blocks of a length cover a size."""
    if isinstance(size, int) and isinstance(length, int):
        return -(-size // length)
    return sympy.floor((size + length - 1) / sympy.sympify(length))
