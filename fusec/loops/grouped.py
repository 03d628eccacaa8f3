"""Rows that are multiplied by matrices chosen at run time, such as tokens by the weights of their experts."""

from collections.abc import Iterator
from dataclasses import dataclass

from fusec.loops.affine import Axis
from fusec.loops.casts import uncast
from fusec.loops.indexing import DynamicIndex, IndexedExpr, LoopNest, ordered, stride
from fusec.loops.kinds import Shape


@dataclass(frozen=True)
class GroupedProducts:
    """Products of each row with a matrix that its index chooses: rows with the same index form a group."""

    index: DynamicIndex
    count: int
    """The number of matrices."""
    rows: tuple[Axis, ...]
    column: Axis
    products: dict[IndexedExpr, tuple[IndexedExpr, IndexedExpr]]
    """For each sum of products its left operand, of rows, and its right operand, looked up in a stack of matrices."""


def find_grouped_products(nest: LoopNest, shape: Shape) -> GroupedProducts | None:
    """Return the products of a nest of rows, if all its reductions are sums of products with the same choice."""
    if shape.kind != "row" or shape.scans or any(o.dynamic_index or o.destination is not None for o in nest.outputs):
        return None
    products = {r: pair for r in shape.reductions if (pair := _factors(r)) is not None}
    choices = {(i.value, i.length): i for _, right in products.values() if (i := right.dynamic_index) is not None}
    if len(products) != len(shape.reductions) or len(choices) != 1:
        return None
    (index,) = choices.values()
    rows = ordered(nest, index.value.axes)
    columns = [a for a in shape.rows if a not in rows]
    count = index.length
    if len(columns) != 1 or any(o.axes != {*rows, *columns} for o in nest.outputs) or not isinstance(count, int):
        return None
    found = GroupedProducts(index, count, rows, columns[0], products)
    return None if any(_objections(found)) else found


def _factors(reduction: IndexedExpr) -> tuple[IndexedExpr, IndexedExpr] | None:
    """Return the two factors that a reduction sums the products of, the one that is looked up last."""
    (x,) = reduction.operands
    if not (reduction.node.is_op("sum") and x.kind == "pointwise" and x.node.is_op("mul") and x.dtype.is_float):
        return None
    left, right = map(uncast, x.operands)
    if right.kind != "lookup":
        left, right = right, left
    return (left, right) if right.kind == "lookup" else None


def _objections(found: GroupedProducts) -> Iterator[bool]:
    """Yield whether a product is no matrix product of the rows of a group."""
    rows, column = set(found.rows), found.column
    for reduction, (left, right) in found.products.items():
        bound = set(reduction.bound)
        yield not (left.dtype.is_float and right.dtype.is_float)
        yield len(bound) != 1 or not all(isinstance(a.size, int) for a in (column, *bound))
        yield right.axes != rows | bound | {column} or any(rows.intersection(part.axes) for part in right.index)
        yield not bound <= left.axes <= rows | bound
        yield 1 not in (stride(right, column), *(stride(right, k) for k in bound))
