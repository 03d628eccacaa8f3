"""Scatters of ATen: a copy of the old value is updated. Only on CPUs, where the order of updates is known."""

from fusec.errors import ImportFailure
from fusec.frontend.lowering import Call, Lowering, lowers, require_cpu
from fusec.ir.graph import Value, base
from fusec.ir.types import I64, same_shape


@lowers("aten.scatter.src", "aten.scatter.value")
def _scatter(low: Lowering, call: Call) -> Value:
    x: Value = call["self"]
    rank = len(x.shape)
    index = low.cast(call["index"], I64)
    require_cpu(low, "scatter")
    if rank == 0 or len(index.shape) != rank:
        raise ImportFailure("a scatter in or by a 0-d tensor", why="it has no dim to index")
    dim = call["dim"] % rank - rank
    if "src" in call.arguments:
        value: Value = call["src"]
        for d, n in enumerate(index.shape):
            value = low.slice(value, d, 0, n)
    else:
        value = low.expand(low.reshape(low.operand(call["value"], x.dtype), ()), index.shape)
    number = base(x).producer
    is_number = number is not None and number.is_op("constant")
    filled = number.attributes["value"] if number is not None and is_number else 0
    destination = low.emit("full", value=filled, shape=x.shape, dtype=x.dtype, device=low.device)
    if not is_number and not _covers(index, x, dim):
        destination = low.emit("write", destination, x)
    return low.emit("scatter", destination, value, index, dim=dim)


def _covers(index: Value, x: Value, dim: int) -> bool:
    """Return whether an index is known to have each place along a dim once, as the order of sorted elements has."""
    node = index.producer
    return node is not None and node.is_op("argsort") and dim == -1 and same_shape(index.shape, x.shape)
