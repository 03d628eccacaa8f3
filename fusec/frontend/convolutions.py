"""Convolutions of ATen: a matrix product where windows tile the input (patch embedding), a convolution otherwise."""

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
    plain = call["groups"] == 1 and not any(padding) and all(d == 1 for d in dilation)
    if plain and stride == window and all(isinstance(n, int) for n in window):
        out = _tiled(low, call, x, weight)
    else:
        sizes = {"stride": stride, "padding": padding, "dilation": dilation}
        out = low.emit("convolution", x, weight, **sizes, groups=call["groups"])
        out.type = replace(out.tensor, strides=call.out.strides)
    if bias is None:
        return out
    return low.pointwise("add", out, low.reshape(bias, (bias.shape[0], *(1 for _ in window))), dtype=dtype)


def _each(given: Argument, dims: int) -> tuple[Size, ...]:
    """A number for each spatial dim; one may stand for all."""
    return tuple(given) * (dims if len(given) == 1 else 1)


def _tiled(low: Lowering, call: Call, x: Value, weight: Value) -> Value:
    """The matrix product that a convolution is whose windows lie side by side."""
    window, counts = weight.shape[2:], call.out.shape[2:]
    for dim, (count, size) in enumerate(zip(counts, window, strict=True), 2):
        x = low.slice(x, dim, 0, count * size)
    places = LETTERS[2 : 2 + len(window)]
    inner = tuple(at if n != 1 else "" for at, n in zip("yxw", window, strict=False))
    sizes = [(n, k)[: 1 + len(at)] for n, k, at in zip(counts, window, inner, strict=True)]
    x = low.reshape(x, (*x.shape[:2], *(n for pair in sizes for n in pair)))
    weight = low.reshape(weight, (*weight.shape[:2], *(n for n in window if n != 1)))
    apart = "".join(place + at for place, at in zip(places, inner, strict=True))
    return product(low, call, f"az{apart},bz{''.join(inner)}->ab{places}", x, weight)
