"""Updates of some rows, as of key-value caches: written in place instead of copied."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from fusec.frontend.lowering import Lowering
from fusec.frontend.targets import arguments
from fusec.frontend.torch_internals import storage_key
from fusec.frontend.views import counted_from_start, first_index, joined_rows
from fusec.ir.graph import Node as IrNode
from fusec.ir.graph import Value, base
from fusec.ir.types import I32, I64, same_shape

_aten = torch.ops.aten
_PLACED = (_aten.index_copy.default, _aten.index_put.default)
_ROWS = (*_PLACED, _aten.slice_scatter.default)
_RESHAPES = (_aten.view.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims)
"""Views through which a cache may be updated: all elements, in order."""


class CacheWrites:
    """Finds the row updates whose result is only the new value of the same input, or of a number everywhere.

    The input may be reshaped first, as a pool of pages is to rows. A number everywhere is what becomes of a cache that
    is made in the graph that first writes to it.
    """

    def __init__(self, graph: Graph) -> None:
        self.made: dict[IrNode, None] = {}
        """The writes that replace a whole update, so that the copy back is a no-op."""
        nodes = list(graph.nodes)
        position = {node: i for i, node in enumerate(nodes)}
        self.folded = {n for n in nodes if n.target in _ROWS and _is_update_in_place(n, position)}

    def lower(self, node: Node, low: Lowering, values: dict[Node, Any]) -> Value | None:
        """An update as a write; None where it is none, or has no such form after all."""
        if node not in self.folded and node.target not in _PLACED:
            return None
        given = arguments(node)
        resolved: dict[str, Any] = {k: values[a] if isinstance(a, Node) else a for k, a in given.items()}
        whole: Value = resolved["self"]
        number = base(whole).producer
        if not whole.shape or (node not in self.folded and (number is None or not number.is_op("constant"))):
            return None
        if node.target is _aten.index_put.default:
            found = _placed(low, resolved | {"indices": [i and values[i] for i in resolved["indices"]]})
        else:
            found = (_copied if node.target is _aten.index_copy.default else _sliced)(low, resolved)
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


def _is_update_in_place(node: Node, position: dict[Node, int]) -> bool:
    """Return whether the old value is an input that is read only before, and the new value is copied to that input."""
    old = _before_reshapes(node.args[0])
    if not isinstance(old, Node) or old.op != "placeholder":
        return False
    back = [u for u in old.users if u.target is _aten.copy_.default and u.args[0] is old]
    if len(back) != 1 or _before_reshapes(back[0].args[1]) is not node:
        return False
    readers = [u for u in _readers(old) if u is not node and u is not back[0]]
    return all(u.op != "output" and position[u] < position[node] for u in readers)


def _before_reshapes(value: Any) -> Any:
    """Return the value that a chain of reshapes begins with."""
    while isinstance(value, Node) and value.target in _RESHAPES:
        value = value.args[0]
    return value


def _readers(value: Node) -> Iterator[Node]:
    """Yield the nodes that read a value, also through views."""
    key = storage_key(value.meta.get("val"))
    for user in value.users:
        if user.target is _aten.copy.default and user.args[0] is value and user.args[1] is not value:
            continue  # only overwritten
        fakes = user.meta.get("val")
        shares = any(storage_key(f) == key for f in (fakes if isinstance(fakes, (list, tuple)) else [fakes]))
        if shares and user.op != "output" and user.target is not _aten.copy_.default:
            yield from _readers(user)
        else:
            yield user
