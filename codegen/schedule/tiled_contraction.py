"""Schedule of matrix products with few rows on tiles: each program takes a block of the weight's rows.

Every program computes the left operand with its prologue for itself, block by block along what is summed: a few
kilobytes, which lie in a cache that all share. One row is multiplied and added up, as memory is the limit; several
go to the matrix unit.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import sympy

from fusec.analysis.affine import Affine, Axis
from fusec.analysis.indexing import Located, Nest, Output, above, walk
from fusec.analysis.kinds import Shape
from fusec.codegen.kernel import DotTiles, Fold, Init, Loop, Statement, Update, index_symbol
from fusec.codegen.schedule.emitter import Emitter, static_size
from fusec.errors import ScheduleError
from fusec.ir.types import F64, DType, Size, accumulation, estimate

MATRIX_ROWS = 16
"""Rows and columns of the least tile that a matrix unit takes."""
_TILE = 8192
"""Elements of the weights that a program has at hand."""
_PROGRAMS = 256
"""Blocks that a weight is cut into where it is large enough: about two for each processor of a large chip."""
_DEPTH_OF_ONE = 512
_DEPTHS = {2: 128, 4: 32, 8: 32}
"""Elements along what is summed in one block for a matrix unit, by bytes of an element."""
_BLOCK = index_symbol("block")


def schedule_tiled_contraction(emitter: Emitter, nest: Nest, shape: Shape) -> tuple[Statement, ...]:
    """The body of a kernel for a contraction region.

    Raises:
        ScheduleError: for shapes it does not cover.
    """
    return _TiledContraction(emitter, nest, shape).run()


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
        self.depth = self._depth()

    def run(self) -> tuple[Statement, ...]:
        """The statements of the whole kernel."""
        emitter, counts = self.emitter, {columns: self._count(columns) for columns in self.sections}
        programs = sum(counts.values())
        alone = len(counts) == 1
        program = _BLOCK if alone else index_symbol("program")
        with self._rows():
            for bound, reductions in self._reductions():
                self._reduce(bound, reductions)
            if self.side:
                with emitter.repeat("once", program, 1, programs):
                    self._store_side()
            before = 0
            for columns, results in self.sections.items():
                # Each program comes to one block of one section.
                first = program if before == 0 else sympy.Mod(program + programs - before, programs)
                with nullcontext() if alone else emitter.repeat(_BLOCK.name, first, counts[columns], programs):
                    self._block(columns, results)
                before += counts[columns]
        return (Loop(program.name, 0, programs, 1, "grid", tuple(emitter.inner)),)

    # Sizes.

    def _columns(self, output: Output) -> tuple[Axis, ...]:
        """The axes of an output besides the rows, as they follow each other in it."""
        return tuple(axis for part in output.index for axis in _outer_first(part) if axis not in self.shape.rows)

    def _depth(self) -> int:
        """Elements of a block along what is summed."""
        longest = max(static_size(self.emitter.joint(c.bound)) for c in self.shape.contractions)
        bytes_ = max(c.operands[1].dtype.bytes for c in self.shape.contractions)
        most = _DEPTHS[bytes_] if self.shape.rows else _DEPTH_OF_ONE
        return max(MATRIX_ROWS, min(most, power_of_two(longest)))

    def _width(self, columns: tuple[Axis, ...]) -> int:
        """Columns of a block: few enough that all programs together fill a chip."""
        room = _TILE // self.depth // len(self._products(self.sections[columns]))
        if self.shape.rows and not self.on_matrix_unit:
            room //= self._row_lanes()
        share = static_size(self.emitter.joint(columns)) // _PROGRAMS
        least = MATRIX_ROWS if self.on_matrix_unit else 4
        return max(least, power_of_two(min(room, share) // 2 + 1))

    def _count(self, columns: tuple[Axis, ...]) -> int:
        return -(-static_size(self.emitter.joint(columns)) // self._width(columns))

    def _row_lanes(self) -> int:
        rows = power_of_two(static_size(self.emitter.joint(self.shape.rows)))
        return max(MATRIX_ROWS, rows) if self.on_matrix_unit else rows

    # Loops.

    def _rows(self) -> AbstractContextManager[None]:
        return self.emitter.tile(self.shape.rows, self._row_lanes()) if self.shape.rows else nullcontext()

    def _along(self, bound: tuple[Axis, ...]) -> AbstractContextManager[None]:
        return self.emitter.tile(bound, self.depth)

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
        width, size = self._width(columns), static_size(self.emitter.joint(columns))
        start = _BLOCK * width
        stop: Size = start + width if size % width == 0 else sympy.Min(start + width, size)
        with self.emitter.tile(columns, width, start, stop, apart=True):
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


def _outer_first(index: Affine) -> list[Axis]:
    """The axes of an index, that of the largest steps first."""
    return [axis for axis, _ in sorted(index.terms, key=lambda term: -estimate(term[1]))]


def power_of_two(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << (max(n, 1) - 1).bit_length()
