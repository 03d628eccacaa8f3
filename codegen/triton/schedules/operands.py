"""The matrix products of a region as blocks see them: rows, columns and what is summed, each joined into one range."""

from collections.abc import Iterable

from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.triton.legality import FEW_ROWS_OF_HALVES
from fusec.errors import ScheduleError
from fusec.ir.types import F64, DType, accumulation, estimate, product
from fusec.loops.affine import Affine, Axis
from fusec.loops.indexing import IndexedExpr, LoopNest, Output, above, walk
from fusec.loops.kinds import Shape, rows_at_once

MATRIX_ROWS = 16
"""Rows and columns of the least tile that a matrix unit takes."""
_LEAST_COLUMNS = 4


class Products:
    """What a contraction region computes, and how many programs a config makes of it.

    Raises:
        ScheduleError: for a contraction without columns.
    """

    def __init__(self, nest: LoopNest, shape: Shape) -> None:
        self.shape, self.outputs = shape, nest.outputs
        needy = above(nest, shape.contractions)
        self.behind = {item.node.op.name for item in needy if item.kind == "pointwise"}
        """The operations that follow a product."""
        rows = frozenset(shape.rows)
        loads = {x for item in needy if item.kind == "pointwise" for x in item.operands if x.kind == "load"}
        self.beside = sum(bool(x.axes & rows and x.axes - rows) for x in loads)
        """How many tiles of rows and columns are loaded for them."""
        self.side = [o for o in nest.outputs if o.root not in needy]
        """Outputs that the prologue makes."""
        self.sections: dict[tuple[Axis, ...], list[Output]] = {}
        """The other outputs by their columns."""
        orders: dict[frozenset[Axis], tuple[Axis, ...]] = {}
        for output in nest.outputs:
            if output.root in needy:
                columns = self.columns(output)
                if not columns:
                    raise ScheduleError("a contraction without columns")
                columns = orders.setdefault(frozenset(columns), columns)
                self.sections.setdefault(columns, []).append(output)
        self.dtype = accumulation(shape.contractions[0].dtype)
        self.on_matrix_unit = bool(shape.rows) and self.dtype != F64
        self.taken = self._taken()
        """The axes of the rows that are taken in blocks, as one; the others are the grid's."""
        self.count = product(tuple(axis.size for axis in self.taken))
        """Rows that are taken in blocks."""
        at_once = rows_at_once(shape.contractions, FEW_ROWS_OF_HALVES)
        self.few = isinstance(self.count, int) and self.count <= at_once

    def columns(self, output: Output) -> tuple[Axis, ...]:
        """The axes of an output besides the rows, as they follow each other in it."""
        return tuple(axis for part in output.index for axis in _outer_first(part) if axis not in self.shape.rows)

    def of(self, results: Iterable[Output]) -> list[IndexedExpr]:
        """The products that some outputs need."""
        inside = set(walk(o.root for o in results))
        return [c for c in self.shape.contractions if c in inside]

    @property
    def most(self) -> int:
        """The most products that one block has."""
        return max(len(self.of(results)) for results in self.sections.values())

    @property
    def least_columns(self) -> int:
        """Columns of the least block of one product."""
        return MATRIX_ROWS if self.on_matrix_unit else _LEAST_COLUMNS

    @property
    def longest(self) -> int:
        """Elements along the longest sum."""
        return max(length(c.bound) for c in self.shape.contractions)

    @property
    def all_columns(self) -> int:
        """Columns of all products together."""
        return sum(len(self.of(results)) * length(columns) for columns, results in self.sections.items())

    @property
    def weights(self) -> int:
        """Elements of all right operands."""
        sections = self.sections.items()
        return sum(length(p.bound) * length(columns) for columns, results in sections for p in self.of(results))

    def width(self, columns: tuple[Axis, ...], config: KernelConfig) -> int:
        """Columns of a block of one section."""
        room = config.columns // len(self.of(self.sections[columns]))
        return max(self.least_columns, power_of_two(min(room, length(columns)) // 2 + 1))

    def blocks(self, columns: tuple[Axis, ...], config: KernelConfig) -> int:
        """Blocks of columns of one section."""
        return -(-length(columns) // self.width(columns, config))

    def programs(self, config: KernelConfig) -> int:
        """Blocks of columns in all sections."""
        return sum(self.blocks(columns, config) for columns in self.sections)

    def all_programs(self, config: KernelConfig) -> int:
        """About how many programs run."""
        outer = product(tuple(axis.size for axis in self.shape.rows if axis not in self.taken))
        return self.programs(config) * -(-estimate(self.count) // config.rows) * estimate(outer) * config.splits

    def _taken(self) -> tuple[Axis, ...]:
        """All axes of rows, unless a size is not known: then the longest.

        Of unknown ones it is the innermost, as sequences are longer than batches.
        """
        rows = self.shape.rows
        if all(isinstance(axis.size, int) for axis in rows):
            return rows
        return (max(reversed(rows), key=lambda axis: estimate(axis.size)),)


def multiplied(left: IndexedExpr, right: IndexedExpr) -> DType:
    """The type that a matrix unit takes two operands in: theirs where both have one, else that of the sums."""
    return left.dtype if left.dtype == right.dtype else accumulation(left.dtype)


def length(axes: tuple[Axis, ...]) -> int:
    """Elements of axes as one.

    Raises:
        ScheduleError: where a size is not known when the kernel is made.
    """
    size = product(tuple(axis.size for axis in axes))
    if not isinstance(size, int):
        raise ScheduleError(f"the size {size} is not known when the kernel is made")
    return size


def power_of_two(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << (max(n, 1) - 1).bit_length()


def _outer_first(index: Affine) -> list[Axis]:
    """The axes of an index, that of the largest steps first."""
    return [axis for axis, _ in sorted(index.terms, key=lambda term: -estimate(term[1]))]
