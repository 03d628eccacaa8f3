"""Matrix products of ATen as contractions."""

from fusec.errors import ImportFailure
from fusec.frontend.lowering import Argument, Call, Lowering, lowers, wide
from fusec.ir.graph import Value
from fusec.ir.types import broadcast

LETTERS = "abcdefghijklmnopqrstuvw"


def _product(low: Lowering, call: Call, spec: str, a: Value, b: Value) -> Value:
    dtype = call.out.dtype
    if not dtype.is_float:
        raise ImportFailure(f"a matrix product of {dtype}", why="contractions are of floats")
    return low.emit("contraction", low.cast(a, dtype), low.cast(b, dtype), spec=spec)


@lowers("aten.linear.default")
def _linear(low: Lowering, call: Call) -> Value:
    x, weight, bias = call["input"], call["weight"], call["bias"]
    rows = LETTERS[: len(x.shape) - 1]
    column = LETTERS[len(rows)] if len(weight.shape) == 2 else ""
    out = _product(low, call, f"{rows}z,{column}z->{rows}{column}", x, weight)
    return out if bias is None else low.pointwise("add", out, bias, dtype=call.out.dtype)


@lowers("aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.dot.default", "aten.matmul.default",
        "aten.vdot.default")  # fmt: skip
def _matmul(low: Lowering, call: Call) -> Value:
    a = call["self"]
    b = call.get("other", call.get("mat2", call.get("vec", call.get("tensor"))))
    return matmul(low, call, a, b)


def matmul(low: Lowering, call: Call, a: Value, b: Value) -> Value:
    """``a @ b`` by numpy's rules; a batch dim of length 1 that meets a longer one is dropped."""
    a_batch, b_batch = a.shape[:-2], b.shape[:-2]
    batch = broadcast(a_batch, b_batch)
    letters = LETTERS[: len(batch)]
    row = LETTERS[len(batch)] if len(a.shape) > 1 else ""
    column = LETTERS[len(batch) + len(row)] if len(b.shape) > 1 else ""
    a, a_term = _without_ones(low, a, letters, batch, row + "z")
    b, b_term = _without_ones(low, b, letters, batch, "z" + column)
    return low.reshape(_product(low, call, f"{a_term},{b_term}->{letters}{row}{column}", a, b), call.out.shape)


def _without_ones(low: Lowering, x: Value, letters: str, batch: tuple[Argument, ...], tail: str) -> tuple[Value, str]:
    """``x`` without the batch dims of length 1 that broadcast, and its term."""
    own = len(x.shape) - len(tail)
    names = letters[len(letters) - own :] if own > 0 else ""
    lead = len(letters) - own
    kept = [i for i in range(own) if x.shape[i] != 1 or batch[lead + i] == 1]
    shape = tuple(x.shape[i] for i in kept) + x.shape[max(own, 0) :]
    return low.reshape(x, shape), "".join(names[i] for i in kept) + tail


@lowers("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default")
def _addmm(low: Lowering, call: Call) -> Value:
    out = call.out.dtype
    a = call.get("mat1", call.get("batch1", call.get("mat")))
    b = call.get("mat2", call.get("batch2", call.get("vec")))
    product, bias, alpha, beta = matmul(low, call, a, b), call["self"], call["alpha"], call["beta"]
    if alpha == 1 and beta == 1:
        return low.pointwise("add", product, bias, dtype=out)
    dtype = wide(out)
    if alpha != 1:
        product = low.pointwise("mul", product, alpha, dtype=dtype)
    if beta == 0:
        return product
    if beta != 1:
        bias = low.pointwise("mul", bias, beta, dtype=dtype)
    return low.pointwise("add", product, bias, dtype=dtype)


@lowers("aten.convolution.default", "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default")
def _convolution(low: Lowering, call: Call) -> Value:
    """A convolution whose windows tile its input (patch embedding) is a matrix product; the rest stays opaque."""
    x, weight, bias = call["input"], call["weight"], call["bias"]
    window = weight.shape[2:]
    if len(x.shape) != len(window) + 2 or call["groups"] != 1 or call.get("transposed"):
        raise ImportFailure(
            "a convolution that is no patch embedding",
            why="only a plain one, of a batch and with one group, is a product",
        )
    plain = not any(call["padding"]) and all(d == 1 for d in call["dilation"])
    if not plain or not all(isinstance(n, int) for n in window) or not _same_steps(call["stride"], window):
        raise ImportFailure(
            "a convolution whose windows do not tile the image",
            why="it is a matrix product only with a stride of one window, without padding or dilation",
        )
    counts = call.out.shape[2:]
    for dim, (count, size) in enumerate(zip(counts, window, strict=True), 2):
        x = low.slice(x, dim, 0, count * size)
    x = low.reshape(x, (*x.shape[:2], *(n for pair in zip(counts, window, strict=True) for n in pair)))
    places, inner = LETTERS[2 : 2 + len(window)], "yxw"[: len(window)]
    apart = "".join(place + at for place, at in zip(places, inner, strict=True))
    out = _product(low, call, f"az{apart},bz{inner}->ab{places}", x, weight)
    if bias is None:
        return out
    return low.pointwise("add", out, low.reshape(bias, (bias.shape[0], *(1 for _ in window))), dtype=call.out.dtype)


def _same_steps(stride: Argument, window: tuple[Argument, ...]) -> bool:
    return tuple(stride) == window or (len(stride) == 1 and all(n == stride[0] for n in window))
