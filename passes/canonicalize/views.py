"""Views: chains become one view, views that change nothing go, and broadcasting replaces explicit expansion."""

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import Size, broadcast, same_shape, same_size
from fusec.passes.canonicalize.numbers import number_of
from fusec.rewriting.driver import simplifies


def _view(value: Value, op: str) -> Node | None:
    """The producer of the value, where it is that view."""
    return value.producer if value.producer is not None and value.producer.op.name == op else None


@simplifies("reshape", "expand")
def same_shape_view(graph: Graph, node: Node) -> Value | None:
    """A reshape or an expansion to the shape it has."""
    (x,) = node.operands
    return x if same_shape(x.shape, node.result.shape) else None


@simplifies("permute")
def identity_permute(graph: Graph, node: Node) -> Value | None:
    """A permutation that moves no dim."""
    dims = node.attributes["dims"]
    return node.operands[0] if dims == tuple(range(len(dims))) else None


@simplifies("slice")
def full_slice(graph: Graph, node: Node) -> Value | None:
    """A slice of all elements is its operand."""
    (x,) = node.operands
    return x if same_shape(x.shape, node.result.shape) else None


@simplifies("reshape")
def reshape_of_reshape(graph: Graph, node: Node) -> Value | None:
    """The last of several reshapes decides."""
    inner = _view(node.operands[0], "reshape")
    return graph.add_node("reshape", inner.operands, dict(node.attributes)).result if inner else None


@simplifies("permute")
def permute_of_permute(graph: Graph, node: Node) -> Value | None:
    """Two permutations are one."""
    inner = _view(node.operands[0], "permute")
    if inner is None:
        return None
    dims = tuple(inner.attributes["dims"][d] for d in node.attributes["dims"])
    return graph.add_node("permute", inner.operands, {"dims": dims}).result


@simplifies("expand")
def expand_of_expand(graph: Graph, node: Node) -> Value | None:
    """The last of several expansions decides."""
    inner = _view(node.operands[0], "expand")
    return graph.add_node("expand", inner.operands, dict(node.attributes)).result if inner else None


@simplifies("reshape")
def ones_before_expanding(graph: Graph, node: Node) -> Value | None:
    """Dims of length 1 that a reshape drops from an expanded value are dropped before it is expanded."""
    inner, shape = _view(node.operands[0], "expand"), node.result.shape
    if inner is None:
        return None
    wide, (x,) = node.operands[0].shape, inner.operands
    kept = kept_dims(shape, wide)
    if kept is None or len(kept) == len(wide):
        return None
    own = (1,) * (len(wide) - len(x.shape)) + x.shape
    narrow = graph.add_node("reshape", [x], {"shape": tuple(own[d] for d in kept)}).result
    return graph.add_node("expand", [narrow], {"shape": shape}).result


def kept_dims(inner: tuple[Size, ...], shape: tuple[Size, ...]) -> list[int] | None:
    """Return which dims are those of ``inner``, the others having length 1; None for any other reshape."""
    kept: list[int] = []
    for d, n in enumerate(shape):
        if len(kept) < len(inner) and same_size(n, inner[len(kept)]):
            kept.append(d)
        elif n != 1:
            return None
    return kept if len(kept) == len(inner) else None


@simplifies("permute")
def permute_of_ones(graph: Graph, node: Node) -> Value | None:
    """A permutation that moves only length-1 dims keeps the order of the elements: a reshape."""
    (x,) = node.operands
    moved = [d for d in node.attributes["dims"] if x.shape[d] != 1]
    if moved != sorted(moved) or 0 in x.shape:
        return None
    return graph.add_node("reshape", [x], {"shape": node.result.shape}).result


@simplifies("permute")
def permute_before_ones(graph: Graph, node: Node) -> Value | None:
    """A permutation after a reshape that only adds or drops length-1 dims comes before it."""
    inner = _view(node.operands[0], "reshape")
    if inner is None:
        return None
    (x,) = inner.operands
    own, seen = ([d for d, n in enumerate(v.shape) if n != 1] for v in (x, node.operands[0]))
    if not same_shape(tuple(x.shape[d] for d in own), tuple(node.operands[0].shape[d] for d in seen)):
        return None
    places = dict(zip(seen, own, strict=True))
    moved = [places[d] for d in node.attributes["dims"] if d in places]
    dims = (*(d for d in range(len(x.shape)) if d not in own), *moved)
    permuted = graph.add_node("permute", [x], {"dims": dims}).result
    return graph.add_node("reshape", [permuted], {"shape": node.result.shape}).result


_POINTWISE = (
    "add", "sub", "mul", "div", "pow", "maximum", "minimum", "and", "or", "xor", "where", "atan2", "remainder",
    "eq", "ne", "lt", "le", "gt", "ge",
)  # fmt: skip


@simplifies(*_POINTWISE)
def implicit_broadcast(graph: Graph, node: Node) -> Value | None:
    """An operand needs no expansion and no leading dims of length 1 where the operation broadcasts anyway."""
    operands = [_unexpanded(v) for v in node.operands]
    if all(a is b for a, b in zip(operands, node.operands, strict=True)):
        return None
    for keep in range(len(operands) + 1):
        # Where no other operand has the full shape, the first operands keep their expansion.
        chosen = [*node.operands[:keep], *operands[keep:]]
        if same_shape(broadcast(*(v.shape for v in chosen)), node.result.shape):
            break
    if all(a is b for a, b in zip(chosen, node.operands, strict=True)):
        return None
    return graph.add_node(node.op.name, chosen, dict(node.attributes), types=[node.result.type]).result


def _unexpanded(value: Value) -> Value:
    while value.producer is not None:
        node = value.producer
        if node.is_op("reshape"):
            inner = node.operands[0].shape
            lead = len(value.shape) - len(inner)
            if lead <= 0 or any(n != 1 for n in value.shape[:lead]) or not same_shape(value.shape[lead:], inner):
                return value
        elif not node.is_op("expand"):
            return value
        value = node.operands[0]
    return value


_UNARY = (
    "neg", "abs", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "log", "tanh", "sigmoid", "erf", "sin", "cos", "not",
    "cast",
)  # fmt: skip


@simplifies(*_UNARY, "add", "sub", "mul", "div", "maximum", "minimum", "pow", "where")
def compute_before_expanding(graph: Graph, node: Node) -> Value | None:
    """f(expand(x)) = expand(f(x)), which computes each element once; the other operands of f are numbers."""
    wide = _computed_from(node)
    inner = _view(wide, "expand") if wide is not None else None
    if wide is None or inner is None or len(wide.users) != 1:
        return None
    return graph.add_node("expand", [_of_narrow(graph, node, wide, inner)], {"shape": node.result.shape}).result


@simplifies(*_UNARY, "mul", "div")
def compute_before_repeating(graph: Graph, node: Node) -> Value | None:
    """f(repeat(x)) = repeat(f(x)), where repeating is to expand and to reshape, and all that reads it is such an f."""
    wide = _computed_from(node)
    merged = _view(wide, "reshape") if wide is not None else None
    inner = _view(merged.operands[0], "expand") if merged is not None else None
    if wide is None or merged is None or inner is None or any(_computed_from(user) is None for user in wide.users):
        return None
    value = graph.add_node("expand", [_of_narrow(graph, node, wide, inner)], dict(inner.attributes)).result
    return graph.add_node("reshape", [value], dict(merged.attributes)).result


def _computed_from(node: Node) -> Value | None:
    """The only operand that is no number, of a function of each element."""
    wide = [v for v in node.operands if number_of(v) is None]
    return wide[0] if node.has(Trait.POINTWISE) and len(wide) == 1 else None


def _of_narrow(graph: Graph, node: Node, wide: Value, expansion: Node) -> Value:
    """Return a node's computation on operands before their expansion."""
    operands = [expansion.operands[0] if v is wide else v for v in node.operands]
    return graph.add_node(node.op.name, operands, dict(node.attributes)).result
