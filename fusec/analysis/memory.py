"""Bytes and arithmetic of nodes and values, as expressions over the sizes."""

from collections.abc import Iterable, Iterator

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import Size, TensorType, product, simplify
from fusec.loops.indexing import stored_value

_MATMULS = ("mm", "linear", "conv", "matmul", "einsum")
_LOOKUPS = ("aten.embedding.", "aten.index.", "aten.index_select.")  # opaque calls


def touched_bytes(value: Value) -> Size:
    """Return the bytes of a value's distinct elements: a dim of stride 0 counts once."""
    type = value.type
    if not isinstance(type, TensorType):
        return 0
    distinct = tuple(n for n, stride in zip(type.shape, type.strides, strict=True) if stride != 0)
    return simplify(product(distinct) * type.dtype.bytes)


def moved_bytes(node: Node) -> Size:
    """Return the bytes that a node reads and writes when it runs alone; aliasing views and constants move none."""
    if node.has(Trait.SOURCE) or node.is_alias:
        return 0
    if node.has(Trait.WRITE):
        return simplify((3 if "combine" in node.attributes else 2) * touched_bytes(node.operands[1]))
    if is_lookup(node):
        return simplify(2 * _sum(node.results) + _sum(node.operands[1:]))
    if node.has(Trait.REGION):
        return _sum(ends(node))
    return _sum((*dict.fromkeys(node.operands), *node.results))


def ends(region: Node) -> tuple[Value, ...]:
    """Return the values that a region loads, each once, and stores; of tables, the elements that it looks up."""
    inner = dict(zip(region.operands, region.body.inputs, strict=True))
    loaded = [outside for outside, inside in inner.items() if _is_read(inside)]
    return (*loaded, *_looked_up(region.body), *map(stored_value, region.body.outputs))


def body_ends(body: Graph) -> tuple[Value, ...]:
    """Return the values that a region with this body would load and store, as values of the body."""
    return (*filter(_is_read, body.inputs), *_looked_up(body), *map(stored_value, body.outputs))


def read_bytes(node: Node, operand: Value) -> Size:
    """Return the bytes that a node reads of an operand: of a table, the elements that it looks up."""
    if node.has(Trait.WRITE) and node.operands[0] is operand:
        return touched_bytes(node.operands[1]) if "combine" in node.attributes else 0
    if not node.has(Trait.REGION):
        return touched_bytes(node.result) if is_lookup(node) and node.operands[0] is operand else touched_bytes(operand)
    inner = dict(zip(node.operands, node.body.inputs, strict=True))[operand]
    return touched_bytes(operand) if _is_read(inner) else _sum(_found_in(inner))


def _found_in(table: Value) -> Iterator[Value]:
    """Yield what lookups find in a value, or in views of it."""
    for user in table.users:
        if user.has(Trait.VIEW):
            yield from _found_in(user.result)
        elif user.has(Trait.LOOKUP) and user.operands[0] is table:
            yield user.result


def _looked_up(body: Graph) -> list[Value]:
    """Return what lookups, and scatters that combine, read: the elements found, or the whole table if it is smaller."""
    found = list[Value]()
    for node in body.nodes:
        if node.has(Trait.LOOKUP) or "combine" in node.attributes:
            elements = node.result if node.has(Trait.LOOKUP) else node.operands[1]
            sizes = touched_bytes(node.operands[0]), touched_bytes(elements)
            known = all(isinstance(n, int) for n in sizes)
            found.append(node.operands[0] if known and sizes[0] < sizes[1] else elements)
    return found


def _is_read(value: Value) -> bool:
    """Return whether a region reads a whole input, rather than only writing to it or looking elements up."""
    return not value.users or any(
        value in user.operands[1:]
        or (_is_read(user.result) if user.has(Trait.VIEW) else not user.has(Trait.WRITE | Trait.LOOKUP))
        for user in value.users
    )


def is_attention(node: Node) -> bool:
    """Return whether a node is a call of ATen's attention."""
    return node.has(Trait.OPAQUE) and "attention" in str(node.attributes.get("target", ""))


def is_lookup(node: Node) -> bool:
    """Return whether a node reads elements of its first operand at dynamic indices, and not the whole operand."""
    target = str(node.attributes.get("target", ""))
    return node.has(Trait.LOOKUP) or (node.has(Trait.OPAQUE) and target.startswith(_LOOKUPS))


def _sum(values: Iterable[Value]) -> Size:
    return simplify(sum((touched_bytes(value) for value in values), start=0))


def flops(node: Node) -> Size:
    """Return the floating-point operations of a node; of opaque calls, matmuls and convolutions alone count."""
    if node.has(Trait.REGION):
        return simplify(sum((flops(n) for n in node.body.nodes), start=0))
    if node.has(Trait.CONTRACTION):
        return simplify(2 * product(tuple(node.label_sizes.values())))
    if node.has(Trait.CONVOLUTION):
        return simplify(2 * node.result.tensor.numel * product(node.operands[1].shape[1:]))
    if node.has(Trait.REDUCTION):
        return node.operands[0].tensor.numel
    if node.has(Trait.POINTWISE):
        return simplify(node.result.tensor.numel * node.op.cost)
    if is_attention(node):
        return _attention(node)
    if node.has(Trait.OPAQUE):
        return _opaque_matmul(node)
    return 0


def _opaque_matmul(node: Node) -> Size:
    """Return the operations of a matmul or convolution in ATen: 2 for each element that is summed for a result."""
    target = str(node.attributes.get("target", ""))
    operands = [v.type for v in node.operands if isinstance(v.type, TensorType) and v.type.dtype.is_float]
    if len(operands) < 2 or not any(word in target for word in _MATMULS):
        return 0
    if "conv" in target:
        return _opaque_convolution(node, operands)
    return simplify(2 * node.results[0].tensor.numel * product(operands[-2].shape[-1:]))


def _opaque_convolution(node: Node, operands: list[TensorType]) -> Size:
    """Return the operations of a transposed convolution, or of the gradients of any: each multiplies every window."""
    backward = "backward" in str(node.attributes["target"])
    made = [r.type for r in node.results if isinstance(r.type, TensorType) and r.type.rank > 1]
    out, x, weight = operands[:3] if backward else (*made, *operands[:2])
    transposed = True in node.attributes["args"][6 + backward : 7 + backward]
    return simplify(2 * len(made) * (x if transposed else out).numel * product(weight.shape[1:]))


def _attention(node: Node) -> Size:
    query, key, value = (v.shape for v in node.operands[:3])
    return simplify(2 * product(query[:-1]) * key[-2] * (query[-1] + value[-1]))
