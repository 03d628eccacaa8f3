"""Reductions of ATen as sum, prod, max and min with keepdim, and arithmetic around them."""

from fusec.errors import ImportFailure
from fusec.frontend.lowering import Argument, Call, Lowering, lowers, negative_dims
from fusec.ir.graph import Value
from fusec.ir.types import BOOL, F64, DType, accumulation, product
from fusec.loops.affine import at_least


def _reduce(low: Lowering, op: str, x: Value, dims: tuple[int, ...]) -> Value:
    return low.emit(op, x, dims=dims) if dims else x


@lowers("aten.sum.default", "aten.sum.dim_IntList", "aten.prod.default", "aten.prod.dim_int",
        "aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")  # fmt: skip
def _plain(low: Lowering, call: Call) -> Value:
    op = call.target.split(".")[1].removeprefix("a")
    x = low.cast(call["self"], call.out.dtype)
    dims = negative_dims(call.get("dim"), len(x.shape))
    if op in ("max", "min") and 0 in (x.shape[d] for d in dims):
        raise ImportFailure(f"the {op} of no elements", why="it has no identity: ATen raises when it is called")
    return low.reshape(_reduce(low, op, x, dims), call.out.shape)


@lowers("aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default", "aten.all.dim", "aten.all.dims")
def _quantifier(low: Lowering, call: Call) -> Value:
    op = "max" if "any" in call.target else "min"
    x = low.cast(call["self"], BOOL)
    x = _reduce(low, op, x, negative_dims(call.get("dim"), len(x.shape)))
    return low.cast(low.reshape(x, call.out.shape), call.out.dtype)


@lowers("aten.max.dim", "aten.min.dim")
def _max_dim(low: Lowering, call: Call) -> list[Value | None]:
    if call.used[1]:
        raise ImportFailure("the index of a maximum or minimum", why="reductions return values, not positions")
    x: Value = call["self"]
    op = call.target.split(".")[1]
    return [low.reshape(_reduce(low, op, x, negative_dims(call["dim"], len(x.shape))), call.out.shape), None]


@lowers("aten.mean.default", "aten.mean.dim")
def _mean(low: Lowering, call: Call) -> Value:
    dtype = accumulation(call.out.dtype)
    x = low.cast(call["self"], dtype)
    mean = _mean_of(low, x, negative_dims(call.get("dim"), len(x.shape)), 0, dtype)
    return low.cast(low.reshape(mean, call.out.shape), call.out.dtype)


def _mean_of(low: Lowering, x: Value, dims: tuple[int, ...], correction: Argument, dtype: DType) -> Value:
    count = product(tuple(x.shape[d] for d in dims))
    total = _reduce(low, "sum", x, dims)
    divisor: Argument
    if isinstance(count, int):
        divisor = max(count - correction, 0)
    elif isinstance(correction, int) and at_least(count, correction):
        divisor = count - correction
    else:
        divisor = low.pointwise("maximum", low.pointwise("sub", count, correction, dtype=dtype), 0, dtype=dtype)
    return low.pointwise("div", total, divisor, dtype=dtype)


@lowers("aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "prims.var.default")
def _variance(low: Lowering, call: Call) -> "Value | list[Value | None]":
    """Compute the variance in float64, as eager does: it neither cancels for a mean far from 0, nor overflows."""
    x: Value = call["self"] if "self" in call.arguments else call["inp"]
    dims = negative_dims(call.get("dim", call.get("dims")), len(x.shape))
    correction = 1 if call["correction"] is None else call["correction"]
    out = call.out
    x = low.cast(x, F64)
    mean = _mean_of(low, x, dims, 0, F64)
    centred = low.emit("sub", x, mean)
    variance = _mean_of(low, low.emit("mul", centred, centred), dims, correction, F64)
    if ".std." in call.target:
        variance = low.emit("sqrt", variance)
    result = low.cast(low.reshape(variance, out.shape), out.dtype)
    if "var_mean" not in call.target:
        return result
    return [result, low.cast(low.reshape(mean, out.shape), out.dtype)]
