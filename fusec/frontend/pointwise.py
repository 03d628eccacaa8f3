"""Pointwise ATen operations as primitives."""

from typing import Any

import sympy
import torch

from fusec.errors import ImportFailure
from fusec.frontend.bits import from_float8
from fusec.frontend.lowering import Argument, Call, Lowering, common_dtype, converted, lowers, rounded
from fusec.ir.graph import Value
from fusec.ir.types import BOOL, E4M3, E5M2, F64, I64, DType, accumulation
from fusec.loops.affine import at_least

UNARY = {
    "neg", "abs", "floor", "ceil", "trunc", "round", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1",
    "log", "log1p", "log2", "tanh", "sigmoid", "erf", "sin", "cos",
}  # fmt: skip
SAME_ON_INTEGERS = {"floor", "ceil", "trunc", "round"}


def _unary(low: Lowering, call: Call) -> Value:
    op = call.target.split(".")[1]
    x = low.operand(call["self"], call.out.dtype)
    return x if op in SAME_ON_INTEGERS and not call.out.dtype.is_float else low.emit(op, x)


for _name in UNARY:
    lowers(f"aten.{_name}.default")(_unary)


@lowers("aten._neg_view.default")
def _neg_view(low: Lowering, call: Call) -> Value:
    """The imaginary part of a conjugate: torch sets its negative bit and leaves memory unchanged."""
    return low.emit("neg", low.operand(call["self"], call.out.dtype))


@lowers("aten.sign.default", "aten.sgn.default")
def _sign(low: Lowering, call: Call) -> Value:
    x = low.operand(call["self"], call.out.dtype)
    return x if call.out.dtype == BOOL else low.emit("sign", x)


@lowers("aten.square.default")
def _square(low: Lowering, call: Call) -> Value:
    return low.pointwise("mul", call["self"], call["self"], dtype=call.out.dtype)


@lowers("aten.relu.default")
def _relu(low: Lowering, call: Call) -> Value:
    return low.pointwise("maximum", call["self"], 0, dtype=call.out.dtype)


def _arithmetic_dtype(call: Call, *arguments: Argument) -> DType:
    """The result's type, or f32 where a half tensor meets a wider 0-d tensor, which eager does not round first."""
    out = call.out.dtype
    for a in arguments:
        if isinstance(a, Value) and a.type.rank == 0 and out.is_float and a.dtype.is_float:  # type: ignore[union-attr]
            if a.dtype.bytes > out.bytes:
                return accumulation(out)
    return out


@lowers("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar",
        "aten.subtract.Tensor", "aten.subtract.Scalar", "aten.rsub.Tensor", "aten.rsub.Scalar")  # fmt: skip
def _add(low: Lowering, call: Call) -> Value:
    out, alpha, a, b = call.out.dtype, call.get("alpha", 1), call["self"], call["other"]
    op = "add" if ".add." in call.target else "sub"
    if ".rsub." in call.target:
        a, b = b, a
    if op == "sub" and any(x is True or x is False or (isinstance(x, Value) and x.dtype == BOOL) for x in (a, b)):
        raise ImportFailure("a difference of booleans", why="eager raises", fix="use logical_not or logical_xor")
    if out == BOOL:
        return low.pointwise("or", a, b if alpha else False, dtype=BOOL)
    dtype = _arithmetic_dtype(call, a, b)
    if isinstance(alpha, (int, float)) and alpha == 1:
        return low.pointwise(op, a, b, dtype=dtype)
    dtype = accumulation(out)
    return low.pointwise(op, a, low.pointwise("mul", b, alpha, dtype=dtype), dtype=dtype)


@lowers("aten.mul.Tensor", "aten.mul.Scalar", "aten.multiply.Tensor", "aten.multiply.Scalar")
def _mul(low: Lowering, call: Call) -> Value:
    op = "and" if call.out.dtype == BOOL else "mul"
    return low.pointwise(op, call["self"], call["other"], dtype=_arithmetic_dtype(call, call["self"], call["other"]))


def _never_zero(divisor: Argument, dtype: DType) -> None:
    """Reject an integer division for which eager may raise: a kernel cannot report a division by 0."""
    if dtype.is_float:
        return
    if isinstance(divisor, Value) and divisor.producer is not None and divisor.producer.is_op("constant"):
        divisor = divisor.producer.attributes["value"]
    if isinstance(divisor, sympy.Expr):
        never = at_least(divisor, 1) and dtype.bytes >= 4  # in narrow types a size may wrap to 0
    else:
        never = isinstance(divisor, (int, float)) and int(divisor) % (1 << 8 * dtype.bytes) != 0
    if not never:
        raise ImportFailure(
            "an integer division by what may be 0", why="eager raises then, and a kernel cannot",
            fix="divide by a number, or divide floats",
        )  # fmt: skip


@lowers("aten.div.Tensor", "aten.div.Scalar", "aten.div.Tensor_mode", "aten.div.Scalar_mode",
        "aten.true_divide.Tensor", "aten.true_divide.Scalar")  # fmt: skip
def _div(low: Lowering, call: Call) -> Value:
    dtype, mode = call.out.dtype, call.get("rounding_mode")
    a, b = call["self"], call["other"]
    if mode is None:
        return low.pointwise("div", a, b, dtype=_arithmetic_dtype(call, a, b))
    _never_zero(b, dtype)
    if mode == "floor":
        return low.pointwise("floor_divide", a, b, dtype=_arithmetic_dtype(call, a, b))
    if dtype.is_float:
        return low.emit("trunc", low.pointwise("div", a, b, dtype=accumulation(dtype)))
    x, y = low.operand(a, dtype), low.operand(b, dtype)
    return low.emit("floor_divide", low.emit("sub", x, low.emit("fmod", x, y)), y)


BINARY = {
    "floor_divide": "floor_divide", "remainder": "remainder", "fmod": "fmod", "atan2": "atan2",
    "maximum": "maximum", "minimum": "minimum",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
    "bitwise_left_shift": "shift_left", "bitwise_right_shift": "shift_right",
    "logical_and": "and", "logical_or": "or", "logical_xor": "xor",
    "__and__": "and", "__or__": "or", "__xor__": "xor", "__lshift__": "shift_left", "__rshift__": "shift_right",
}  # fmt: skip


def _binary(low: Lowering, call: Call) -> Value:
    name = call.target.split(".")[1]
    a, b, op, dtype = call["self"], call["other"], BINARY[name], call.out.dtype
    if dtype == BOOL:
        op = {"maximum": "or", "minimum": "and"}.get(op, op)
    dtype = BOOL if name.startswith("logical") else dtype
    if op in ("floor_divide", "remainder", "fmod"):
        _never_zero(b, dtype)
        b = b if op == "floor_divide" else rounded(b, dtype)
        dtype = _arithmetic_dtype(call, a, b) if op == "floor_divide" else dtype
    return low.pointwise(op, a, b, dtype=dtype)


for _name in BINARY:
    lowers(*(f"aten.{_name}.{overload}" for overload in ("default", "Tensor", "Scalar")))(_binary)


@lowers("aten.bitwise_not.default", "aten.logical_not.default")
def _not(low: Lowering, call: Call) -> Value:
    return low.pointwise("not", call["self"], dtype=BOOL if "logical" in call.target else call.out.dtype)


def _compare(low: Lowering, call: Call) -> Value:
    dtype = common_dtype(call, "self", "other")
    return low.pointwise(call.target.split(".")[1], call["self"], rounded(call["other"], dtype), dtype=dtype)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    lowers(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar")(_compare)


@lowers("aten.isnan.default", "aten.isinf.default", "aten.isfinite.default")
def _float_class(low: Lowering, call: Call) -> Value:
    x, op = call["self"], call.target.split(".")[1]
    wanted = ("isnan", "isinf") if op == "isfinite" else (op,)
    first, *others = (low.emit(name, x) if x.dtype.is_float else low.emit("ne", x, x) for name in wanted)
    return low.emit("not", low.emit("or", first, *others)) if others else first


@lowers("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def _pow(low: Lowering, call: Call) -> Value:
    dtype = call.out.dtype
    if dtype == BOOL:
        raise ImportFailure("a power of booleans", why="arithmetic is on numbers", fix="cast to an integer first")
    exponent = call["exponent"]
    if not dtype.is_float and isinstance(exponent, int) and exponent < 0:
        raise ImportFailure("a negative power of integers", why="eager raises", fix="cast to a float first")
    return low.pointwise("pow", call["self"], exponent, dtype=dtype)


@lowers("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar")
def _where(low: Lowering, call: Call) -> Value:
    dtype = call.out.dtype
    branches = (low.operand(converted(call[n], dtype), dtype) for n in ("self", "other"))
    return low.emit("where", low.cast(call["condition"], BOOL), *branches)


@lowers("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(low: Lowering, call: Call) -> Value:
    dtype = call.out.dtype
    value = low.operand(converted(call["value"], dtype), dtype)
    return low.emit("where", low.cast(call["mask"], BOOL), value, low.operand(call["self"], dtype))


@lowers("aten.clamp.default", "aten.clamp.Tensor", "aten.clamp_min.default", "aten.clamp_min.Tensor",
        "aten.clamp_max.default", "aten.clamp_max.Tensor")  # fmt: skip
def _clamp(low: Lowering, call: Call) -> Value:
    dtype = call.out.dtype
    x = low.operand(call["self"], dtype)
    for op, bound in (("maximum", call.get("min")), ("minimum", call.get("max"))):
        if bound is not None:
            x = low.pointwise(op, x, converted(bound, dtype), dtype=dtype)
    return x


@lowers("aten.addcmul.default", "aten.addcdiv.default")
def _addcmul(low: Lowering, call: Call) -> Value:
    dtype = accumulation(call.out.dtype)
    op = "mul" if "addcmul" in call.target else "div"
    term = call["tensor1"]
    if call["value"] != 1:  # first, as in ATen: the product of the tensors may overflow
        term = low.pointwise("mul", term, call["value"], dtype=dtype)
    term = low.pointwise(op, term, call["tensor2"], dtype=dtype)
    return low.pointwise("add", call["self"], term, dtype=dtype)


@lowers("aten._to_copy.default", "prims.convert_element_type.default", "aten.to.dtype")
def _to_copy(low: Lowering, call: Call) -> Value:
    x: Any = call.get("self", call.get("a"))
    _require_device(x, call.out.device)
    if x.dtype in (E4M3, E5M2) and call.out.dtype.is_float:
        return from_float8(low, x, call.out.dtype)
    return low.cast(x, call.out.dtype)


@lowers("aten.copy.default")
def _copy(low: Lowering, call: Call) -> Value:
    _require_device(call["src"], call.out.device)
    return low.expand(low.cast(call["src"], call.out.dtype), call.out.shape)


def _require_device(x: Any, device: str) -> None:
    if x.type.device != device:
        raise ImportFailure(f"a copy from {x.type.device} to {device}", why="a kernel runs on one device")


@lowers("aten.clone.default", "aten.detach.default", "aten.alias.default", "aten.contiguous.default",
        "aten.lift_fresh.default", "aten.lift_fresh_copy.default", "prims.view_of.default")  # fmt: skip
def _identity(low: Lowering, call: Call) -> Value:
    x: Value = call["self"] if "self" in call.arguments else call["a"]
    (given, *_), (made, *_) = call.fakes.values(), call.fake_results
    if given.is_conj() != made.is_conj():
        raise ImportFailure("a copy of a conjugate view", why="memory holds the values before conjugation")
    return x


@lowers("aten.arange.start_step", "aten.arange.default", "aten.arange.start", "prims.iota.default")
def _arange(low: Lowering, call: Call) -> Value:
    start, step = call.get("start", 0), call.get("step", 1)
    integral = not any(isinstance(n, float) or isinstance(n, Value) for n in (start, step))
    dtype = F64 if call.out.dtype.is_float and not integral else I64  # of an integer type, as ATen has it: both cut off
    x = low.emit("iota", size=call.out.shape[0], dtype=dtype, device=low.device)
    if step != 1:
        x = low.pointwise("mul", x, step, dtype=dtype)
    if start != 0:
        x = low.pointwise("add", x, start, dtype=dtype)
    return low.cast(x, call.out.dtype)


@lowers("aten.full.default", "aten.full_like.default", "aten.new_full.default", "aten.scalar_tensor.default",
        "aten.fill.Scalar", "aten.fill.Tensor")  # fmt: skip
def _full(low: Lowering, call: Call) -> Value:
    value = call.get("fill_value", call.get("value", call.get("s")))
    return low.expand(low.operand(converted(value, call.out.dtype), call.out.dtype), call.out.shape)


@lowers("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default", "aten.empty.memory_format",
        "aten.empty_like.default", "aten.new_empty.default", "aten.ones.default", "aten.ones_like.default",
        "aten.new_ones.default")  # fmt: skip
def _zeros_or_ones(low: Lowering, call: Call) -> Value:
    """Zeros for uninitialized memory as well: they need none where they are only written over."""
    if "empty" in call.target and torch.are_deterministic_algorithms_enabled():
        raise ImportFailure("uninitialized memory", why="torch fills it where algorithms are to be deterministic")
    return low.expand(low.number(int("ones" in call.target), call.out.dtype), call.out.shape)


@lowers("aten.tril.default", "aten.triu.default")
def _triangle(low: Lowering, call: Call) -> Value:
    *_, rows, cols = call.out.shape
    row = low.reshape(low.emit("iota", size=rows, dtype=I64, device=low.device), (rows, 1))
    column = low.emit("iota", size=cols, dtype=I64, device=low.device)
    above = low.emit("sub", column, row)
    op = "le" if "tril" in call.target else "ge"
    kept = low.pointwise(op, above, call["diagonal"], dtype=I64)
    dtype = call.out.dtype
    return low.emit("where", kept, call["self"], low.number(0, dtype))
