"""Schedule of matrix products on tiles: each program takes a block of rows and a block of the weight's.

Every program computes the left operand with its prologue for itself, block by block along what is summed: a few
kilobytes, which lie in a cache that all share. One row is multiplied and added up, as memory is the limit; several
go to the matrix unit. Few rows are one block. Of many, programs that run at the same time have few blocks of rows
and few of columns between them, so that both come from the cache.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import sympy

from fusec.analysis.affine import Affine, Axis
from fusec.analysis.indexing import Located, Nest, Output, above, walk
from fusec.analysis.kinds import FEW_ROWS, Shape
from fusec.codegen.kernel import Compute, Constant, DotTiles, Fold, Index, Init, Statement, Update, index_symbol
from fusec.codegen.schedule.emitter import Emitter, grid, static_size
from fusec.errors import ScheduleError
from fusec.ir.types import F64, I64, DType, Size, accumulation, estimate, product, simplify

MATRIX_ROWS = 16
"""Rows and columns of the least tile that a matrix unit takes."""
_TILE = 8192
"""Elements of the weights that a program has at hand."""
_PROGRAMS = 256
"""Blocks that a weight is cut into where it is large enough: about two for each processor of a large chip."""
_DEPTH_OF_ONE = 512
_DEPTHS = {2: 128, 4: 32, 8: 32}
"""Elements along what is summed in one block for a matrix unit, by bytes of an element."""
_MANY = {2: (128, 128, 64), 4: (64, 64, 32), 8: (16, 16, 32)}
"""Of many rows: rows, columns of all its products together and depth of a block, by bytes of an element. Twice the
columns of halves leave too few registers of 8 warps to what follows the products, on several chips."""
_LEAST = 32 * 32
"""Sums of the least block that many rows are cut into."""
_ENOUGH = 128
"""Programs below which blocks of many rows are made smaller: about one for each processor of a large chip."""
_GROUP = 8
"""Blocks of rows that programs in a row take in turn, before they go on to other columns."""
_BLOCK = index_symbol("block")


def schedule_tiled_contraction(emitter: Emitter, nest: Nest, shape: Shape) -> tuple[Statement, ...]:
    """The body of a kernel for a contraction region.

    Raises:
        ScheduleError: for shapes it does not cover.
    """
    return _TiledContraction(emitter, nest, shape).run()


@dataclass(frozen=True)
class _Blocks:
    """What one program takes."""

    rows: int
    columns: int
    """Of all its products together."""
    depth: int
    """Along what is summed."""


class _TiledContraction:
    def __init__(self, emitter: Emitter, nest: Nest, shape: Shape) -> None:
        self.emitter, self.nest, self.shape = emitter, nest, shape
        needy = above(nest, shape.contractions)
        self.side = [o for o in nest.outputs if o.root not in needy]
        """Outputs that the prologue makes."""
        self.sections: dict[tuple[Axis, ...], list[Output]] = {}
        """The other outputs by their columns."""
        orders: dict[frozenset[Axis], tuple[Axis, ...]] = {}
        for output in nest.outputs:
            if output.root in needy:
                columns = self._columns(output)
                if not columns:
                    raise ScheduleError("a contraction without columns")
                columns = orders.setdefault(frozenset(columns), columns)
                self.sections.setdefault(columns, []).append(output)
        self.dtype = accumulation(shape.contractions[0].dtype)
        self.on_matrix_unit = bool(shape.rows) and self.dtype != F64
        self.taken = self._taken()
        self.count = product(tuple(axis.size for axis in self.taken))
        self.few = isinstance(self.count, int) and self.count <= FEW_ROWS
        self.blocks = self._few_rows() if self.few else self._many_rows()

    def run(self) -> tuple[Statement, ...]:
        """The statements of the whole kernel."""
        emitter, programs = self.emitter, self._programs(self.blocks)
        program = _BLOCK if len(self.sections) == 1 else index_symbol("program")
        outer = [axis for axis in self.shape.rows if axis not in self.taken]
        emitter.levels[0].axes = frozenset(outer)
        blocks = _quotient(self.count, self.blocks.rows)
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
        emitter, alone = self.emitter, len(self.sections) == 1
        for bound, reductions in self._reductions():
            self._reduce(bound, reductions)
        if self.side:
            with emitter.repeat("once", program, 1, programs):
                self._store_side()
        before = 0
        for columns, results in self.sections.items():
            # Each program comes to one block of one section.
            count = self._count(columns, self.blocks)
            first = program if before == 0 else sympy.Mod(program + programs - before, programs)
            with nullcontext() if alone else emitter.repeat(_BLOCK.name, first, count, programs):
                self._block(columns, results)
            before += count

    # Sizes.

    def _columns(self, output: Output) -> tuple[Axis, ...]:
        """The axes of an output besides the rows, as they follow each other in it."""
        return tuple(axis for part in output.index for axis in _outer_first(part) if axis not in self.shape.rows)

    def _taken(self) -> tuple[Axis, ...]:
        """The axes of the rows that are taken in blocks, as one; the others are the grid's.

        All of them, unless a size is not known: then the longest, of unknown ones the innermost, as sequences are
        longer than batches.
        """
        rows = self.shape.rows
        if all(isinstance(axis.size, int) for axis in rows):
            return rows
        return (max(reversed(rows), key=lambda axis: estimate(axis.size)),)

    def _few_rows(self) -> _Blocks:
        """All rows, and few enough columns that all programs together fill a chip."""
        bytes_ = max(c.operands[1].dtype.bytes for c in self.shape.contractions)
        depth = self._depth(_DEPTHS[bytes_] if self.shape.rows else _DEPTH_OF_ONE)
        rows = power_of_two(static_size(self.emitter.joint(self.taken))) if self.taken else 1
        if self.on_matrix_unit:
            rows = max(MATRIX_ROWS, rows)
        room = _TILE // depth
        return _Blocks(rows, room if self.on_matrix_unit else room // rows, depth)

    def _many_rows(self) -> _Blocks:
        """As much as the registers hold, or less where programs would be few."""
        rows, columns, depth = _MANY[max(multiplied(*c.operands).bytes for c in self.shape.contractions)]
        blocks = _Blocks(min(rows, power_of_two(estimate(self.count))), columns, self._depth(depth))
        while blocks.rows * blocks.columns > _LEAST and self._all_programs(blocks) < _ENOUGH:
            wide = blocks.columns >= blocks.rows
            rows, columns = (blocks.rows, blocks.columns // 2) if wide else (blocks.rows // 2, blocks.columns)
            blocks = _Blocks(rows, columns, blocks.depth)
        return blocks

    def _depth(self, most: int) -> int:
        """Elements of a block along what is summed."""
        longest = max(self._size(c.bound) for c in self.shape.contractions)
        return max(MATRIX_ROWS, min(most, power_of_two(longest)))

    def _width(self, columns: tuple[Axis, ...], blocks: _Blocks) -> int:
        """Columns of a block of one section."""
        room, size = blocks.columns // len(self._products(self.sections[columns])), self._size(columns)
        share = size // _PROGRAMS if self.few else size
        least = MATRIX_ROWS if self.on_matrix_unit else 4
        return max(least, power_of_two(min(room, share) // 2 + 1))

    def _count(self, columns: tuple[Axis, ...], blocks: _Blocks) -> int:
        return -(-self._size(columns) // self._width(columns, blocks))

    def _size(self, axes: tuple[Axis, ...]) -> int:
        return static_size(self.emitter.joint(axes))

    def _programs(self, blocks: _Blocks) -> int:
        """Blocks of columns in all sections."""
        return sum(self._count(columns, blocks) for columns in self.sections)

    def _all_programs(self, blocks: _Blocks) -> int:
        """About how many programs run."""
        outer = product(tuple(axis.size for axis in self.shape.rows if axis not in self.taken))
        return self._programs(blocks) * -(-estimate(self.count) // blocks.rows) * estimate(outer)

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
        if not self.taken:
            return nullcontext()
        return self.emitter.tile(self.taken, self.blocks.rows, *_range(block, self.blocks.rows, self.count))

    def _along(self, bound: tuple[Axis, ...]) -> AbstractContextManager[None]:
        return self.emitter.tile(bound, self.blocks.depth)

    def _reductions(self) -> Iterable[tuple[tuple[Axis, ...], list[Located]]]:
        """The reductions of the prologue, those in front that others need."""
        groups: dict[tuple[int, tuple[Axis, ...]], list[Located]] = {}
        for reduction in sorted(self.shape.reductions, key=lambda r: r.depth):
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
        for output in self.side:
            groups.setdefault(self._columns(output), []).append(output)
        for columns, outputs in groups.items():
            with self._along(columns) if columns else nullcontext():
                self._store(outputs)

    def _block(self, columns: tuple[Axis, ...], results: list[Output]) -> None:
        width, size = self._width(columns, self.blocks), self._size(columns)
        with self.emitter.tile(columns, width, *_range(_BLOCK, width, size), apart=True):
            products: dict[tuple[Axis, ...], list[Located]] = {}
            for product in self._products(results):
                products.setdefault(product.bound, []).append(product)
            for bound, members in products.items():
                self._multiply(bound, members)
            self._store(results)

    def _products(self, results: list[Output]) -> list[Located]:
        inside = set(walk(o.root for o in results))
        return [c for c in self.shape.contractions if c in inside]

    def _multiply(self, bound: tuple[Axis, ...], products: list[Located]) -> None:
        emitter = self.emitter
        sums = {p: self._accumulator("sum", accumulation(p.dtype), not self.on_matrix_unit) for p in products}
        with self._along(bound):
            for product, name in sums.items():
                left, right = map(emitter.emit, product.operands)
                assert isinstance(left, str) and isinstance(right, str)  # both depend on what is summed
                if self.on_matrix_unit:
                    axis, dtype = emitter.axis_name(emitter.joint(bound)), multiplied(*product.operands)
                    emitter.inner.append(DotTiles(name, left, right, axis, dtype))
                else:
                    emitter.inner.append(Update(name, "sum", (left, right)))
        for product, name in sums.items():
            total = name if self.on_matrix_unit else self._folded("sum", name, accumulation(product.dtype), bound)
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


def multiplied(left: Located, right: Located) -> DType:
    """The type that a matrix unit takes two operands in: theirs where both have one, else that of the sums."""
    return left.dtype if left.dtype == right.dtype else accumulation(left.dtype)


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


def _outer_first(index: Affine) -> list[Axis]:
    """The axes of an index, that of the largest steps first."""
    return [axis for axis, _ in sorted(index.terms, key=lambda term: -estimate(term[1]))]


def power_of_two(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << (max(n, 1) - 1).bit_length()
