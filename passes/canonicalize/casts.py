"""Removal of casts that change no bit; every other cast is kept, as it rounds."""

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.types import BF16, F16, F32, holds_all
from fusec.passes.canonicalize.numbers import number_of
from fusec.rewriting.driver import simplifies


@simplifies("cast")
def neutral_cast(graph: Graph, node: Node) -> Value | None:
    """A cast to the type it has."""
    (x,) = node.operands
    return x if x.dtype == node.result.dtype else None


@simplifies("cast")
def cast_through_wider(graph: Graph, node: Node) -> Value | None:
    """x → wider → t is x → t, as the first step is exact; f32 → bf16 → f32 rounds, and is kept."""
    (x,) = node.operands
    if x.producer is None or not x.producer.is_op("cast"):
        return None
    origin = x.producer.operands[0]
    if not holds_all(x.dtype, origin.dtype) or (x.dtype.is_float and not node.result.dtype.is_float):
        return None
    if origin.dtype == node.result.dtype:
        return origin
    return graph.add_node("cast", [origin], {"dtype": node.result.dtype}).result


_ARITHMETIC = (
    "add", "sub", "mul", "div", "maximum", "minimum", "neg", "abs", "exp", "log", "tanh", "sigmoid", "erf", "sqrt",
    "rsqrt", "reciprocal", "sin", "cos",
)  # fmt: skip


@simplifies("cast")
def rounded_arithmetic(graph: Graph, node: Node) -> Value | None:
    """Half dtypes compute in f32 and round: f32 arithmetic on half operands, rounded to half, is half arithmetic."""
    (x,) = node.operands
    inner, half = x.producer, node.result.dtype
    if inner is None or half not in (BF16, F16) or x.dtype != F32 or not inner.is_op(*_ARITHMETIC):
        return None
    if len(x.users) != 1 or x in graph.outputs:
        return None
    operands: list[Value] = []
    for v in inner.operands:
        if (number := number_of(v)) is not None:
            operands.append(graph.constant(float(number), half, v.tensor.device))
        elif v.producer is not None and v.producer.is_op("cast") and v.producer.operands[0].dtype == half:
            operands.append(v.producer.operands[0])
        else:
            return None
    return graph.add_node(inner.op.name, operands, dict(inner.attributes)).result
