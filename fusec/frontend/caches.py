"""Updates of some rows, as of key-value caches: written in place instead of copied."""

from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from fusec.frontend.lowering import Lowering
from fusec.frontend.targets import arguments
from fusec.frontend.versions import PLACED, SCATTERED, updates_in_place
from fusec.frontend.views import counted_from_start, first_index, joined_rows
from fusec.ir.graph import Node as IrNode
from fusec.ir.graph import Value, base, storage
from fusec.ir.types import BOOL, I32, I64, contiguous_strides, product, same_shape

_aten = torch.ops.aten


class CacheWrites:
    """Finds the row updates whose result is only the new value of the same input, or of a number everywhere.

    The input may be reshaped first, as a pool of pages is to rows, or only a part of it updated, as one of two stacked
    caches is. It may be updated several times. A number everywhere is what becomes of a cache that is made in the graph
    that first writes to it.
    """

    def __init__(self, graph: Graph) -> None:
        self.made: dict[IrNode, None] = {}
        """The writes that replace a whole update, so that the copy back is a no-op."""
        self.folded = {update.node: update.rows for update in updates_in_place(graph)}
        """By the node that makes the new value of all of an input, the one that places rows in it, or in a part."""

    def lower(self, node: Node, low: Lowering, values: dict[Node, Any]) -> Value | None:
        """An update as a write; None where it is none, or has no such form after all."""
        rows = self.folded.get(node, node)
        if (node not in self.folded and node.target not in PLACED) or node.target in SCATTERED:
            return None
        given = _resolved(rows, values) | {"self": values[node.args[0]]}  # type: ignore[index]
        whole: Value = given["self"]
        if node in self.folded and storage(whole).producer is not None:
            return None  # an update before it was none in place
        if rows is node and node.target is _aten.slice_scatter.default and _is_put_back(given):
            return whole
        number = base(whole).producer
        if not whole.shape or (node not in self.folded and (number is None or not number.is_op("constant"))):
            return None
        if rows is not node:
            found = _placed_in_part(low, given, *(n.args[0].meta["val"] for n in (rows, node)))  # type: ignore[union-attr]
        elif node.target is _aten.index_put.default:
            found = _placed(low, given)
        else:
            found = (_copied if node.target is _aten.index_copy.default else _sliced)(low, given)
        if found is None:
            return None
        destination, dim, index, source = found
        source = low.cast(source, destination.dtype)
        if node not in self.folded:
            assert number is not None
            filled = {"value": number.attributes["value"], "shape": destination.shape, "dtype": destination.dtype}
            destination = low.emit("full", **filled, device=low.device)
        result = low.emit("write", destination, source, low.cast(index, I64), dim=dim - len(destination.shape))
        assert result.producer is not None
        self.made[result.producer] = None
        return low.reshape(result, whole.shape)


def _is_put_back(given: dict[str, Any]) -> bool:
    """Return whether ``slice_scatter`` puts rows where they were taken from, as functionalized ``x[1:] += y`` does."""
    whole, taken = given["self"], given["src"].producer
    if taken is None or not taken.is_op("slice") or taken.operands[0] is not whole:
        return False
    rank, at = len(whole.shape), taken.attributes
    dim, start = given["dim"] % rank, given["start"] or 0
    return (at["dim"], at["start"], at["step"]) == (dim - rank, first_index(start, whole, dim), given["step"])


def _resolved(node: Node, values: dict[Node, Any]) -> dict[str, Any]:
    """Return the arguments of a node by name, those from the graph as imported."""

    def value(argument: Any) -> Any:
        return values[argument] if isinstance(argument, Node) else argument

    given = {name: value(argument) for name, argument in arguments(node).items()}
    return given | ({"indices": [i and values[i] for i in given["indices"]]} if "indices" in given else {})


_Rows: TypeAlias = tuple[Value, int, Value, Value]
"""A destination, one of its dims, the indices along it, and the rows that are placed there."""


def _copied(low: Lowering, given: dict[str, Any]) -> _Rows:
    """Return what ``index_copy`` updates."""
    destination, source = given["self"], given["source"]
    dim = given["dim"] % len(destination.shape)
    return destination, dim, low.reshape(given["index"], (source.shape[dim],)), source


def _sliced(low: Lowering, given: dict[str, Any]) -> _Rows | None:
    """Return what ``slice_scatter`` updates; None where that is no row, or all of them."""
    destination, source = given["self"], given["src"]
    if given.get("step", 1) != 1 or same_shape(source.shape, destination.shape):
        return None
    dim = given.get("dim", 0) % len(destination.shape)
    first = first_index(given.get("start") or 0, destination, dim)
    index = low.emit("iota", size=source.shape[dim], dtype=I64, device=low.device)
    return destination, dim, index if first == 0 else low.pointwise("add", index, first, dtype=I64), source


def _placed(low: Lowering, given: dict[str, Any]) -> _Rows | None:
    """Return what ``index_put`` updates; indices may have any rank, and be negative. None for masks and sums."""
    destination, places = given["self"], {d: i for d, i in enumerate(given["indices"]) if i is not None}
    if not places or any(i.dtype not in (I32, I64) for i in places.values()) or given.get("accumulate", False):
        return None
    dim, *more = places
    if more:
        if (joined := joined_rows(low, destination, places)) is None:
            return None
        destination, index = joined
    else:
        index = counted_from_start(low, low.cast(places[dim], I64), destination.shape[dim])
    count, before, behind = index.tensor.numel, destination.shape[:dim], destination.shape[dim + 1 :]
    source = low.expand(low.cast(given["values"], destination.dtype), (*before, *index.shape, *behind))
    return destination, dim, low.reshape(index, (count,)), low.reshape(source, (*before, count, *behind))


def _placed_in_part(low: Lowering, given: dict[str, Any], part: torch.Tensor, whole: torch.Tensor) -> _Rows | None:
    """Return what an update of a part does to the whole, whose rows are those of the part, counted from its start.

    None where the indexed dims are not next to each other, or a row is not contiguous in memory.

    Args:
        low: takes the indices.
        given: arguments of the update by name; ``self`` is the whole.
        part: its shape and strides.
        whole: the same of the whole, which is contiguous.
    """
    offset = part.storage_offset() - whole.storage_offset()
    if not all(isinstance(n, int) for n in (*part.shape, *part.stride(), offset, whole.numel())):
        return None  # before any of torch's symbolic sizes becomes a constant, which would fix it by a guard
    along = _indices(low, given, part)
    if along is None:
        return None
    first, last = min(along), max(along)
    row = part.shape[last + 1 :]
    size = int(product(row))
    steps = (*part.stride()[: last + 1], offset, whole.numel())
    dense = zip(row, part.stride()[last + 1 :], contiguous_strides(row), strict=True)
    if not size or any(n != 1 and stride != own for n, stride, own in dense) or any(n % size for n in steps):
        return None
    rank = first + max(len(index.shape) for index in along.values())
    place, inside = low.number(offset // size, I64), low.number(True, BOOL)
    for d in range(last + 1):
        if d in along:
            index = along[d]
            for op, end in (("ge", 0), ("lt", part.shape[d])):
                inside = low.emit("and", inside, low.pointwise(op, index, end, dtype=I64))
        else:
            index = low.emit("iota", size=part.shape[d], dtype=I64, device=low.device)
            index = low.reshape(index, (part.shape[d], *(1,) * (rank - d - 1)))
        place = low.emit("add", place, low.pointwise("mul", index, part.stride(d) // size, dtype=I64))
    place = low.emit("where", inside, place, low.number(-1, I64))
    count = product(place.shape)
    rows = low.reshape(given["self"], (whole.numel() // size, *row))
    source = given["source"] if "source" in given else given["values"]
    source = low.expand(low.cast(source, rows.dtype), (*place.shape, *row))
    return rows, 0, low.reshape(place, (count,)), low.reshape(source, (count, *row))


def _indices(low: Lowering, given: dict[str, Any], part: torch.Tensor) -> dict[int, Value] | None:
    """Return the indices of an update by dim, counted from the start; None for masks, sums, and dims that are apart."""
    if "index" in given:
        dim = given["dim"] % part.ndim
        return {dim: low.reshape(low.cast(given["index"], I64), (product(given["index"].shape),))}
    places = {d: i for d, i in enumerate(given["indices"]) if i is not None}
    if not places or any(i.dtype not in (I32, I64) for i in places.values()) or given["accumulate"]:
        return None
    if len(places) != max(places) - min(places) + 1:
        return None
    return {d: counted_from_start(low, low.cast(i, I64), part.shape[d]) for d, i in places.items()}
