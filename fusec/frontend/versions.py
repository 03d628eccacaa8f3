"""Versions of an input: updates of all of it or of a part, one after another, that may all be done in place."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from fusec.frontend.sizes import to_size
from fusec.frontend.targets import arguments
from fusec.frontend.torch_internals import storage_key
from fusec.ir.types import same_shape

_aten = torch.ops.aten
PLACED = (_aten.index_copy.default, _aten.index_put.default)
"""Updates of rows at indices that are known at run time."""
SCATTERED = (
    _aten.scatter.src, _aten.scatter.value, _aten.scatter.reduce, _aten.scatter.value_reduce,
    _aten.scatter_add.default, _aten.scatter_reduce.two, _aten.index_add.default, _aten.index_reduce.default,
)  # fmt: skip
"""Updates of elements at such indices; those that combine them with the old ones read no others."""
_ROWS = (*PLACED, *SCATTERED, _aten.slice_scatter.default)
_RESHAPES = (_aten.view.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims)
"""Views through which an input may be updated: all elements, in order."""
_PARTS: dict[Any, Any] = {
    _aten.select_scatter.default: _aten.select.int,
    _aten.slice_scatter.default: _aten.slice.Tensor,
    _aten.as_strided_scatter.default: _aten.as_strided.default,
}
"""By the operation that puts the new value of a part back, the view that the part is."""


@dataclass(frozen=True)
class Update:
    """One update of an input."""

    node: Node
    """It makes the new version from the one before, its first argument."""
    rows: Node
    """It places the rows: the node itself, or one that updates a part of the version, which the node puts back."""


def updates_in_place(graph: Graph) -> Iterator[Update]:
    """Yield the updates of inputs that may overwrite their storage: nothing reads a version after the next is made."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    for old in nodes:
        back = [u for u in old.users if u.target is _aten.copy_.default and u.args[0] is old]
        if old.op != "placeholder" or len(back) != 1:
            continue
        updates = _updates(old, back[0].args[1])
        versions = [old, *(update.node for update in updates or ())]
        if all(_is_read_before(version, new, back[0], position) for version, new in pairwise(versions)):
            yield from updates or ()


def _updates(old: Node, new: Any) -> list[Update] | None:
    """Return the updates that lead from an input to its new value; None where something else does."""
    found: list[Update] = []
    while (new := _before_reshapes(new)) is not old:
        rows = _rows(new, old) if isinstance(new, Node) and new.op == "call_function" else None
        if rows is None:
            return None
        found.insert(0, Update(new, rows))
        new = new.args[0]
    return found


def _is_read_before(version: Node, new: Node, back: Node, position: dict[Node, int]) -> bool:
    """Return whether everything that reads a version comes before the next is made."""
    readers = [u for u in _readers(version) if u is not new and u is not back]
    return all(u.op != "output" and position[u] < position[new] for u in readers)


def _rows(new: Node, old: Node) -> Node | None:
    """Return the node that places rows in a version of an input, of which ``new`` is the next; None where none does.

    Versions lie where the input does, whatever strides torch predicts for what is no update in place.
    """
    if new.target in _PARTS and all(node.meta["val"].is_contiguous() for node in (old, new.args[0])):  # type: ignore[union-attr]
        rows = _rows_of_part(new)
        if rows is not None:
            return rows
    return new if new.target in _ROWS else None


def _rows_of_part(scatter: Node) -> Node | None:
    """Return the node that places rows in a part, which ``scatter`` puts back where it was taken from.

    None where the part comes from elsewhere, or its new value is read on the way.
    """
    whole, new = scatter.args[:2]
    path = [new]
    while isinstance(path[-1], Node) and path[-1].target in _RESHAPES:
        path.append(path[-1].args[0])
    new = path[-1]
    if not isinstance(new, Node) or any(len(node.users) != 1 for node in path):  # type: ignore[union-attr]
        return None
    rows = new if new.target in PLACED else _rows_of_part(new) if new.target in _PARTS else None
    part = _before_reshapes(new.args[0]) if rows is not None else None
    if not isinstance(part, Node) or part.target is not _PARTS[scatter.target] or _place(part) != _place(scatter):
        return None
    taken = part.args[0]
    shapes = (tuple(map(to_size, node.meta["val"].shape)) for node in (taken, whole))  # type: ignore[union-attr]
    return rows if same_shape(*shapes) and _before_reshapes(taken) is _before_reshapes(whole) else None


def _place(node: Node) -> dict[str, Any]:
    """Return where a part of a tensor is."""
    return {name: argument for name, argument in arguments(node).items() if name not in ("self", "src")}


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
