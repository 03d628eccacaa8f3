"""Rows that are sorted, computed one by one and put back in order: the order makes no difference.

Models sort tokens by expert for libraries whose grouped GEMM wants the rows of a group together. A generated kernel
groups them by itself.
"""

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import I32, I64, same_size
from fusec.loops.casts import uncast_value
from fusec.loops.intervals import interval
from fusec.loops.sorts import sort_of
from fusec.passes.canonicalize.numbers import number_throughout
from fusec.passes.canonicalize.rows import RowsOf, dim_before
from fusec.rewriting.driver import simplifies


@simplifies("sum", conditional=True)
def groups_of_sorted_rows(graph: Graph, node: Node) -> Value | None:
    """The group of a sorted row, counted as the groups that end before it, is what the rows are sorted by.

    The ends are cumulative sums of a histogram of the groups.
    """
    compared = uncast_value(node.operands[0]).producer
    if node.attributes["dims"] != (-1,) or node.result.dtype != I64 or compared is None or not compared.is_op("le"):
        return None
    ends, position = (_line(x, dim) for x, dim in zip(compared.operands, (-1, -2), strict=True))
    groups = None if ends is None else _histogrammed(ends)
    rows = None if position is None else position.producer
    if ends is None or groups is None or rows is None or not rows.is_op("iota"):
        return None
    if compared.result.tensor.rank != 2 or not same_size(rows.result.shape[0], groups.shape[0]):
        return None
    numbers = groups if groups.dtype == I64 else graph.add_node("cast", [groups], {"dtype": I64}).result
    last = graph.constant(ends.shape[0], I64, groups.tensor.device)
    found = graph.add_node("minimum", [numbers, last]).result
    return graph.add_node("reshape", [found], {"shape": node.result.shape}).result


def _line(value: Value, dim: int) -> Value | None:
    """Return the numbers that lie along a dim of a value, counted from the end, and repeat along others."""
    value = uncast_value(value)
    node = value.producer
    if value.tensor.rank < -dim or node is None:
        return None
    if node.is_op("expand"):
        (source,) = node.operands
        whole = source.tensor.rank >= -dim and same_size(source.shape[dim], value.shape[dim])
        return _line(source, dim) if whole else None
    if node.is_op("reshape"):
        (source,) = node.operands
        before = dim_before(value, dim, source)
        alone = same_size(source.tensor.numel, value.shape[dim])
        return _line(source, before) if alone and before is not None else None
    return value if value.tensor.rank == 1 else None


def _histogrammed(ends: Value) -> Value | None:
    """Return the sorted numbers of groups, none of them negative, that have these ends."""
    sums = ends.producer
    if sums is None or not sums.is_op("cumsum") or ends.tensor.rank != 1:
        return None
    if ends.dtype not in (I32, I64):  # others do not hold the number of all rows
        return None
    bins = sums.operands[0].producer
    if bins is not None and bins.is_op("cast"):
        bins = bins.operands[0].producer
    if bins is None or not _calls(bins, "aten.histc.default") or bins.result.tensor.rank != 1:
        return None
    (count,) = bins.result.shape
    groups = uncast_value(bins.operands[0])
    sort = _sorting(groups)
    values = interval(sort.operands[0]) if sort else None
    whole = bins.attributes["args"][1:] == (count, 0, count - 1) and count > 1  # a range of one number is not a range
    return groups if whole and values is not None and values[0] >= 0 else None


@simplifies("take")
def counted_rows(graph: Graph, node: Node) -> Value | None:
    """A lookup of all rows in order, each once or several times in succession, is no lookup."""
    (table, indices), dim = node.operands, node.attributes["dim"]
    times, rows = 1, indices.producer
    if rows is not None and rows.is_op("floor_divide"):
        number = number_throughout(rows.operands[1])
        times, rows = int(number or 0), rows.operands[0].producer
    n, lead = table.shape[dim], table.tensor.rank + dim
    if rows is None or not rows.is_op("iota") or times < 1 or not same_size(indices.shape[0], n * times):
        return None
    if times == 1:
        return table
    before, behind = table.shape[: lead + 1], table.shape[lead + 1 :]
    apart = graph.add_node("reshape", [table], {"shape": (*before, 1, *behind)}).result
    repeated = graph.add_node("expand", [apart], {"shape": (*before, times, *behind)}).result
    return graph.add_node("reshape", [repeated], {"shape": node.result.shape}).result


@simplifies("take", conditional=True)
def restored_order(graph: Graph, node: Node) -> Value | None:
    """Rows are computed in their own order, instead of sorted and put back."""
    table, indices = node.operands
    sort = _sort_inverted_by(indices)
    if sort is None or not same_size(table.shape[node.attributes["dim"]], indices.shape[0]):
        return None
    rows = RowsOf(graph, indices.shape[0], lambda value, dim: _before_sorting(graph, sort, value))
    return rows.of(table, node.attributes["dim"])


def _sort_inverted_by(indices: Value) -> Node | None:
    """Return the sort whose permutation some indices invert: permutation[i] holds i."""
    write = indices.producer
    if write is None or not write.has(Trait.WRITE) or "dim" not in write.attributes or indices.tensor.rank != 1:
        return None
    if "combine" in write.attributes:
        return None
    _, values, positions = write.operands
    count, sort = values.producer, _sort_of(positions)
    complete = count is not None and count.is_op("iota") and same_size(indices.shape[0], positions.shape[0])
    return sort if complete else None


def _before_sorting(graph: Graph, sort: Node, value: Value) -> Value | None:
    """Return where row i of a sort came from with row i itself: i."""
    if value.producer is not sort:
        return None
    attributes = {"size": value.shape[0], "dtype": value.dtype, "device": value.tensor.device}
    return graph.add_node("iota", [], attributes).result


def _sorting(value: Value) -> Node | None:
    """Return the sort that a value holds the elements of."""
    sort = None if value.producer is None else sort_of(value.producer)
    return None if sort is None or value is sort.result else _sort_of(sort.result)


def _sort_of(order: Value) -> Node | None:
    """Return the sort of one dim, smallest first, that a value is the whole order of."""
    node = order.producer
    if node is None or not node.is_op("argsort") or order.tensor.rank != 1 or node.attributes["descending"]:
        return None
    return node if same_size(order.shape[0], node.operands[0].shape[0]) else None


def _calls(node: Node, target: str) -> bool:
    return node.is_op("opaque") and node.attributes["target"] == target
