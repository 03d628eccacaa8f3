"""Decomposition of scaled-dot-product attention into primitives, where a kernel can be generated for it."""

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fusec.errors import FusecError, ScheduleError
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.structure import structure
from fusec.ir.types import BOOL, I64, DType, Size, TensorType, accumulation, broadcast, same_shape, same_size
from fusec.loops.plan import plan_kernel
from fusec.loops.strides import dense, view_layout
from fusec.pipeline import Context
from fusec.rewriting.driver import cut

TARGET = "aten.scaled_dot_product_attention.default"
_LETTERS = "abcdefghijklmnop"


@dataclass(frozen=True)
class DecomposeSDPA:
    """Make a region ``attention`` of each call of scaled-dot-product attention that has a schedule."""

    name: ClassVar[str] = "attention"

    def apply(self, graph: Graph, context: Context) -> None:
        """Decompose every call that can be; leave a remark for each other call with the reason."""
        calls = [n for n in graph.nodes if n.has(Trait.OPAQUE) and n.attributes.get("target") == TARGET]
        planned: set[Hashable] = set()
        for call in calls:
            try:
                body = decompose(call)
                laid_out = _with_layouts(body, call)
                if (key := structure(laid_out)) not in planned:
                    plan_kernel(laid_out, context.limits)
                    planned.add(key)
            except (FusecError, ValueError) as error:
                reason = error.reason if isinstance(error, FusecError) else str(error)
                context.remarks.add(
                    "missed", self.name, "attention stays a call of ATen", subject="attention", reason=reason,
                    sources=tuple(map(str, call.sources)),
                )  # fmt: skip
                continue
            if not context.application("attention", call.sources):
                continue
            attributes = {"fusion": "attention", "kind": "declared", "body": body}
            region = graph.add_node(
                "region", call.operands, attributes, types=[call.result.type], sources=call.sources
            )  # fmt: skip
            inputs = list(dict.fromkeys(call.operands))
            # The call has no meaning over a finite field, so the check runs in floating point only.
            before, after = (cut(inputs, [n], n.results) for n in (call, region))
            if not context.verifies or context.agrees("attention", before, after, exact=False):
                graph.replace_value(call.result, region.result)
            else:
                graph.erase(region)
        graph.erase_dead(calls)
        graph.sort()


def _with_layouts(body: Graph, call: Node) -> Graph:
    """Return a copy of the body whose inputs have the strides that a kernel will see, which may differ from eager's."""
    copy = body.copy()
    for value, operand in zip(copy.inputs, call.operands, strict=True):
        value.type = _layout(operand)
    return copy


def _layout(value: Value) -> TensorType:
    """Return the type of a value with its strides in memory: a view's from its operand's, a computed value's dense."""
    node = value.producer
    if node is None or node.has(Trait.OPAQUE):
        return value.tensor
    if not node.is_alias:
        return dense(value.tensor)
    inner = _layout(node.operands[0])
    found = view_layout(node, inner)
    return dense(value.tensor) if found is None else replace(inner, shape=value.shape, strides=found[0])


def decompose(call: Node) -> Graph:
    """Return a body that computes a call from primitives, with one input for each operand of the call.

    A query of which no key is visible gives 0, as the call does.

    Raises:
        ScheduleError: where the call has no decomposition.
    """
    body = Graph()
    write = _Writer(body, call.operands[0].tensor.device)
    given = _arguments(call, [body.add_input(v.type, v.name) for v in call.operands])
    _check(given)
    query, key, value = _broadcast(write, given)
    scores, is_masked = _scores(write, query, key, given)
    weights = _softmax(write, scores, is_masked)
    result = write.matmul(write.cast(weights, value.dtype), value, transposed=False)
    if not same_shape(result.shape, call.result.shape):
        raise _refused(f"the result is {call.result.type}")
    result.type = call.result.type
    body.set_outputs([result])
    return body


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a call, with the inputs of its decomposition for tensors; a number may be symbolic."""

    query: Value
    key: Value
    value: Value
    mask: Value | None
    """Boolean, False where a key is hidden; or added to the scores."""
    dropout: Any
    """Probability."""
    causal: bool
    scale: Any
    """None for ``1 / sqrt(size of a head)``."""
    grouped: bool
    """True if several heads of queries may share one head of keys and values."""


def _arguments(call: Node, inputs: list[Value]) -> _Arguments:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    options = dict(zip(names, call.attributes["args"], strict=False)) | dict(call.attributes["kwargs"])

    def get(name: str) -> Any:
        argument = options.get(name)
        return inputs[argument[1]] if isinstance(argument, tuple) and argument[0] == "%" else argument

    return _Arguments(
        get("query"), get("key"), get("value"), get("attn_mask"), get("dropout_p"), bool(get("is_causal")),
        get("scale"), bool(get("enable_gqa")),
    )  # fmt: skip


def _check(given: _Arguments) -> None:
    """Raise ScheduleError for arguments without a decomposition."""
    if given.dropout:
        raise _refused("it has dropout")
    if same_size(given.key.shape[-2], 0):
        raise _refused("there are no keys")
    if given.scale is None and not isinstance(given.query.shape[-1], int):
        raise _refused("the size of a head is not known at compile time")
    if given.scale is not None and not isinstance(given.scale, int | float):
        raise _refused("the scale is not known at compile time")


def _broadcast(write: "_Writer", given: _Arguments) -> tuple[Value, Value, Value]:
    """Return queries, keys and values with the same batch dims and number of heads."""
    query, key, value = given.query, given.key, given.value
    if given.grouped:
        key, value = (write.repeat_heads(x, query.shape[-3]) for x in (key, value))
    batch = broadcast(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    query, key, value = (write.expand(x, (*batch, *x.shape[-2:])) for x in (query, key, value))
    return query, key, value


def _scores(write: "_Writer", query: Value, key: Value, given: _Arguments) -> tuple[Value, bool]:
    """Return ``query @ key.T``, scaled and masked, in the accumulation type; and whether a score may be -inf."""
    wide = accumulation(query.dtype)
    head = query.shape[-1]
    scale = given.scale if given.scale is not None else 1 / math.sqrt(int(head))
    scores = write.matmul(query, key, transposed=True)
    scores = write("mul", write.cast(scores, wide), write.number(float(scale), wide))
    if given.causal:
        rows, columns = (write.positions(n) for n in scores.shape[-2:])
        visible = write("ge", write.reshape(rows, (scores.shape[-2], 1)), columns)
        scores = write("where", visible, scores, write.number(-math.inf, wide))
    mask = given.mask
    if mask is not None and mask.dtype == BOOL:
        # Added, as ATen does: a NaN among the scores stays one under the mask.
        mask = write("where", mask, write.number(0.0, wide), write.number(-math.inf, wide))
    if mask is not None:
        scores = write("add", scores, write.cast(mask, wide))
    return scores, given.causal or mask is not None


def _softmax(write: "_Writer", scores: Value, is_masked: bool) -> Value:
    """Return the softmax of scores along their last dim; 0 for rows that are -inf throughout."""
    largest = write.reduce("max", scores)
    exponential = write("exp", write("sub", scores, largest))
    weights = write("div", exponential, write.reduce("sum", exponential))
    if not is_masked:
        return weights
    empty = write("eq", largest, write.number(-math.inf, scores.dtype))
    return write("where", empty, write.number(0.0, scores.dtype), weights)


def _refused(why: str) -> ScheduleError:
    return ScheduleError("no generated attention", why=why)


class _Writer:
    """Appends nodes to a body whose tensors are on one device; each method returns the new value."""

    def __init__(self, body: Graph, device: str) -> None:
        self.body, self.device = body, device

    def __call__(self, op: str, *operands: Value, **attributes: Any) -> Value:
        return self.body.add_node(op, operands, attributes).result

    def number(self, value: float, dtype: DType) -> Value:
        """Append a constant."""
        return self("constant", value=value, dtype=dtype, device=self.device)

    def positions(self, count: Size) -> Value:
        """Append 0, 1, … count - 1 as int64."""
        return self("iota", size=count, dtype=I64, device=self.device)

    def cast(self, value: Value, dtype: DType) -> Value:
        """Cast a value, unless it has the dtype."""
        return value if value.dtype == dtype else self("cast", value, dtype=dtype)

    def reshape(self, value: Value, shape: tuple[Size, ...]) -> Value:
        """Reshape a value."""
        return self("reshape", value, shape=shape)

    def expand(self, value: Value, shape: tuple[Size, ...]) -> Value:
        """Broadcast a value, unless it has the shape."""
        return value if same_shape(value.shape, shape) else self("expand", value, shape=shape)

    def repeat_heads(self, value: Value, heads: Size) -> Value:
        """Repeat each head of keys or values, so that there is one for each head of queries."""
        *batch, own, rows, columns = value.shape
        if not isinstance(own, int) or not isinstance(heads, int) or own == heads:
            return value
        single = self.reshape(value, (*batch, own, 1, rows, columns))
        repeated = self.expand(single, (*batch, own, heads // own, rows, columns))
        return self.reshape(repeated, (*batch, heads, rows, columns))

    def reduce(self, op: str, value: Value) -> Value:
        """Reduce the last dim, which is kept with length 1."""
        return value if value.shape[-1] == 1 else self(op, value, dims=(-1,))

    def matmul(self, a: Value, b: Value, transposed: bool) -> Value:
        """Multiply ``a`` by ``b``, or by ``b`` transposed; over a dim of length 1 there is nothing to contract."""
        if not transposed and a.shape[-1] == 1:
            return self("mul", a, b)
        if transposed and b.shape[-2] == 1:
            wide = accumulation(a.dtype)
            return self.cast(self.reduce("sum", self("mul", self.cast(a, wide), self.cast(b, wide))), a.dtype)
        rank = len(a.shape)
        batch, row, column = _LETTERS[: rank - 2], _LETTERS[rank - 2], _LETTERS[rank - 1]
        right = f"{column}z" if transposed else f"z{column}"
        return self("contraction", a, b, spec=f"{batch}{row}z,{batch}{right}->{batch}{row}{column}")
