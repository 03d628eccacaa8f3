"""Rows that are multiplied by matrices chosen at run time, such as tokens by the weights of their experts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from fusec.loops.affine import Axis
from fusec.loops.casts import uncast
from fusec.loops.indexing import DynamicIndex, IndexedExpr, LoopNest, ordered, stride
from fusec.loops.kinds import Shape

_UNPACKED_FROM = ("load", "lookup", "constant", "index")
Pair: TypeAlias = tuple[IndexedExpr, IndexedExpr]
"""A left operand, of rows, and a right operand: looked up in a stack of matrices, or computed from what is."""


@dataclass(frozen=True)
class GroupedProducts:
    """Products of each row with a matrix that its index chooses: rows with the same index form a group."""

    index: DynamicIndex
    count: int
    """The number of matrices."""
    rows: tuple[Axis, ...]
    column: Axis
    products: dict[IndexedExpr, list[Pair]]
    """For each sum of products its operands, one pair for each segment of what it sums over."""


def find_grouped_products(nest: LoopNest, shape: Shape) -> GroupedProducts | None:
    """Return the products of a nest of rows, if all its reductions are sums of products with the same choice."""
    if shape.kind != "row" or shape.scans or any(o.dynamic_index or o.destination is not None for o in nest.outputs):
        return None
    products = {r: pairs for r in shape.reductions if (pairs := _pairs(r))}
    choices = {(i.value, i.length): i for pairs in products.values() for _, right in pairs for i in _choices(right)}
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


def _pairs(reduction: IndexedExpr) -> list[Pair]:
    """Return the pairs of factors that a reduction sums the products of; nothing for any other reduction."""
    if not reduction.node.is_op("sum"):
        return []
    pairs = [pair for x in reduction.operands if (pair := _factors(x)) is not None]
    return pairs if len(pairs) == len(reduction.operands) else []


def _factors(x: IndexedExpr) -> Pair | None:
    """Return the factors of a product, the one that is looked up last."""
    if not (x.kind == "pointwise" and x.node.is_op("mul") and x.dtype.is_float):
        return None
    left, right = map(uncast, x.operands)
    if not _choices(right):
        left, right = right, left
    return (left, right) if _choices(right) else None


def _choices(matrix: IndexedExpr) -> list[DynamicIndex]:
    """Return the indices by which a matrix, or what it is unpacked from, is looked up."""
    return [item.dynamic_index for item in _unpacked_from(matrix) if item.dynamic_index is not None]


def _unpacked_from(matrix: IndexedExpr) -> Iterator[IndexedExpr]:
    """Yield what a matrix is computed from, element by element, also through codebooks."""
    pending, seen = [matrix], {matrix}
    while pending:
        item = pending.pop()
        if item.kind != "pointwise" and not _is_in_codebook(item):
            yield item
            continue
        new = [x for x in item.operands if x not in seen]
        seen.update(new)
        pending += new


def _is_in_codebook(item: IndexedExpr) -> bool:
    return item.dynamic_index is not None and item.value.tensor.rank == 1


def is_stored(matrix: IndexedExpr) -> bool:
    """Return whether a matrix is loaded as it is; any other is computed from what is loaded."""
    return matrix.kind == "lookup" and not _is_in_codebook(matrix)


def _objections(found: GroupedProducts) -> Iterator[bool]:
    """Yield whether a product is no matrix product of the rows of a group."""
    rows, column = set(found.rows), found.column
    for reduction, pairs in found.products.items():
        bound = set(reduction.bound)
        yield not all(isinstance(a.size, int) for a in (column, *bound))
        for left, right in pairs:
            yield not (left.dtype.is_float and right.dtype.is_float)
            yield right.axes != rows | bound | {column} or not bound <= left.axes <= rows | bound
            for x in _unpacked_from(right):
                yield x.kind not in _UNPACKED_FROM or any(rows.intersection(part.axes) for part in x.index)
        if is_stored(right):
            yield len(pairs) > 1 or len(bound) > 1 or 1 not in (stride(right, a) for a in (column, *bound))
