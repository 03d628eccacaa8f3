"""Raise attention in a kernel's body to one call of ``scaled_dot_product_attention``: the inverse of decomposition."""

import math
from collections.abc import Sequence

import torch

from fusec.errors import ScheduleError
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import split_spec
from fusec.ir.types import Size, product, same_shape, same_size
from fusec.loops.attention import Attention, find_attention
from fusec.loops.indexing import lower_to_loops
from fusec.reference.dtypes import torch_dtype
from fusec.reference.interpreter import evaluate
from fusec.rewriting.driver import cut

_HIDDEN = float(torch.finfo(torch.float16).min)
"""Scores up to this mask a key: masks of half types have their lowest number instead of -inf."""
TARGET = "aten.scaled_dot_product_attention.default"


def with_one_call(body: Graph) -> Graph:
    """Return a body whose attention is a call of ``scaled_dot_product_attention``, with the rest unchanged.

    Masks must depend on positions alone, and leave each query a key: the result of a fully masked row depends on the
    kernel that torch selects (0 or NaN), and a mask that is an input may have such rows in a later call.

    Args:
        body: of an attention kernel of static sizes.

    Raises:
        ScheduleError: if no call computes what the body does.
    """
    body = body.copy()
    attention = find_attention(lower_to_loops(body))
    if attention is None:
        raise _error("there is no attention")
    first, second = attention.product.node, attention.weighted[0].node
    weights = _softmax(attention, second)
    factor, added = _scores(body, attention.scores.node.result, first.result)
    roles = _Roles(body, first, second, weights)
    query, (key, value), shared = roles.query(), *roles.keys_and_values()
    mask, causal = _mask(body, added, attention.scores.node.result, query) if added is not None else (None, False)
    operands = [query, key, value, *([] if mask is None else [mask])]
    given = (("%", 0), ("%", 1), ("%", 2), None if mask is None else ("%", 3), 0.0, causal)
    attributes = {"target": TARGET, "args": given, "kwargs": (("scale", factor), ("enable_gqa", shared))}
    type = query.tensor.with_shape((*query.shape[:-1], value.shape[-1]))
    call = body.add_node("opaque", operands, attributes, types=[type], sources=second.sources)
    body.replace_value(second.result, roles.result(call.result))
    body.erase_dead()
    body.sort()
    return body


def _softmax(attention: Attention, second: Node) -> Value:
    """Return the weights that the second matmul reads.

    Raises:
        ScheduleError: if they are not a plain softmax of the scores.
    """
    if not attention.is_plain or attention.maxima:
        raise _error("its softmax subtracts something else than the maximum of the scores")
    weights = next((v for v in second.operands if v.producer is attention.weights.node), None)
    if weights is None or not same_shape(weights.shape, attention.product.node.result.shape):
        raise _error("its scores or weights are reshaped before the second matmul")
    inner = _uncast(weights)
    if inner.is_op("where"):  # fully masked rows give 0
        guard = inner.operands[0].producer
        empty = guard is not None and guard.is_op("eq") and guard.operands[0].producer is attention.largest.node
        if guard is None or not empty or _number(guard.operands[1]) != -math.inf or _number(inner.operands[1]) != 0:
            raise _error("weights of some queries are set to 0")
        inner = _uncast(inner.operands[2])
    total = attention.total
    divided = inner.is_op("div") and inner.operands[0].producer is attention.exponential.node
    if not divided or total is None or inner.operands[1].producer is not total.node:
        raise _error("its weights are changed after the softmax")
    return weights


def _uncast(value: Value) -> Node:
    """Return the node that computes a value, looking through casts."""
    while value.producer is not None and value.producer.is_op("cast"):
        value = value.producer.operands[0]
    assert value.producer is not None
    return value.producer


def _number(value: Value) -> float | None:
    node = value.producer
    return node.attributes["value"] if node is not None and node.is_op("constant") else None


def _scores(body: Graph, value: Value, product_: Value) -> tuple[float, Value | None]:
    """Return the scale of the product in the scores, and the bias that is added to it, as a new value of the body.

    Raises:
        ScheduleError: if the scores are not of that form.
    """
    if value is product_:
        return 1.0, None
    node = value.producer
    assert node is not None
    holders = [i for i, v in enumerate(node.operands) if _depends_on(v, product_)]
    if len(holders) == 1:
        (own,) = holders
        factor, added = _scores(body, node.operands[own], product_)
        others = [v for i, v in enumerate(node.operands) if i != own]
        if node.is_op("cast") and node.result.dtype.is_float:
            return factor, added and body.add_node("cast", [added], dict(node.attributes)).result
        if node.is_op("add"):
            return factor, others[0] if added is None else body.add_node("add", [added, *others]).result
        number = _number(others[-1]) if others else None
        if number is not None and (node.is_op("mul") or (node.is_op("div") and own == 0)):
            scaled = factor * number if node.is_op("mul") else factor / number
            return scaled, added and body.add_node(node.op.name, [added, others[-1]]).result
        if node.is_op("where") and own and number is not None and number <= _HIDDEN:
            zero = body.constant(0.0, node.result.dtype, node.result.tensor.device) if added is None else added
            operands = [zero if i == own else v for i, v in enumerate(node.operands)]
            return factor, body.add_node("where", operands).result
    raise _error(f"its scores are computed with {node.op.name}")


def _depends_on(value: Value, part: Value) -> bool:
    """Return whether a value depends on another one, or is it."""
    return value is part or (value.producer is not None and any(_depends_on(v, part) for v in value.producer.operands))


def _mask(body: Graph, added: Value, scores: Value, query: Value) -> tuple[Value | None, bool]:
    """Return the bias of the scores as arguments of the call: a 4-d tensor or None, and whether it is causal.

    Raises:
        ScheduleError: if it depends on inputs, masks all keys of a query, or is not exact in the dtype of the queries.
    """
    if any(_depends_on(added, v) for v in body.inputs):
        raise _error("its mask or bias depends on inputs, and may mask all keys of a query")
    (numbers,) = evaluate(cut([], body.nodes, [added]), [], {})
    seen = numbers > _HIDDEN
    if not seen.any(-1).all():
        raise _error("all keys of a query are masked")
    if not numbers[seen].any():
        if seen.all():
            return None, False
        if seen.shape[-2:] == scores.shape[-2:] and bool((seen == torch.ones_like(seen).tril()).all()):
            return None, True
    if len(scores.shape) != 4:
        raise _error("its scores do not have four dims")
    rounded = numbers.to(torch_dtype(query.dtype)).to(numbers.dtype)
    if not torch.equal(numbers[seen], rounded[seen]):
        raise _error("its bias is not exact in the dtype of its queries")
    mask = body.add_node("cast", [added], {"dtype": query.dtype}).result if added.dtype != query.dtype else added
    return _reshaped(body, mask, (*(1,) * (4 - len(mask.shape)), *mask.shape)), False


class _Roles:
    """The operands of both matmuls with dims in the order of the call: batch, head, position, element."""

    def __init__(self, body: Graph, first: Node, second: Node, weights: Value) -> None:
        self.body, own = body, second.operands.index(weights)
        sides, scores = split_spec(first.attributes["spec"])
        terms, out = split_spec(second.attributes["spec"])
        names = dict(zip(terms[own], scores, strict=True))  # of dims, in both products
        column = next(label for label in terms[1 - own] if label not in names)
        names[column] = self.column = column.upper()
        lead, (self.row, self.position) = list(scores[:-2]), tuple(scores[-2:])
        self.batch, self.heads = lead[:1], lead[1:]
        given = zip(sides, first.operands, strict=True)
        (self.query_term, self.queries), (self.key_term, self.keys) = sorted(given, key=lambda x: self.position in x[0])
        self.value_term, self.values = "".join(names[n] for n in terms[1 - own]), second.operands[1 - own]
        self.out = "".join(names[n] for n in out)
        (self.depth,) = set(self.query_term) - set(scores)
        if (
            not {*lead, self.row} < set(self.query_term)
            or self.position in self.query_term + self.out
            or self.row in self.key_term + self.value_term
        ):
            raise _error("its queries and keys have other dims than its scores")
        if len({x.dtype for x in (self.queries, self.keys, self.values)}) > 1:
            raise _error("its queries, keys and values have different dtypes")
        self.sizes = dict(zip(scores, first.result.shape, strict=True))
        self.sizes[self.column] = self.values.shape[self.value_term.index(self.column)]

    def query(self) -> Value:
        """Return the queries."""
        return self._arranged(self.queries, self.query_term, self.heads, [self.row, self.depth])

    def keys_and_values(self) -> tuple[tuple[Value, Value], bool]:
        """Return keys and values, and whether several heads of the queries share each of their heads."""
        for once in (True, False):  # without and with heads repeated
            pair = []
            for value, term, last in (
                (self.keys, self.key_term, [self.position, self.depth]),
                (self.values, self.value_term, [self.position, self.column]),
            ):
                own = [n for n in self.heads if n in term]
                if own != self.heads[: len(own)] or not set(self.batch) <= set(term):
                    raise _error("its keys or values are not repeated along heads")
                if once and own == [term[1]]:
                    value = _unrepeated(self.body, value)
                pair.append(self._arranged(value, term, own, last))
            key, value = pair
            if same_size(key.shape[1], value.shape[1]):
                heads = product(tuple(self.sizes[n] for n in self.heads))
                return (key, value), not same_size(key.shape[1], heads)
        raise _error("its keys and values have different numbers of heads")

    def result(self, call: Value) -> Value:
        """Return the result of the call with the dims of the second matmul's result."""
        order = [*self.batch, *self.heads, self.row, self.column]
        apart = _reshaped(self.body, call, tuple(self.sizes[n] for n in order))
        dims = tuple(order.index(n) for n in self.out)
        if dims == tuple(range(len(dims))):
            return apart
        return self.body.add_node("permute", [apart], {"dims": dims}).result

    def _arranged(self, value: Value, term: str, heads: Sequence[str], last: Sequence[str]) -> Value:
        order = [*self.batch, *heads, *last]
        dims = tuple(term.index(n) for n in order)
        if dims != tuple(range(len(dims))):
            value = self.body.add_node("permute", [value], {"dims": dims}).result
        batch, own = value.shape[: len(self.batch)], value.shape[len(self.batch) : -2]
        return _reshaped(self.body, value, (product(batch), product(own), *value.shape[-2:]))


def _unrepeated(body: Graph, value: Value) -> Value:
    """Return keys or values before their heads are repeated for the heads of the queries; else unchanged."""
    merged = value.producer
    repeated = merged.operands[0].producer if merged is not None and merged.is_op("reshape") else None
    if repeated is None or not repeated.is_op("expand"):
        return value
    (one,), wide = repeated.operands, repeated.result.shape
    same = len(wide) == 5 and len(one.shape) == 5 and one.shape[2] == 1 and same_shape(one.shape[3:], wide[3:])
    if not same or not same_shape(value.shape, (wide[0], product(wide[1:3]), *wide[3:])):
        return value
    return _reshaped(body, one, (*one.shape[:2], *one.shape[3:]))


def _reshaped(body: Graph, value: Value, shape: tuple[Size, ...]) -> Value:
    return value if same_shape(value.shape, shape) else body.add_node("reshape", [value], {"shape": shape}).result


def _error(why: str) -> ScheduleError:
    return ScheduleError("the vendor's attention does not apply", why=why)
