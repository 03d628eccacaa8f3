"""Schedule of matrix products on tiles: each program takes a block of rows and a block of the weight's.

Every program computes the left operand with its prologue for itself, block by block along what is summed: a few
kilobytes, which lie in a cache that all share. One row is multiplied and added up, as memory is the limit; several
go to the matrix unit. Few rows are one block. Of many, programs that run at the same time have few blocks of rows
and few of columns between them, so that both come from the cache.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import sympy

from fusec.analysis.affine import Axis
from fusec.analysis.indexing import Located, Nest, Output
from fusec.analysis.kinds import Shape
from fusec.codegen.choice import Choice
from fusec.codegen.kernel import Compute, Constant, DotTiles, Fold, Index, Init, Statement, Update, index_symbol
from fusec.codegen.schedule.emitter import Emitter, grid
from fusec.codegen.schedule.products import Products, length, multiplied
from fusec.ir.types import I64, DType, Size, accumulation, simplify

_GROUP = 8
"""Blocks of rows that programs in a row take in turn, before they go on to other columns."""
_BLOCK = index_symbol("block")


def schedule_tiled_contraction(emitter: Emitter, nest: Nest, shape: Shape, choice: Choice) -> tuple[Statement, ...]:
    """The body of a kernel for a contraction region.

    Raises:
        ScheduleError: for shapes it does not cover.
    """
    return _TiledContraction(emitter, Products(nest, shape), choice).run()


class _TiledContraction:
    def __init__(self, emitter: Emitter, products: Products, choice: Choice) -> None:
        self.emitter, self.products, self.choice = emitter, products, choice

    def run(self) -> tuple[Statement, ...]:
        """The statements of the whole kernel."""
        emitter, programs = self.emitter, self.products.programs(self.choice)
        program = _BLOCK if len(self.products.sections) == 1 else index_symbol("program")
        outer = [axis for axis in self.products.shape.rows if axis not in self.products.taken]
        emitter.levels[0].axes = frozenset(outer)
        blocks = _quotient(self.products.count, self.choice.rows)
        group = min(blocks, _GROUP) if isinstance(blocks, int) else _GROUP
        groups = _quotient(blocks, group)
        loops = [(emitter.axis_name(axis), axis.size) for axis in outer]
        block: sympy.Expr = sympy.Integer(0)
        if groups != 1:
            loops.append(("row_group", groups))
            block = block + index_symbol("row_group") * group
        loops.append((program.name, programs))
        if group != 1:
            loops.append(("row_block", group))
            block = block + index_symbol("row_block")
        with self._if_there(block, blocks) if simplify(groups * group - blocks) != 0 else nullcontext():
            with self._rows(block):
                self._program(program, programs)
        return grid(emitter.inner, loops)

    def _program(self, program: sympy.Symbol, programs: int) -> None:
        """What every program does: the prologue, and its block of columns."""
        emitter, alone = self.emitter, len(self.products.sections) == 1
        for bound, reductions in self._reductions():
            self._reduce(bound, reductions)
        if self.products.side:
            with emitter.repeat("once", program, 1, programs):
                self._store_side()
        before = 0
        for columns, results in self.products.sections.items():
            # Each program comes to one block of one section.
            count = self.products.blocks(columns, self.choice)
            first = program if before == 0 else sympy.Mod(program + programs - before, programs)
            with nullcontext() if alone else emitter.repeat(_BLOCK.name, first, count, programs):
                self._block(columns, results)
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
        rows = self.choice.rows
        return self.emitter.tile(self.products.taken, rows, *_range(block, rows, self.products.count))

    def _along(self, bound: tuple[Axis, ...]) -> AbstractContextManager[None]:
        return self.emitter.tile(bound, self.choice.depth)

    def _reductions(self) -> Iterable[tuple[tuple[Axis, ...], list[Located]]]:
        """The reductions of the prologue, those in front that others need."""
        groups: dict[tuple[int, tuple[Axis, ...]], list[Located]] = {}
        for reduction in sorted(self.products.shape.reductions, key=lambda r: r.depth):
            groups.setdefault((reduction.depth, reduction.bound), []).append(reduction)
        return ((bound, members) for (_, bound), members in groups.items())

    def _reduce(self, bound: tuple[Axis, ...], reductions: list[Located]) -> None:
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

    def _block(self, columns: tuple[Axis, ...], results: list[Output]) -> None:
        width, size = self.products.width(columns, self.choice), length(columns)
        with self.emitter.tile(columns, width, *_range(_BLOCK, width, size), apart=True):
            products: dict[tuple[Axis, ...], list[Located]] = {}
            for product in self.products.of(results):
                products.setdefault(product.bound, []).append(product)
            for bound, members in products.items():
                self._multiply(bound, members)
            self._store(results)

    def _multiply(self, bound: tuple[Axis, ...], products: list[Located]) -> None:
        emitter = self.emitter
        sums = {p: self._accumulator("sum", accumulation(p.dtype), not self.products.on_matrix_unit) for p in products}
        with self._along(bound):
            for product, name in sums.items():
                left, right = map(emitter.emit, product.operands)
                assert isinstance(left, str) and isinstance(right, str)  # both depend on what is summed
                if self.products.on_matrix_unit:
                    axis, dtype = emitter.axis_name(emitter.joint(bound)), multiplied(*product.operands)
                    emitter.inner.append(DotTiles(name, left, right, axis, dtype))
                else:
                    emitter.inner.append(Update(name, "sum", (left, right)))
        for product, name in sums.items():
            total = (
                name if self.products.on_matrix_unit else self._folded("sum", name, accumulation(product.dtype), bound)
            )
            emitter.define(product, total)

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


def _range(block: sympy.Expr, length: int, size: Size) -> tuple[sympy.Expr, Size]:
    """Where a block of so many elements begins and ends."""
    start = sympy.expand(block * length)
    whole = isinstance(size, int) and size % length == 0
    return start, simplify(start + length if whole else sympy.Min(start + length, size))


def _quotient(size: Size, length: Size) -> Size:
    """How many blocks of a length cover a size."""
    if isinstance(size, int) and isinstance(length, int):
        return -(-size // length)
    return sympy.floor((size + length - 1) / sympy.sympify(length))
