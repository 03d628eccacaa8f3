"""Scatters in the loops of a kernel: the axes along which tiles of elements may be stored."""

from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr, Output, walk
from fusec.loops.kinds import scatter_of


def may_have_lanes(output: Output, axes: tuple[Axis, ...]) -> bool:
    """Return whether a loop over axes may store an output tile by tile, with lanes along one of them.

    A scatter stores elements in order, also those of a tile.
    """
    node, index = scatter_of(output), output.dynamic_index
    if node is None or index is None or index.value.axes.union(output.index[index.dim].axes).isdisjoint(axes):
        return True
    return len(axes) == 1 and ("combine" in node.attributes or _varying(index.value).issuperset(axes))


def _varying(index: IndexedExpr) -> frozenset[Axis]:
    """Return the axes along which an index may differ; along those of an expanded tensor, of stride 0, it does not."""
    found: set[Axis] = set()
    for item in walk([index]):
        if item.kind == "load":
            parts = zip(item.index, item.value.tensor.strides, strict=True)
            found.update(axis for part, stride in parts if stride != 0 for axis in part.axes)
        elif item.kind != "pointwise":
            found |= item.axes
    return frozenset(found)
