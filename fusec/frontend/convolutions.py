"""Convolutions of ATen: a matrix product where the window has a single element."""

from dataclasses import replace

from fusec.errors import ImportFailure
from fusec.frontend.contractions import LETTERS, product
from fusec.frontend.lowering import Argument, Call, Lowering, lowers
from fusec.ir.graph import Value
from fusec.ir.types import Size


@lowers("aten.convolution.default", "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default")
def _convolution(low: Lowering, call: Call) -> Value:
    x, weight, bias, dtype = call["input"], call["weight"], call["bias"], call.out.dtype
    window = weight.shape[2:]
    if call.get("transposed"):
        raise ImportFailure("a transposed convolution", why="it spreads its input instead of summing over windows")
    if len(x.shape) != len(weight.shape) or not dtype.is_float:
        raise ImportFailure(f"a convolution of {x.type} and {weight.type}", why="batches of floats are expected")
    stride, padding, dilation = (_each(call[name], len(window)) for name in ("stride", "padding", "dilation"))
    if call["groups"] == 1 and not any(padding) and all(n == 1 for n in (*window, *stride)):
        out = _of_one(low, call, x, weight)
    else:
        sizes = {"stride": stride, "padding": padding, "dilation": dilation}
        out = low.emit("convolution", x, weight, **sizes, groups=call["groups"])
        out.type = replace(out.tensor, strides=call.out.strides)
    if bias is None:
        return out
    return low.pointwise("add", out, low.reshape(bias, (bias.shape[0], *(1 for _ in window))), dtype=dtype)


def _each(given: Argument, dims: int) -> tuple[Size, ...]:
    """Return a number for each spatial dim; a single one applies to all."""
    return tuple(given) * (dims if len(given) == 1 else 1)


def _of_one(low: Lowering, call: Call, x: Value, weight: Value) -> Value:
    """Return the matrix product that equals a convolution with windows of one element."""
    places = LETTERS[2 : len(x.shape)]
    weight = low.reshape(weight, weight.shape[:2])
    return product(low, call, f"az{places},bz->ab{places}", x, weight)
