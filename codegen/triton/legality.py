"""Legality on GPUs: the kernels that have schedules, and the GEMMs that are tried against the vendor's."""

from collections.abc import Iterator
from dataclasses import replace

from fusec.config import Config
from fusec.ir.types import F32, I8
from fusec.loops.affine import Affine
from fusec.loops.indexing import IndexedExpr, LoopNest, walk
from fusec.loops.kinds import FEW_ROWS, HALVES, Limits, Shape, prologue_objections, scatter_of, stored_bits
from fusec.loops.serial import scatter_objections
from fusec.loops.sorts import tile_objections

FEW_ROWS_OF_HALVES = 2 * FEW_ROWS
"""Rows of half types up to which a small-M GEMM has one block of rows. Every program reads the whole block: with more
rows it would be as large as the part of the weight that a program reads. As many rows of float32, which are summed
lane by lane, were seen to spill registers."""
UNPACKED_ROWS = 64
"""Rows up to which a packed weight is unpacked in its matmul: one block of rows reads it once, so that memory is the
bottleneck. An assumption as well."""
TRIED = HALVES | {I8}
"""Dtypes of large-M GEMMs that are timed against the vendor's."""
_ASSUMED_SHARE = 0.8
"""Share of the vendor's speed, for a large-M GEMM of unknown sizes. An assumption: none has been timed on a GPU."""


def limits(config: Config) -> Limits:
    """Return what is generated for a GPU. Tiles are loaded from any layout, and no loop is known to run in order.

    Large-M GEMMs are generated under ``autotune`` alone, which times them against the vendor's.
    """
    tried = TRIED if config.autotune else frozenset()
    return replace(ANY, small_m=config.small_m, many=tried, some=tried, assumed_share=_ASSUMED_SHARE)


def _weight_prologue(contraction: IndexedExpr) -> Iterator[str]:
    """Yield what keeps a right operand from being computed in a block."""
    kinds = ("load", "lookup", "pointwise", "constant", "index")
    return prologue_objections(walk(right for _, right in contraction.pairs), kinds)


def _in_order(nest: LoopNest, shape: Shape) -> Iterator[str]:
    """Yield why a kernel may not scan, sort or scatter as it does."""
    yield from _sort_objections(nest, shape)
    for output in nest.outputs:
        if (node := scatter_of(output)) is not None:
            if shape.reductions or shape.scans:
                yield "a scatter is with reductions or scans in one kernel"
            destination, index = node.operands[0].tensor, node.operands[2]
            elements = index.shape[node.attributes["dim"]]
            yield from scatter_objections(destination, node.attributes["dim"], elements, index.shape)


def _sort_objections(nest: LoopNest, shape: Shape) -> Iterator[str]:
    """Yield why the rows of a kernel are not sorted in tiles, where a lane has one element, in its place."""
    sorts, rows = [i for i in shape.scans if i.kind == "sort"], frozenset(shape.rows)
    for item in sorts:
        x = item.operands[0].value
        yield from tile_objections(x.shape[-1], x.dtype)
        position = item.index[-1]
        if len(position.axes) != 1 or position != Affine.of([(position.axes[0], 1)]):
            yield "elements of a sorted row are read at other places than their own"
        elif not isinstance(position.axes[0].size, int):
            yield f"the size {position.axes[0].size} is not known at compile time"
    if len({item.bound[0].size for item in sorts}) > 1:
        yield "sorts of rows of different lengths have different tiles"
    places = {axis for item in sorts for axis in item.index[-1].axes}
    read = [(r.operands, frozenset(r.bound)) for r in shape.reductions]
    read += [((o.root,), o.axes - rows) for o in nest.outputs]
    for roots, over in read:
        if not set(sorts).isdisjoint(walk(roots)) and (len(over) > 1 or not over <= places):
            yield "a sorted row is read in loops of another one"


def _unpacked_rows(contraction: IndexedExpr) -> int:
    """Return the rows up to which a weight that takes less memory than its elements is unpacked in its matmul."""
    return UNPACKED_ROWS if stored_bits(contraction) < 8 * contraction.operands[1].dtype.bytes else 0


ANY = Limits(
    small_m=1 << 16,
    many=TRIED | {F32},
    few_halves=FEW_ROWS_OF_HALVES,
    byte_products=frozenset({I8}),
    unpacked_rows=_unpacked_rows,
    weight_prologue=_weight_prologue,
    in_order=_in_order,
)
"""Whatever has a schedule, whether it wins or not."""
