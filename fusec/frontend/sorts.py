"""Scans and sorts of ATen."""

from fusec.errors import ImportFailure
from fusec.frontend.lowering import Call, Lowering, lowers
from fusec.ir.graph import Value
from fusec.ir.types import Size
from fusec.loops.sorts import tile_objections


@lowers("aten.cumsum.default", "aten.cumprod.default")
def _scan(low: Lowering, call: Call) -> Value:
    x = low.cast(call["self"], call.out.dtype)
    rank = len(x.shape)
    return low.emit(call.target.split(".")[1], x, dim=call["dim"] % rank - rank) if rank else x


@lowers("aten.sort.default", "aten.sort.stable")
def _sort(low: Lowering, call: Call) -> list[Value | None]:
    x: Value = call["self"]
    return list(_first(low, call, x.shape[call["dim"]] if x.shape else 1, call["descending"]))


@lowers("aten.topk.default")
def _topk(low: Lowering, call: Call) -> list[Value | None]:
    """Lower a selection; any order of it is right where it need not be sorted.

    On GPUs one that no kernel makes stays whole: ATen finds few elements of a long row faster than it sorts it.
    """
    x: Value = call["self"]
    length = x.shape[call["dim"]] if x.shape else 1
    if low.device != "cpu" and (why := next(tile_objections(length, x.dtype), "")):
        raise ImportFailure(f"a selection on {low.device}", why=why)
    return list(_first(low, call, call["k"], call["largest"]))


def _first(low: Lowering, call: Call, count: Size, descending: bool) -> tuple[Value, Value]:
    """Return the first elements in order, and where they are."""
    x: Value = call["self"]
    rank = len(x.shape)
    if rank == 0:
        raise ImportFailure("a sort of a single number", why="it has no dim")
    dims = list(range(rank))
    dims[call["dim"]], dims[-1] = dims[-1], dims[call["dim"]]
    swapped = dims != sorted(dims)
    rows = low.emit("permute", x, dims=tuple(dims)) if swapped else x
    places = low.emit("argsort", rows, descending=descending, count=count)
    found = low.emit("take" if rank == 1 else "gather", rows, places, dim=-1)
    if swapped:
        found, places = (low.emit("permute", v, dims=tuple(dims)) for v in (found, places))
    return found, places
