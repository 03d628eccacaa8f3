"""Legality on CPUs: the kernels that have schedules, and the GEMMs that are faster than the vendor's."""

from collections.abc import Iterator
from functools import partial

from fusec.analysis.machine import Machine
from fusec.codegen.cpp.schedules.column_lanes import column_in_lanes
from fusec.config import Config
from fusec.ir.types import BF16, F16, F32, I8, U8
from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr, LoopNest, Output, is_even, stride, walk
from fusec.loops.kinds import Limits, Shape, is_computed, prologue_objections, stored_bits, weight_of
from fusec.loops.tables import tables
from fusec.loops.updates import Move

MULTIPLIED = frozenset({F32, BF16, F16, I8})
"""Dtypes of which a large-M GEMM has a schedule."""
SHARE_FOR_SOME_ROWS = 0.75
"""The share of the vendor's speed on large matrices from which generated GEMMs of up to ``SOME_ROWS`` rows were
measured to be faster than a vendor call and the kernel after it."""

UNPACKED_ROWS = 48
"""Rows of half types up to which a weight of fewer than eight bits is unpacked in its matmul even where the vendor's
GEMM is faster; measured with 4 bits and oneDNN's AMX. There int8 is better unpacked to memory."""


def limits(config: Config, machine: Machine, lanes: int) -> Limits:
    """Return what is generated for a machine: large-M GEMMs of the types that its profile says are fast enough."""
    always = {U8}  # no library multiplies them by one another
    return Limits(
        small_m=config.small_m,
        many=frozenset(d for d in MULTIPLIED if machine.multiplies(d.name)) | always,
        some=frozenset(d for d in MULTIPLIED if machine.multiplies(d.name, SHARE_FOR_SOME_ROWS)) | always,
        byte_products=frozenset({I8, U8}),
        column_sums=True,
        weight_prologue=partial(_weight_prologue, lanes=lanes),
        unpacked_rows=_unpacked_rows,
        layouts=_illegal_layouts,
        moves=_moves_in_order,
        in_order=_any_order,
    )


def _any_order(nest: LoopNest, shape: Shape) -> Iterator[str]:
    """Accept scans, sorts and scatters: rows are in memory, and a thread goes through them element by element."""
    return iter(())


def _weight_prologue(contraction: IndexedExpr, lanes: int) -> Iterator[str]:
    """Yield what keeps a right operand from being computed in registers of so many lanes."""
    roots, by_columns = [right for _, right in contraction.pairs], column_in_lanes(contraction) is not None
    found = {} if by_columns else tables(roots, contraction.bound[-1], lanes)
    items = [*walk(roots, lambda i: i not in found), *walk(table.code for table in found.values())]
    objections = list(prologue_objections(items, ("load", "pointwise", "constant", "index")))
    yield from objections
    if not objections and not by_columns and not _lies_along_the_sum(contraction):
        yield "its weight is not contiguous along the summed dim or the columns"


def _lies_along_the_sum(contraction: IndexedExpr) -> bool:
    """Return whether a computed weight is contiguous along the summed dim.

    Stride 0: several elements are packed in a word. A dense weight beside one whose neighbours share a byte is read in
    segments as well.
    """
    return stride(weight_of(contraction), contraction.bound[-1]) in range(len(contraction.pairs) + 1)


def _unpacked_rows(contraction: IndexedExpr) -> int:
    """Return the rows up to which a weight is unpacked in its matmul: narrow codes take longer to unpack to memory."""
    return UNPACKED_ROWS if stored_bits(contraction) < 8 else 0


def _illegal_layouts(nest: LoopNest, contraction: IndexedExpr) -> Iterator[str]:
    """Yield what keeps vector loads from filling the registers of a large-M GEMM."""
    bound = contraction.bound
    left, right = contraction.operands[:2]
    if is_computed(contraction):
        if not _lies_along_the_sum(contraction):
            yield "its weight is not contiguous along the summed dim"
    elif not is_even(left, bound):
        yield "the summed dims of its left operand are not contiguous"
    elif stride(left, bound[-1]) != 1:
        yield "the summed dim is not contiguous"
    elif stride(right, bound[-1]) != 1:
        columns = [a for dim in nest.axes for a in dim if a in right.axes and a not in bound]
        if left.dtype != F32 or not columns or stride(right, columns[-1]) != 1:
            yield "its weight is not contiguous along the summed dim"


def _moves_in_order(nest: LoopNest, move: Move) -> bool:
    """Return whether serial loops move elements towards their start, or read all of them before they write any.

    Loops over axes that not all outputs have are serial; the others are split over threads and lanes.
    """
    moved = [(a, b) for a, b in zip(move.load.index, move.writer.index, strict=True) if a != b]
    ((read, stored), *more) = moved
    if more or not _parallel(nest).isdisjoint({*read.axes, *stored.axes}):
        return False
    if move.reader.axes != move.writer.axes:
        return _turn(nest, move.reader) < _turn(nest, move.writer)
    if read.terms != stored.terms or len(read.terms) > 1:
        return False
    ahead = read.offset - stored.offset
    return isinstance(ahead, int) and ahead > 0


def _parallel(nest: LoopNest) -> frozenset[Axis]:
    """Return the axes that all outputs have."""
    return frozenset.intersection(*(output.axes for output in nest.outputs))


def _turn(nest: LoopNest, output: Output) -> int:
    """Return the position of an output's loops in the kernel: outputs over the same axes share them."""
    return next(i for i, other in enumerate(nest.outputs) if other.axes == output.axes)
