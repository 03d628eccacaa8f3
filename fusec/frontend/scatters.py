"""Scatters of ATen: a copy of the old value is updated, in order."""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

from fusec.errors import ImportFailure
from fusec.frontend.lowering import Call, Lowering, lowers
from fusec.frontend.views import counted_from_start, joined_rows, replaced_at
from fusec.ir.graph import Value, base, storage
from fusec.ir.types import BF16, BOOL, F16, F32, I32, I64, DType, contiguous_strides, product, same_shape
from fusec.loops.intervals import range_of
from fusec.loops.serial import scatter_objections

_REPLACING = ("aten.scatter.src", "aten.scatter.value")
_SCATTERS = ("aten.scatter_add.default", "aten.scatter.reduce", "aten.scatter.value_reduce", "aten.scatter_reduce.two")
_ROWS = ("aten.index_add.default", "aten.index_reduce.default")
_PUTS = ("aten.index_put.default", "aten._unsafe_index_put.default")
UPDATES = frozenset((*_REPLACING, *_SCATTERS, *_ROWS, *_PUTS))
_COMBINE = {"sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "maximum", "amin": "minimum"}
"""The operation by which elements are combined, by torch's name for it; ``mean`` is a sum that is divided."""
_ONE_BIT = {"add": "maximum", "mul": "minimum"}
"""The same of booleans."""


@dataclass(frozen=True)
class _Places:
    """The places of the elements of a scatter: their indices along a dim."""

    index: Value
    dim: int
    """Negative."""
    error: str = ""
    """The exception of an index that is out of range, where it is not that of a scatter."""


@lowers(*_REPLACING)
def _scatter(low: Lowering, call: Call) -> Value:
    x, value, places = _elements(low, call)
    return _into(low, x, value, places, covered=_covers(places, x))


@lowers(*_SCATTERS)
def _scatter_reduce(low: Lowering, call: Call) -> Value:
    x, value, places = _elements(low, call)
    return _reduced(low, x, value, places, call.get("reduce", "sum"), call.get("include_self", True))


@lowers(*_ROWS)
def _index_add(low: Lowering, call: Call) -> Value:
    x, source, alpha = call["self"], call["source"], call.get("alpha", 1)
    if isinstance(alpha, float) and not x.dtype.is_float:
        raise ImportFailure(f"alpha {alpha} of {x.dtype}", why="eager raises an error")
    is_plain = isinstance(alpha, int) and alpha == 1
    if not is_plain:
        dtype = _sums_in(x.dtype)
        source = low.emit("and" if dtype == BOOL else "mul", low.cast(source, dtype), low.operand(alpha, dtype))
    if len(x.shape) > 1 and 0 in (x.tensor.numel, source.tensor.numel):
        return x  # eager does not read the index
    dim = call["dim"] % max(len(x.shape), 1)
    rows, source = (low.reshape(value, value.shape or (1,)) for value in (x, source))
    index = _along(low, low.cast(call["index"], I64), dim, source.shape)
    scatters = is_plain and len(rows.shape) > 1 and "reduce" not in call.arguments and call["index"].dtype == I64
    places = _Places(index, dim - len(rows.shape), "" if scatters else "IndexError")  # as eager's two loops do
    total = _reduced(low, rows, source, places, call.get("reduce", "sum"), call.get("include_self", True))
    return low.reshape(total, x.shape)


@lowers(*_PUTS)
def _index_put(low: Lowering, call: Call) -> Value:
    return _added_at(low, call) if call["accumulate"] else replaced_at(low, call)


def _added_at(low: Lowering, call: Call) -> Value:
    """Return a tensor to which values are added at places, given by index tensors for one dim or several."""
    x: Value = call["self"]
    given = {d: index for d, index in enumerate(call["indices"]) if index is not None}
    if any(index.dtype not in (I32, I64) for index in given.values()) or not given:
        raise ImportFailure("a sum at the places of a mask", why="they are known only at run time")
    dim, *more = given
    rows, index = x, low.cast(given[dim], I64)
    if more:
        joined = joined_rows(low, x, given)
        if joined is None:
            raise ImportFailure("a sum at indices of several dims", why="they are not one dim in memory")
        rows, index = joined
    else:
        index = counted_from_start(low, index, x.shape[dim])
    before, behind, count = rows.shape[:dim], rows.shape[dim + 1 :], product(index.shape)
    value = low.expand(low.cast(call["values"], x.dtype), (*before, *index.shape, *behind))
    value = low.reshape(value, (*before, count, *behind))
    places = _Places(_along(low, index, dim, value.shape), dim - len(rows.shape), "IndexError")
    return low.reshape(_reduced(low, rows, value, places), x.shape)


@lowers("aten.embedding_dense_backward.default")
def _embedding_backward(low: Lowering, call: Call) -> Value:
    gradient, padding = call["grad_output"], call["padding_idx"]
    dtype = gradient.dtype
    if call["scale_grad_by_freq"]:
        raise ImportFailure("gradients that are divided by counts", why="they are rarely asked for")
    if _sums_in(dtype) != dtype:
        raise ImportFailure(f"a sum of rows of {dtype}", why="it would take a copy of the whole table in f32")
    count, width = product(call["indices"].shape), gradient.shape[-1]
    rows = low.reshape(gradient, (count, width))
    index = low.reshape(low.cast(call["indices"], I64), (count,))
    if padding != -1:
        is_kept = low.reshape(low.pointwise("ne", index, padding, dtype=I64), (count, 1))
        rows = low.emit("where", is_kept, rows, low.number(0, dtype))
    table = low.expand(low.number(0, dtype), (call["num_weights"], width))
    return _into(low, table, rows, _Places(_along(low, index, 0, rows.shape), -2), "add")


@lowers("aten.histc.default")
def _histogram(low: Lowering, call: Call) -> Value:
    why = "canonicalization looks for it where rows are sorted by expert, and elsewhere it is short"
    raise ImportFailure("a histogram", why=why)


def updates_storage(call: Call) -> bool:
    """Return whether the lowering of a call may scatter into the storage of its tensor."""
    x: Value = call["self"]
    if x.tensor.device != "cpu" or x.dtype.kind == "other" or not x.shape or not call.get("accumulate", True):
        return False
    others = (v for name, given in call.arguments.items() if name != "self" for v in _listed(given))
    if any(isinstance(v, Value) and storage(v) is storage(x) for v in others):
        return False  # a kernel would read what it writes
    reduce = "" if call.target in _REPLACING else call.get("reduce", "sum")
    is_exact = _sums_in(x.dtype) == x.dtype or _COMBINE.get(reduce) not in _ONE_BIT
    return reduce != "mean" and is_exact


def _listed(given: Any) -> list[Any]:
    return [*given] if isinstance(given, (list, tuple)) else [given]


def _elements(low: Lowering, call: Call) -> tuple[Value, Value, _Places]:
    """Return a tensor, the elements that are scattered into it, and their places."""
    x: Value = call["self"]
    rank = len(x.shape)
    index = low.cast(call["index"], I64)
    if rank == 0 or len(index.shape) != rank:
        raise ImportFailure("a scatter in or by a 0-d tensor", why="it has no dim to index")
    if "src" in call.arguments:
        value: Value = call["src"]
        for d, n in enumerate(index.shape):
            value = low.slice(value, d, 0, n)
    else:
        value = low.expand(low.reshape(low.operand(call["value"], x.dtype), ()), index.shape)
    return x, value, _Places(index, call["dim"] % rank - rank)


def _along(low: Lowering, index: Value, dim: int, shape: tuple[Any, ...]) -> Value:
    """Return the indices of rows as those of all their elements."""
    return low.expand(low.reshape(index, (shape[dim], *(1 for _ in shape[dim + 1 :]))), shape)


def _reduced(
    low: Lowering, x: Value, value: Value, places: _Places, reduce: str = "sum", include_self: bool = True
) -> Value:
    """Return a tensor whose elements are combined with those that are scattered to their places.

    Half types are summed in f32 and rounded once, as most of eager's loops do; the others are less exact.
    """
    if x.dtype.kind == "other":
        raise ImportFailure(f"a scatter of {x.dtype}", why="arithmetic is on floats, integers and booleans")
    combine = "add" if reduce == "mean" else _COMBINE[reduce]
    dtype = _sums_in(x.dtype) if combine in _ONE_BIT else x.dtype
    combine = _ONE_BIT.get(combine, combine) if dtype == BOOL else combine
    x, value = low.cast(x, dtype), low.cast(value, dtype)
    if not include_self:
        first = low.number(_identity(combine, dtype), dtype)
        x = _into(low, x, low.expand(first, value.shape), places)
    total = _into(low, x, value, places, combine)
    if reduce != "mean":
        return total
    one = low.number(1, dtype)
    counts = low.expand(one if include_self else low.number(0, dtype), x.shape)
    counts = _into(low, counts, low.expand(one, value.shape), places, combine)
    return low.emit("div" if dtype.is_float else "floor_divide", total, low.emit("maximum", counts, one))


def _sums_in(dtype: DType) -> DType:
    return F32 if dtype in (BF16, F16) else dtype


def _identity(combine: str, dtype: DType) -> float | int | bool:
    """Return the number that leaves those that it is combined with as they are."""
    if combine in _ONE_BIT:
        return 0 if combine == "add" else 1
    ends = (-inf, inf) if dtype.is_float else range_of(dtype)
    return ends[combine == "minimum"]


def _into(low: Lowering, x: Value, value: Value, places: _Places, combine: str = "", covered: bool = False) -> Value:
    """Scatter into a copy of a tensor, of which nothing is left if it is ``covered``."""
    require_order(low, x, value, places.dim)
    attributes = {name: word for name, word in (("combine", combine), ("error", places.error)) if word}
    if low.overwritten is not None and storage(x) is low.overwritten:
        return low.emit("scatter", x, value, places.index, dim=places.dim, **attributes)
    number = base(x).producer
    is_number = number is not None and number.is_op("constant")
    filled = number.attributes["value"] if number is not None and is_number else 0
    destination = low.emit("full", value=filled, shape=x.shape, dtype=x.dtype, device=low.device)
    if not is_number and not covered:
        destination = low.emit("write", destination, x)
    return low.emit("scatter", destination, value, places.index, dim=places.dim, **attributes)


def require_order(low: Lowering, x: Value, value: Value, dim: int) -> None:
    """Refuse a scatter into a copy of a tensor whose elements a GPU does not take in order.

    Raises:
        ImportFailure: where the present device is no CPU.
    """
    if low.device != "cpu":
        copied = replace(x.tensor, strides=contiguous_strides(x.shape))
        why = next(scatter_objections(copied, dim, value.shape[dim], value.shape), "")
        if why:
            raise ImportFailure(f"a scatter on {low.device}", why=why)


def _covers(places: _Places, x: Value) -> bool:
    """Return whether an index is known to have each place along a dim once, as the order of sorted elements has."""
    node = places.index.producer
    return node is not None and node.is_op("argsort") and places.dim == -1 and same_shape(node.result.shape, x.shape)
