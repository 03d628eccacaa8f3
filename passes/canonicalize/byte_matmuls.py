"""Matmuls of bytes: spelled in wider dtypes, with zero points, and beside sums of their weights."""

import math

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import split_spec
from fusec.ir.types import I8, I32, I64, U8, DType, Size, product
from fusec.loops.casts import uncast_value
from fusec.loops.intervals import interval, range_of
from fusec.passes.canonicalize.contractions import aligned, canonical_spec
from fusec.passes.canonicalize.numbers import number_of
from fusec.rewriting.driver import simplifies

_LARGEST = {I8: 128, U8: 255}


@simplifies("contraction", exact=False)
def byte_products(graph: Graph, node: Node) -> Value | None:
    """A matmul of bytes that were cast to a wider dtype is one of bytes, summed exactly in i32 where that suffices.

    Sums of floats may round, so that eager's result may be the less exact one. On a GPU no library multiplies bytes in
    all shapes.
    """
    casts = [v.producer for v in node.operands if v.producer is not None and v.producer.is_op("cast")]
    inner, dtype = [cast.operands[0] for cast in casts], node.result.dtype
    if len(inner) != 2 or any(v.dtype not in _LARGEST for v in inner) or node.result.tensor.device != "cpu":
        return None
    if dtype != I32 and not dtype.is_float:
        return None
    (left, right), out = split_spec(node.attributes["spec"])
    count = product(tuple(n for label, n in zip(left, inner[0].shape, strict=True) if label not in out))
    if not isinstance(count, int) or set(left) - set(out) != set(right) - set(out):
        return None
    if dtype != I32 and count * math.prod(_LARGEST[v.dtype] for v in inner) >= 1 << 31:
        return None
    result = graph.add_node("contraction", inner, {"spec": node.attributes["spec"], "dtype": I32}).result
    return result if dtype == I32 else graph.add_node("cast", [result], {"dtype": dtype}).result


@simplifies("contraction", exact=False)
def zero_points(graph: Graph, node: Node) -> Value | None:
    """Σ (codes − zero)·w = Σ codes·w − zero·Σ w for bytes and an integer that is the same for all that is summed.

    Both sums are exact, or wrap around as the one on the left does.
    """
    terms, out = split_spec(node.attributes["spec"])
    sizes, dtype, weight = node.label_sizes, node.result.dtype, uncast_value(node.operands[1])
    found = _shifted(graph, node.operands[0])
    if found is None or weight.dtype not in _LARGEST or node.result.tensor.device != "cpu":
        return None
    codes, zero = found
    shape = (*(1,) * (len(terms[0]) - len(zero.shape)), *zero.shape)
    own = dict(zip(terms[0], shape, strict=True))
    summed = [label for label in terms[0] if label not in out]
    if set(summed) != set(terms[1]).difference(out) or any(own[label] != 1 for label in summed):
        return None
    count, kept = product(tuple(sizes[label] for label in summed)), "".join(n for n in out if n in terms[1])
    most = 255 + max(map(abs, interval(zero) or range_of(I32)))
    if not kept or (dtype != I32 and not _fits(count, most * _LARGEST[weight.dtype])) or not _is_summed(dtype):
        return None
    zero = graph.add_node("reshape", [graph.add_node("cast", [zero], {"dtype": I32}).result], {"shape": shape}).result
    factors = (
        aligned(graph, zero, terms[0], out, own),
        aligned(graph, _column_sums(graph, weight, terms[1], kept), kept, out, sizes),
    )
    spec = node.attributes["spec"]
    products = graph.add_node("contraction", [codes, weight], {"spec": spec, "dtype": I32}).result
    result = graph.add_node("sub", [products, graph.add_node("mul", factors).result]).result
    return result if dtype == I32 else graph.add_node("cast", [result], {"dtype": dtype}).result


@simplifies("sum", exact=False)
def column_sums(graph: Graph, node: Node) -> Value | None:
    """Sums of a weight of bytes, beside a matmul with it, are a matmul with ones: one kernel reads the weight once."""
    weight, dtype = uncast_value(node.operands[0]), node.result.dtype
    if weight.dtype not in _LARGEST or weight.tensor.device != "cpu" or not _is_summed(dtype):
        return None
    dims = {d % len(weight.shape) for d in node.attributes["dims"]}
    matmul = next((user for user in weight.users if _sums(user, weight, dims)), None)
    count = product(tuple(weight.shape[d] for d in dims))
    if product(node.result.shape) == 1:
        return None  # a single sum would become a row kernel again
    if matmul is None or (dtype != I32 and not _fits(count, _LARGEST[weight.dtype])):
        return None
    (_, term), out = split_spec(matmul.attributes["spec"])
    sums = _column_sums(graph, weight, term, "".join(label for label in term if label in out))
    sums = graph.add_node("reshape", [sums], {"shape": node.result.shape}).result
    return sums if dtype == I32 else graph.add_node("cast", [sums], {"dtype": dtype}).result


def _shifted(graph: Graph, value: Value) -> tuple[Value, Value] | None:
    """Return bytes and the integer that is subtracted from them; None for any other value."""
    node = uncast_value(value).producer
    if node is None or not node.is_op("sub", "add") or not (node.result.dtype == I32 or node.result.dtype.is_float):
        return None
    codes, zero = map(uncast_value, node.operands)
    number = number_of(zero)
    if number is not None and node.is_op("add") and abs(number) < 1 << 31 and number == int(number):
        zero = graph.constant(-int(number), I32, codes.tensor.device)
    elif node.is_op("add"):
        return None
    return (codes, zero) if codes.dtype in _LARGEST and zero.dtype in (*_LARGEST, I32) else None


def _column_sums(graph: Graph, weight: Value, term: str, kept: str) -> Value:
    """Return the sums of a weight along the labels of its term that are not kept."""
    summed = {label: n for label, n in zip(term, weight.shape, strict=True) if label not in kept}
    one = graph.constant(1, I8, weight.tensor.device)
    row = graph.add_node("expand", [one], {"shape": (1, *summed.values())}).result
    spec = f"A{''.join(summed)},{term}->A{kept}"
    sums = graph.add_node("contraction", [row, weight], {"spec": canonical_spec(spec), "dtype": I32}).result
    return graph.add_node("reshape", [sums], {"shape": sums.shape[1:]}).result


def _sums(user: Node, weight: Value, dims: set[int]) -> bool:
    """Return whether a node multiplies bytes by a weight and sums over these dims of it."""
    if not user.is_op("contraction") or user.operands[1] is not weight or user.result.dtype != I32:
        return False
    (_, term), out = split_spec(user.attributes["spec"])
    return {d for d, label in enumerate(term) if label not in out} == dims != set(range(len(term)))


def _fits(count: Size, most: int) -> bool:
    """Return whether int32 holds a sum of so many numbers up to the largest."""
    return isinstance(count, int) and count * most < 1 << 31


def _is_summed(dtype: DType) -> bool:
    """Return whether a sum in int32 may take the place of one in this dtype."""
    return dtype in (I32, I64) or dtype.is_float
