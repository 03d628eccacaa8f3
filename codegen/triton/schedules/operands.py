"""The products of a GEMM region as blocks: rows, columns and summed axes, each joined into one range."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.products import Products
from fusec.codegen.triton.legality import FEW_ROWS_OF_HALVES
from fusec.errors import ScheduleError
from fusec.ir.types import F64, DType, Size, accumulation, estimate, product
from fusec.loops.affine import Affine, Axis
from fusec.loops.indexing import IndexedExpr, LoopNest, Output, walk
from fusec.loops.kinds import Shape, is_computed, rows_at_once

MATRIX_ROWS = 16
"""Rows and columns of the smallest tile of a matrix unit."""
_LEAST_COLUMNS = 4
Range: TypeAlias = Callable[[int, int], tuple[Size, Size]]
"""The range, of a size, of the blocks of some length that a program sums up: from the length and the size."""


class TiledProducts(Products):
    """The products of a region, and the programs of a configuration.

    Raises:
        ScheduleError: for a contraction without columns.
    """

    def __init__(self, nest: LoopNest, shape: Shape) -> None:
        super().__init__(nest, shape)
        self.outputs = nest.outputs
        self.epilogue_ops = {item.node.op.name for item in self.after if item.kind == "pointwise"}
        """The operations of the epilogue."""
        rows = frozenset(shape.rows)
        loads = {x for item in self.after if item.kind == "pointwise" for x in item.operands if x.kind == "load"}
        self.epilogue_tiles = sum(bool(x.axes & rows and x.axes - rows) for x in loads)
        """The number of tiles of rows and columns that the epilogue loads."""
        self.sections: dict[tuple[Axis, ...], list[Output]] = {}
        """The outputs of the epilogue by their columns."""
        orders: dict[frozenset[Axis], tuple[Axis, ...]] = {}
        for output in self.results:
            columns = self.columns(output)
            if not columns:
                raise ScheduleError("a contraction without columns")
            columns = orders.setdefault(frozenset(columns), columns)
            self.sections.setdefault(columns, []).append(output)
        self.dtype = accumulation(shape.contractions[0].dtype)
        self.on_matrix_unit = bool(shape.rows) and self.dtype != F64
        self.grouped = {c.bound for c in shape.contractions if is_computed(c) and has_groups(c.bound)}
        """The summed axes of products whose blocks do not cross the groups of a weight that is computed: what all of a
        group share, such as its scale, is loaded once for a block."""
        self.blocked_rows = self._blocked_rows()
        """The axes of the rows that are processed in blocks, as one; the others are axes of the grid."""
        self.count = product(tuple(axis.size for axis in self.blocked_rows))
        """Number of those rows."""
        at_once = rows_at_once(shape.contractions, FEW_ROWS_OF_HALVES)
        self.few = isinstance(self.count, int) and self.count <= at_once

    def columns(self, output: Output) -> tuple[Axis, ...]:
        """Return the axes of an output besides the rows, in its order."""
        return tuple(axis for part in output.index for axis in _outer_first(part) if axis not in self.shape.rows)

    @property
    def most(self) -> int:
        """The most products of a block."""
        return max(len(self.of(results)) for results in self.sections.values())

    @property
    def least_columns(self) -> int:
        """Columns of the smallest block of a product."""
        return MATRIX_ROWS if self.on_matrix_unit else _LEAST_COLUMNS

    @property
    def longest(self) -> int:
        """Length of the longest sum."""
        return max(length(c.bound) for c in self.shape.contractions)

    @property
    def deepest(self) -> int:
        """The most summed elements of a block: of a group, or of the longest sum."""
        groups = [self.block_of_group(bound[-1]) for bound in self.grouped]
        return max(self.least_depth, min([power_of_two(self.longest), *groups]))

    @property
    def least_depth(self) -> int:
        """The fewest summed elements of a block: matrix units multiply 32 bytes at least."""
        return MATRIX_ROWS if all(multiplied(*c.pairs[0]).bytes > 1 for c in self.shape.contractions) else 32

    def block_of_group(self, axis: Axis) -> int:
        """Return the elements of a block that holds a group."""
        return max(self.least_depth, power_of_two(length((axis,))))

    @property
    def all_columns(self) -> int:
        """Columns of all products together."""
        return sum(len(self.of(results)) * length(columns) for columns, results in self.sections.items())

    @property
    def weights(self) -> int:
        """Bytes of all right operands, or of what they are computed from."""
        loads = {i for i in walk(r for c in self.shape.contractions for _, r in c.pairs) if i.kind == "load"}
        return sum(length(tuple(i.axes)) * i.dtype.bytes for i in loads)

    def width(self, columns: tuple[Axis, ...], config: KernelConfig) -> int:
        """Return the columns of a block of one section."""
        room = config.columns // len(self.of(self.sections[columns]))
        return max(self.least_columns, power_of_two(min(room, length(columns)) // 2 + 1))

    def blocks(self, columns: tuple[Axis, ...], config: KernelConfig) -> int:
        """Return the blocks of columns of one section."""
        return -(-length(columns) // self.width(columns, config))

    def programs(self, config: KernelConfig) -> int:
        """Return the blocks of columns of all sections."""
        return sum(self.blocks(columns, config) for columns in self.sections)

    def all_programs(self, config: KernelConfig) -> int:
        """Return the approximate number of programs."""
        outer = product(tuple(axis.size for axis in self.shape.rows if axis not in self.blocked_rows))
        return self.programs(config) * -(-estimate(self.count) // config.rows) * estimate(outer) * config.splits

    def _blocked_rows(self) -> tuple[Axis, ...]:
        """Return all axes of rows if their sizes are known, else the longest.

        Of unknown ones it is the innermost, as sequences are longer than batches.
        """
        rows = self.shape.rows
        if all(isinstance(axis.size, int) for axis in rows):
            return rows
        return (max(reversed(rows), key=lambda axis: estimate(axis.size)),)


def has_groups(bound: tuple[Axis, ...]) -> bool:
    """Return whether blocks of a sum, if its weight is computed, stay within the innermost axis: see ``grouped``."""
    (*outer, inner) = bound
    return bool(outer) and length((inner,)) >= MATRIX_ROWS


@contextmanager
def blocks_of_sum(
    emitter: Emitter, bound: tuple[Axis, ...], depth: int, by_group: bool, over: Range = lambda block, size: (0, size)
) -> Iterator[Axis]:
    """Open the loops over the blocks of a sum, and yield the axis of their elements.

    Args:
        emitter: takes the loops.
        bound: the summed axes.
        depth: elements of a block.
        by_group: whether blocks stay within the innermost axis.
        over: the range to sum up.
    """
    if not by_group:
        with emitter.tile(bound, depth, *over(depth, length(bound))):
            yield emitter.joint(bound)
        return
    *outer, inner = bound
    with emitter.over(tuple(outer)) as groups, emitter.loop(groups, "serial", 1, *over(1, length(tuple(outer)))):
        with emitter.tile((inner,), depth):
            yield inner


def multiplied(left: IndexedExpr, right: IndexedExpr) -> DType:
    """Return the type in which two operands are multiplied: theirs if they agree, else that of the sums."""
    return left.dtype if left.dtype == right.dtype else accumulation(left.dtype)


def length(axes: tuple[Axis, ...]) -> int:
    """Return the number of elements over some axes.

    Raises:
        ScheduleError: where a size is not static.
    """
    size = product(tuple(axis.size for axis in axes))
    if not isinstance(size, int):
        raise ScheduleError(f"the size {size} is not known when the kernel is made")
    return size


def power_of_two(n: int) -> int:
    """Return the least power of two that is at least ``n``."""
    return 1 << (max(n, 1) - 1).bit_length()


def _outer_first(index: Affine) -> list[Axis]:
    """Return the axes of an index, largest stride first."""
    return [axis for axis, _ in sorted(index.terms, key=lambda term: -estimate(term[1]))]
