"""Slices and concatenations that undo each other."""

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait, split_spec
from fusec.ir.types import Size, same_shape, same_size, simplify
from fusec.rewriting.driver import simplifies


def _slice(graph: Graph, x: Value, dim: int, start: Size, stop: Size, step: int) -> Value:
    return graph.add_node("slice", [x], {"dim": dim, "start": start, "stop": stop, "step": step}).result


@simplifies("slice")
def slice_of_slice(graph: Graph, node: Node) -> Value | None:
    """Two slices along one dim are one, unless the first has other readers."""
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
    if same_size(b["start"], b["stop"]):
        stop = start
    elif a["step"] != 1:  # end right after the last element, so as not to leave the dim
        if not _at_most(simplify(b["start"] + 1), b["stop"]):
            return None
        stop = simplify(stop - (a["step"] - 1))
    return _slice(graph, inner.operands[0], b["dim"], start, stop, a["step"] * b["step"])


@simplifies("slice")
def slice_of_concat(graph: Graph, node: Node) -> Value | None:
    """A slice within one part of a concatenation is a slice of that part."""
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


@simplifies("slice")
def slice_across_parts(graph: Graph, node: Node) -> Value | None:
    """A slice across parts of a concatenation that is only read in slices is a concatenation of slices."""
    (x,), at = node.operands, node.attributes
    if x.producer is None or not x.producer.is_op("concat") or x in graph.outputs or at["step"] != 1:
        return None
    dim = x.producer.attributes["dim"]
    if not all(u.is_op("slice") and u.attributes["dim"] == dim for u in x.users):
        return None
    parts: list[Value] = []
    begin: Size = 0
    for part in x.producer.operands:
        end = simplify(begin + part.shape[dim])
        if not _at_most(end, at["start"]) and not _at_most(at["stop"], begin):
            start = 0 if _at_most(at["start"], begin) else simplify(at["start"] - begin)
            stop = part.shape[dim] if _at_most(end, at["stop"]) else simplify(at["stop"] - begin)
            if not (_at_most(0, start) and _at_most(start, stop) and _at_most(stop, part.shape[dim])):
                return None
            parts.append(_slice(graph, part, dim, start, stop, 1))
        begin = end
    return graph.add_node("concat", parts, {"dim": dim}).result


def _at_most(a: Size, b: Size) -> bool:
    """Return whether a ≤ b for all values of the symbols."""
    difference = simplify(b - a)
    return difference >= 0 if isinstance(difference, int) else bool(difference.is_nonnegative)


@simplifies("slice")
def slice_of_computed(graph: Graph, node: Node) -> Value | None:
    """A computation whose only reader is a slice is done on slices, of the last token alone for instance."""
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
    """Return the producer of a value that only this slice reads."""
    (x,) = node.operands
    return x.producer if len(x.users) == 1 and x not in graph.outputs else None


def _has(value: Value, dim: int, size: Size) -> bool:
    """Return whether the value is not broadcast along this dim."""
    return -dim <= len(value.shape) and same_size(value.shape[dim], size)


def _of_slices(graph: Graph, inner: Node, like: Node, dims: list[int]) -> Value:
    """Return a computation on slices of its operands along these dims; operands for which the dim is 0 stay whole."""
    operands = [_part(graph, v, like, dim) if dim else v for v, dim in zip(inner.operands, dims, strict=True)]
    return graph.add_node(inner.op.name, operands, dict(inner.attributes)).result


def _part(graph: Graph, value: Value, like: Node, dim: int) -> Value:
    """Return the same slice of another value; an existing one is reused, so that it counts as its reader."""
    at = like.attributes | {"dim": dim}
    there = (u.result for u in value.users if u.is_op("slice") and u.attributes == at)
    return next(there, None) or _slice(graph, value, dim, at["start"], at["stop"], at["step"])


@simplifies("concat")
def concat_of_all_slices(graph: Graph, node: Node) -> Value | None:
    """All equal slices of x along one dim, concatenated along another one: a reshape of x, permuted.

    The slices may have been permuted alike, and reshaped by dims of length 1 that come and go, as unbind and stack do.
    """
    found = [one for part in node.operands if (one := _slice_of(part)) is not None]
    if len(found) < 2 or len(found) != len(node.operands) or any(order != found[0][1] for _, order in found):
        return None
    slices, (first, order) = [one for one, _ in found], found[0]
    x, dim, end = first.operands[0], first.attributes["dim"], 0
    length = first.result.shape[dim]
    for part in slices:
        if part.operands[0] is not x or part.attributes["dim"] != dim or part.attributes["step"] != 1:
            return None
        if not same_size(part.attributes["start"], end) or not same_size(part.result.shape[dim], length):
            return None
        end = simplify(part.attributes["stop"])
    if not same_size(end, x.shape[dim]):
        return None
    shape, at = node.operands[0].shape, len(node.result.shape) + node.attributes["dim"]
    before = sum(n != 1 for n in shape[:at])
    from_, count, grows = len(x.shape) + dim, len(slices), shape[at] != 1
    # x with its dim as (slices, length), the number of the slice before the dim that grows, in the order of x.
    wide = (*x.shape[:from_], count, length, *x.shape[from_ + 1 :])
    moved = [d if d < from_ else d + 1 for d in order]
    inner = sorted(moved)
    place = inner.index(moved[before]) if before < len(moved) else len(inner)
    ones = [d for d in range(len(wide)) if d != from_ and d not in moved]
    value = _view(graph, x, wide, (*ones, *inner[:place], from_, *inner[place:]))
    # Then in the order of the parts.
    number = [] if grows else [from_]
    labels = [*inner[:place], *number, *inner[place:]]
    sizes = {d: wide[d] * (count if grows and d == moved[before] else 1) for d in labels if d != from_} | {from_: count}
    wanted = tuple(labels.index(d) for d in (*moved[:before], *number, *moved[before:]))
    value = _view(graph, value, tuple(sizes[d] for d in labels), wanted)
    return graph.add_node("reshape", [value], {"shape": node.result.shape}).result


def _view(graph: Graph, x: Value, shape: tuple[Size, ...], dims: tuple[int, ...]) -> Value:
    """A reshape to that shape, permuted; only where dims other than of length 1 move."""
    moved = [d for d in dims if shape[d] != 1]
    if moved == sorted(moved):
        return x
    value = graph.add_node("reshape", [x], {"shape": shape}).result
    return graph.add_node("permute", [value], {"dims": dims}).result


def _slice_of(value: Value) -> tuple[Node, list[int]] | None:
    """The slice that a value is, and the order in which it has the slice's dims, those of length 1 aside."""
    order = list(range(sum(n != 1 for n in value.shape)))
    while (node := value.producer) is not None:
        own = [d for d, n in enumerate(value.shape) if n != 1]
        if node.is_op("slice"):
            return node, [own[o] for o in order]
        if not node.is_op("reshape", "permute"):
            return None
        (inner,) = node.operands
        known = [d for d, n in enumerate(inner.shape) if n != 1]
        if node.is_op("permute"):
            order = [known.index(node.attributes["dims"][own[o]]) for o in order]
        elif not same_shape(tuple(inner.shape[d] for d in known), tuple(value.shape[d] for d in own)):
            return None
        value = inner
    return None


@simplifies("concat")
def concat_of_one(graph: Graph, node: Node) -> Value | None:
    """The concatenation of one value is the value."""
    return node.operands[0] if len(node.operands) == 1 else None


@simplifies("concat")
def concat_of_equal(graph: Graph, node: Node) -> Value | None:
    """A value concatenated with itself, as stacking does, is the value expanded."""
    (x, *others), shape = node.operands, node.result.shape
    if any(v is not x for v in others):
        return None
    at = len(shape) + node.attributes["dim"]
    repeated = graph.add_node("reshape", [x], {"shape": (*x.shape[:at], 1, *x.shape[at:])}).result
    repeated = graph.add_node("expand", [repeated], {"shape": (*x.shape[:at], len(others) + 1, *x.shape[at:])}).result
    return graph.add_node("reshape", [repeated], {"shape": shape}).result


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
def concat_of_permuted(graph: Graph, node: Node) -> Value | None:
    """Concatenate values with equal permutations first, then permute."""
    views = (v.producer for v in node.operands)
    dims = next((v.attributes["dims"] for v in views if v is not None and v.is_op("permute")), None)
    if dims is None:
        return None
    parts = [inner for v in node.operands if (inner := _before_permute(v, dims)) is not None]
    if len(parts) != len(node.operands):
        return None
    joined = graph.add_node("concat", parts, {"dim": dims[node.attributes["dim"]] - len(dims)}).result
    return graph.add_node("permute", [joined], {"dims": dims}).result


def _before_permute(value: Value, dims: tuple[int, ...]) -> Value | None:
    """Return the operand of a permutation; a reshape counts as one where only length-1 dims move."""
    view = value.producer
    if view is None or not view.is_op("permute", "reshape"):
        return None
    (x,) = view.operands
    if view.is_op("permute"):
        return x if view.attributes["dims"] == dims else None
    moved = [d for d in dims if len(x.shape) == len(dims) and x.shape[d] != 1]
    same = len(x.shape) == len(dims) and same_shape(tuple(x.shape[d] for d in dims), value.shape)
    return x if same and moved == sorted(moved) else None


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
