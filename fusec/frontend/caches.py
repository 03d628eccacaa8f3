"""Updates of some rows of an input, as key-value caches have them: written in place, not as a new whole."""

from typing import Any

import torch
from torch.fx import Graph, Node

from fusec.frontend.lowering import Lowering
from fusec.frontend.torch_internals import storage_key
from fusec.frontend.views import first_index
from fusec.ir.graph import Node as IrNode
from fusec.ir.graph import Value
from fusec.ir.types import I64, same_shape

_aten = torch.ops.aten
_ROWS = (_aten.index_copy.default, _aten.slice_scatter.default)


class CacheWrites:
    """Finds the row updates whose result is only the new value of the same input."""

    def __init__(self, graph: Graph) -> None:
        self.made: dict[IrNode, None] = {}
        """The writes that stand for a whole update, so that the copy back has nothing to do."""
        nodes = list(graph.nodes)
        position = {node: i for i, node in enumerate(nodes)}
        self.folded = {n for n in nodes if n.target in _ROWS and _is_update_in_place(n, position)}

    def lower(self, node: Node, low: Lowering, values: dict[Node, Any]) -> Value | None:
        """The update as a write; None where it has no such form after all."""
        names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        resolved: dict[str, Any] = {k: values[a] if isinstance(a, Node) else a for k, a in given.items()}
        destination: Value = resolved["self"]
        rank, dim = len(destination.shape), resolved.get("dim", 0)
        if rank == 0:
            return None
        if node.target is _aten.index_copy.default:
            source = resolved["source"]
            index = low.reshape(resolved["index"], (source.shape[dim],))
        else:
            source = resolved["src"]
            if resolved.get("step", 1) != 1 or same_shape(source.shape, destination.shape):
                return None
            first = first_index(resolved.get("start") or 0, destination, dim % rank)
            index = low.emit("iota", size=source.shape[dim], dtype=I64, device=low.device)
            if first != 0:
                index = low.pointwise("add", index, first, dtype=I64)
        source = low.cast(source, destination.dtype)
        result = low.emit("write", destination, source, low.cast(index, I64), dim=dim % rank - rank)
        assert result.producer is not None
        self.made[result.producer] = None
        return result


def _is_update_in_place(node: Node, position: dict[Node, int]) -> bool:
    """Whether the old value is an input that is read only before, and the new value is what that input becomes."""
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
    """Whether nobody reads the view: it only says where new values go."""
    return all(u.target is _aten.copy.default and u.args[0] is view and u.args[1] is not view for u in view.users)
