"""Bytes and arithmetic of nodes and values, as expressions over the sizes."""

from collections.abc import Iterable

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait, split_spec
from fusec.ir.types import Size, TensorType, product, simplify

_PRODUCTS = ("mm", "linear", "conv", "matmul", "einsum")
_LOOKUPS = ("aten.embedding.", "aten.index.", "aten.index_select.")  # what stays a call


def touched_bytes(value: Value) -> Size:
    """Bytes of the distinct elements of a value: a dim of stride 0 counts once."""
    type = value.type
    if not isinstance(type, TensorType):
        return 0
    distinct = tuple(n for n, stride in zip(type.shape, type.strides, strict=True) if stride != 0)
    return simplify(product(distinct) * type.dtype.bytes)


def moved_bytes(node: Node) -> Size:
    """Bytes a node reads and writes when it runs on its own; aliasing views and numbers move nothing."""
    if node.has(Trait.SOURCE) or node.is_alias:
        return 0
    if node.has(Trait.WRITE):
        return simplify(2 * touched_bytes(node.operands[1]))
    if is_lookup(node):
        return simplify(2 * _sum(node.results) + _sum(node.operands[1:]))
    if node.has(Trait.REGION):
        return _sum(ends(node))
    return _sum((*dict.fromkeys(node.operands), *node.results))


def ends(region: Node) -> tuple[Value, ...]:
    """What a region reads from memory, each value once and of tables what it looks up, and what it stores there."""
    inner = dict(zip(region.operands, region.body.inputs, strict=True))
    return (*(v for v, of in inner.items() if _is_read(of)), *_found(region.body), *map(_stored, region.body.outputs))


def body_ends(body: Graph) -> tuple[Value, ...]:
    """What a region with this body would read and store, by its values inside."""
    return (*filter(_is_read, body.inputs), *_found(body), *map(_stored, body.outputs))


def _found(body: Graph) -> list[Value]:
    return [node.result for node in body.nodes if node.has(Trait.LOOKUP)]


def _is_read(value: Value) -> bool:
    """Whether a region reads all that its input holds, and does not only write there or look something up."""
    return not value.users or any(
        value in user.operands[1:]
        or (_is_read(user.result) if user.has(Trait.VIEW) else not user.has(Trait.WRITE | Trait.LOOKUP))
        for user in value.users
    )


def _stored(value: Value) -> Value:
    """What goes to memory for an output of a region: of a write, the value that is written."""
    node = value.producer
    return node.operands[1] if node is not None and node.has(Trait.WRITE) else value


def is_attention(node: Node) -> bool:
    """Whether a node is a whole attention, left to ATen."""
    return node.has(Trait.OPAQUE) and "attention" in str(node.attributes.get("target", ""))


def is_lookup(node: Node) -> bool:
    """Whether a node takes places out of its first operand, so that it reads those and not the whole table."""
    target = str(node.attributes.get("target", ""))
    return node.has(Trait.LOOKUP) or (node.has(Trait.OPAQUE) and target.startswith(_LOOKUPS))


def _sum(values: Iterable[Value]) -> Size:
    return simplify(sum((touched_bytes(value) for value in values), start=0))


def flops(node: Node) -> Size:
    """Floating-point operations of a node; of opaque calls, those of their products alone count."""
    if node.has(Trait.REGION):
        return simplify(sum((flops(n) for n in node.body.nodes), start=0))
    if node.has(Trait.CONTRACTION):
        return _contraction(node)
    if node.has(Trait.CONVOLUTION):
        return simplify(2 * node.result.tensor.numel * product(node.operands[1].shape[1:]))
    if node.has(Trait.REDUCTION):
        return node.operands[0].tensor.numel
    if node.has(Trait.POINTWISE):
        return simplify(node.result.tensor.numel * node.op.cost)
    if is_attention(node):
        return _attention(node)
    if node.has(Trait.OPAQUE):
        return _opaque_product(node)
    return 0


def _opaque_product(node: Node) -> Size:
    """A call that multiplies by a matrix or a filter: 2 for each result and element summed for it."""
    target = str(node.attributes.get("target", ""))
    operands = [v.type for v in node.operands if isinstance(v.type, TensorType) and v.type.dtype.is_float]
    if len(operands) < 2 or not any(word in target for word in _PRODUCTS):
        return 0
    if "conv" in target:
        return _opaque_convolution(node, operands)
    return simplify(2 * node.results[0].tensor.numel * product(operands[-2].shape[-1:]))


def _opaque_convolution(node: Node, operands: list[TensorType]) -> Size:
    """A transposed convolution, or the gradients of one of either kind: each meets every window with its weights."""
    backward = "backward" in str(node.attributes["target"])
    made = [r.type for r in node.results if isinstance(r.type, TensorType) and r.type.rank > 1]
    out, x, weight = operands[:3] if backward else (*made, *operands[:2])
    transposed = True in node.attributes["args"][6 + backward : 7 + backward]
    return simplify(2 * len(made) * (x if transposed else out).numel * product(weight.shape[1:]))


def _contraction(node: Node) -> Size:
    terms, _ = split_spec(node.attributes["spec"])
    sizes = {
        label: n for term, x in zip(terms, node.operands, strict=True) for label, n in zip(term, x.shape, strict=True)
    }
    return simplify(2 * product(tuple(sizes.values())))


def _attention(node: Node) -> Size:
    query, key, value = (v.shape for v in node.operands[:3])
    return simplify(2 * product(query[:-1]) * key[-2] * (query[-1] + value[-1]))
