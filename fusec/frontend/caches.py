"""Updates of some rows, as of key-value caches: written in place instead of copied."""

from typing import Any

import torch
from torch.fx import Graph, Node

from fusec.frontend.lowering import Lowering
from fusec.frontend.targets import arguments
from fusec.frontend.torch_internals import storage_key
from fusec.frontend.views import counted_from_start, first_index
from fusec.ir.graph import Node as IrNode
from fusec.ir.graph import Value, base
from fusec.ir.types import I32, I64, same_shape

_aten = torch.ops.aten
_PLACED = (_aten.index_copy.default, _aten.index_put.default)
_ROWS = (*_PLACED, _aten.slice_scatter.default)


class CacheWrites:
    """Finds the row updates whose result is only the new value of the same input, or of a number everywhere.

    The second is what becomes of a cache that is made in the graph that first writes to it.
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
        destination: Value = resolved["self"]
        rank, dim = len(destination.shape), resolved.get("dim", 0)
        number = base(destination).producer
        if rank == 0 or (node not in self.folded and (number is None or not number.is_op("constant"))):
            return None
        if node.target is _aten.index_copy.default:
            source = resolved["source"]
            index = low.reshape(resolved["index"], (source.shape[dim],))
        elif node.target is _aten.index_put.default:
            places = {d: values[i] for d, i in enumerate(resolved["indices"]) if i is not None}
            if len(places) != 1 or resolved.get("accumulate", False):
                return None
            ((dim, index),) = places.items()
            if index.dtype not in (I32, I64):
                return None
            source, index = _placed(low, destination, dim, index, resolved["values"])
        else:
            source = resolved["src"]
            if resolved.get("step", 1) != 1 or same_shape(source.shape, destination.shape):
                return None
            first = first_index(resolved.get("start") or 0, destination, dim % rank)
            index = low.emit("iota", size=source.shape[dim], dtype=I64, device=low.device)
            if first != 0:
                index = low.pointwise("add", index, first, dtype=I64)
        source = low.cast(source, destination.dtype)
        if node not in self.folded:
            assert number is not None
            filled = {"value": number.attributes["value"], "shape": destination.shape, "dtype": destination.dtype}
            destination = low.emit("full", **filled, device=low.device)
        result = low.emit("write", destination, source, low.cast(index, I64), dim=dim % rank - rank)
        assert result.producer is not None
        self.made[result.producer] = None
        return result


def _placed(low: Lowering, destination: Value, dim: int, index: Value, source: Value) -> tuple[Value, Value]:
    """Return rows for a dim and their indices; indices may have any rank and be negative."""
    n, count = destination.shape[dim], index.tensor.numel
    before, behind = destination.shape[:dim], destination.shape[dim + 1 :]
    source = low.expand(low.cast(source, destination.dtype), (*before, *index.shape, *behind))
    index = low.reshape(low.cast(index, I64), (count,))
    return low.reshape(source, (*before, count, *behind)), counted_from_start(low, index, n)


def _is_update_in_place(node: Node, position: dict[Node, int]) -> bool:
    """Return whether the old value is an input that is read only before, and the new value is copied to that input."""
    old = node.args[0]
    if not isinstance(old, Node) or old.op != "placeholder":
        return False
    back = [u for u in node.users if u.target is _aten.copy_.default and u.args[0] is old and u.args[1] is node]
    if len(back) != 1:
        return False
    readers = [u for u in old.users if u is not node and u is not back[0]]
    storage = storage_key(old.meta.get("val"))
    return all(
        position[u] < position[node] and u.op != "output" and (not _shares(u, storage) or _is_only_overwritten(u))
        for u in readers
    ) and sum(u.target is _aten.copy_.default for u in old.users if u.args[0] is old) == 1  # fmt: skip


def _shares(node: Node, storage: int | None) -> bool:
    fakes = node.meta.get("val")
    return any(storage_key(f) == storage for f in (fakes if isinstance(fakes, (list, tuple)) else [fakes]))


def _is_only_overwritten(view: Node) -> bool:
    """Return whether a view is only a destination: nobody reads it."""
    return all(u.target is _aten.copy.default and u.args[0] is view and u.args[1] is not view for u in view.users)
