"""Matrix products of ATen as contractions."""

from fusec.errors import ImportFailure
from fusec.frontend.lowering import Argument, Call, Lowering, lowers
from fusec.ir.graph import Value
from fusec.ir.types import I32, accumulation, broadcast

LETTERS = "abcdefghijklmnopqrstuvw"


def product(low: Lowering, call: Call, spec: str, a: Value, b: Value) -> Value:
    """Add a contraction in the dtype of the result."""
    dtype = call.out.dtype
    if not dtype.is_float and dtype != I32:
        raise ImportFailure(f"a matrix product of {dtype}", why="contractions are of floats, and of 32-bit integers")
    if a.dtype != b.dtype:
        raise ImportFailure(f"a matrix product of {a.dtype} and {b.dtype}", why="eager raises", fix="cast one of them")
    return low.emit("contraction", low.cast(a, dtype), low.cast(b, dtype), spec=spec)


@lowers("aten.linear.default")
def _linear(low: Lowering, call: Call) -> Value:
    x, weight, bias = call["input"], call["weight"], call["bias"]
    rows = LETTERS[: len(x.shape) - 1]
    column = LETTERS[len(rows)] if len(weight.shape) == 2 else ""
    out = product(low, call, f"{rows}z,{column}z->{rows}{column}", x, weight)
    return out if bias is None else low.pointwise("add", out, bias, dtype=call.out.dtype)


@lowers("aten._weight_int8pack_mm.default")
def _int8_linear(low: Lowering, call: Call) -> Value:
    """``x · (codes · scale)ᵀ`` with a scale for each row of the codes."""
    codes, scales = call["mat2"], low.cast(call["scales"], call.out.dtype)
    scales = low.reshape(scales, (codes.shape[0], 1))
    weight = low.pointwise("mul", low.cast(codes, call.out.dtype), scales, dtype=call.out.dtype)
    return product(low, call, "az,bz->ab", call["self"], weight)


@lowers("aten._int_mm.default")
def _byte_matmul(low: Lowering, call: Call) -> Value:
    """A matmul of bytes, summed in 32 bits that wrap around."""
    return low.emit("contraction", call["self"], call["mat2"], spec="az,zb->ab", dtype=I32)


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
    return low.reshape(product(low, call, f"{a_term},{b_term}->{letters}{row}{column}", a, b), call.out.shape)


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
    dtype = accumulation(out)
    if alpha != 1:
        product = low.pointwise("mul", product, alpha, dtype=dtype)
    if beta == 0:
        return product
    if beta != 1:
        bias = low.pointwise("mul", bias, beta, dtype=dtype)
    return low.pointwise("add", product, bias, dtype=dtype)
