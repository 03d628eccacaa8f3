"""Slices and concatenations that undo each other."""

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait, split_spec
from fusec.ir.types import Size, same_size, simplify
from fusec.rewriting.driver import simplifies


def _slice(graph: Graph, x: Value, dim: int, start: Size, stop: Size, step: int) -> Value:
    return graph.add_node("slice", [x], {"dim": dim, "start": start, "stop": stop, "step": step}).result


@simplifies("slice")
def slice_of_slice(graph: Graph, node: Node) -> Value | None:
    """Two slices along one dim are one, unless the first is a value in its own right that others read too."""
    inner = node.operands[0].producer
    if len(node.operands[0].users) != 1:
        return None
    if inner is None or not inner.is_op("slice") or inner.attributes["dim"] != node.attributes["dim"]:
        return None
    a, b = inner.attributes, node.attributes
    if not isinstance(a["step"], int) or not isinstance(b["step"], int):
        return None
    start = simplify(a["start"] + b["start"] * a["step"])
    stop = simplify(a["start"] + b["stop"] * a["step"])
    if a["step"] != 1:
        stop = simplify(stop - (a["step"] - 1))
    return _slice(graph, inner.operands[0], b["dim"], start, stop, a["step"] * b["step"])


@simplifies("slice")
def slice_of_concat(graph: Graph, node: Node) -> Value | None:
    """A slice that lies within one part of a concatenation is a slice of that part."""
    inner, at = node.operands[0].producer, node.attributes
    if inner is None or not inner.is_op("concat"):
        return None
    if inner.attributes["dim"] != at["dim"]:
        return None
    begin: Size = 0
    for part in inner.operands:
        end = simplify(begin + part.shape[at["dim"]])
        start, stop = simplify(at["start"] - begin), simplify(at["stop"] - begin)
        if _at_most(0, start) and _at_most(stop, simplify(end - begin)):
            return _slice(graph, part, at["dim"], start, stop, at["step"])
        begin = end
    return None


def _at_most(a: Size, b: Size) -> bool:
    """Whether a ≤ b for all values of the symbols."""
    difference = simplify(b - a)
    return difference >= 0 if isinstance(difference, int) else bool(difference.is_nonnegative)


@simplifies("slice")
def slice_of_computed(graph: Graph, node: Node) -> Value | None:
    """What is computed for one slice of it only is computed from slices: of the last token alone, say."""
    inner, dim = _computed_for(graph, node), node.attributes["dim"]
    if inner is None or not inner.has(Trait.POINTWISE | Trait.REDUCTION) or dim in inner.attributes.get("dims", ()):
        return None
    n = inner.result.shape[dim]
    return _of_slices(graph, inner, node, [dim if _has(v, dim, n) else 0 for v in inner.operands])


@simplifies("slice", exact=False)
def slice_of_product(graph: Graph, node: Node) -> Value | None:
    """A matrix product that is computed for one slice of it only is a product of slices."""
    inner = _computed_for(graph, node)
    if inner is None or not inner.has(Trait.CONTRACTION):
        return None
    terms, out = split_spec(inner.attributes["spec"])
    label = out[node.attributes["dim"]]
    return _of_slices(graph, inner, node, [term.index(label) - len(term) if label in term else 0 for term in terms])


def _computed_for(graph: Graph, node: Node) -> Node | None:
    """What computes a value of which nobody reads more than this slice."""
    (x,) = node.operands
    return x.producer if len(x.users) == 1 and x not in graph.outputs else None


def _has(value: Value, dim: int, size: Size) -> bool:
    """Whether the value is not broadcast along this dim."""
    return -dim <= len(value.shape) and same_size(value.shape[dim], size)


def _of_slices(graph: Graph, inner: Node, like: Node, dims: list[int]) -> Value:
    """A computation on slices of its operands along these dims; 0 where an operand stays whole."""
    operands = [_part(graph, v, like, dim) if dim else v for v, dim in zip(inner.operands, dims, strict=True)]
    return graph.add_node(inner.op.name, operands, dict(inner.attributes)).result


def _part(graph: Graph, value: Value, like: Node, dim: int) -> Value:
    """The same slice of another value; the one that there is, so that its last reader is known as such."""
    at = like.attributes | {"dim": dim}
    there = (u.result for u in value.users if u.is_op("slice") and u.attributes == at)
    return next(there, None) or _slice(graph, value, dim, at["start"], at["stop"], at["step"])


@simplifies("concat")
def concat_of_one(graph: Graph, node: Node) -> Value | None:
    """The concatenation of one value is the value."""
    return node.operands[0] if len(node.operands) == 1 else None


@simplifies("concat")
def concat_of_concat(graph: Graph, node: Node) -> Value | None:
    """Nested concatenations along one dim are one."""
    dim = node.attributes["dim"]
    parts: list[Value] = []
    for part in node.operands:
        inner = part.producer
        nested = inner is not None and inner.is_op("concat") and inner.attributes["dim"] == dim
        parts += inner.operands if nested and inner is not None and len(inner.result.users) == 1 else [part]
    if len(parts) == len(node.operands):
        return None
    return graph.add_node("concat", parts, {"dim": dim}).result


@simplifies("concat")
def concat_of_neighbours(graph: Graph, node: Node) -> Value | None:
    """Slices that follow each other are one slice."""
    dim, parts = node.attributes["dim"], list(node.operands)
    for i in range(len(parts) - 1):
        a, b = parts[i].producer, parts[i + 1].producer
        if a is None or b is None or not (a.is_op("slice") and b.is_op("slice")) or a.operands != b.operands:
            continue
        x, y = a.attributes, b.attributes
        if (x["dim"], x["step"], y["dim"], y["step"]) == (dim, 1, dim, 1) and same_size(x["stop"], y["start"]):
            joined = _slice(graph, a.operands[0], dim, x["start"], y["stop"], 1)
            return graph.add_node("concat", [*parts[:i], joined, *parts[i + 2 :]], {"dim": dim}).result
    return None


RULES = (
    slice_of_slice,
    slice_of_concat,
    slice_of_computed,
    slice_of_product,
    concat_of_one,
    concat_of_concat,
    concat_of_neighbours,
)
