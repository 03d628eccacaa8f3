"""Attention that arrives as one call of ATen, spelled out where a kernel of ours serves it."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fusec.errors import FusecError, ScheduleError
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
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
        """Spell out what can be; the others stay calls, with a remark that says why."""
        calls = [n for n in graph.nodes if n.has(Trait.OPAQUE) and n.attributes.get("target") == TARGET]
        for call in calls:
            try:
                body = spelled_out(call)
                plan_kernel(_as_laid_out(body, call), context.limits)
            except (FusecError, ValueError) as reason:
                said = reason.reason if isinstance(reason, FusecError) else str(reason)
                context.remarks.add(
                    "missed", self.name, "attention stays a call of ATen", subject="attention", reason=said,
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
            # Over a field nothing says what the call means, so that numbers decide.
            before, after = (cut(inputs, [n], n.results) for n in (call, region))
            if not context.verifies or context.agrees("attention", before, after, exact=False):
                graph.replace_value(call.result, region.result)
            else:
                graph.erase(region)
        graph.erase_dead(calls)
        graph.sort()


def _as_laid_out(body: Graph, call: Node) -> Graph:
    """The body with inputs that lie as a kernel will find them, which need not be as eager has them."""
    judged = body.copy()
    for value, given in zip(judged.inputs, call.operands, strict=True):
        value.type = _layout(given)
    return judged


def _layout(value: Value) -> TensorType:
    """How a value lies in memory: a view as what it views does, anything computed without gaps."""
    node = value.producer
    if node is None or node.has(Trait.OPAQUE):
        return value.tensor
    if not node.is_alias:
        return dense(value.tensor)
    inner = _layout(node.operands[0])
    found = view_layout(node, inner)
    return dense(value.tensor) if found is None else replace(inner, shape=value.shape, strides=found[0])


def spelled_out(call: Node) -> Graph:
    """The meaning of a call, with the inputs that it takes; masked rows give 0, as the call does.

    Raises:
        ScheduleError: for a call that has no such form.
    """
    options = dict(zip(("query", "key", "value", "mask", "dropout", "causal"), call.attributes["args"], strict=False))
    options |= dict(call.attributes["kwargs"])
    body = Graph()
    inputs = [body.add_input(v.type, v.name) for v in call.operands]

    def given(name: str, other: str = "") -> Any:
        value = options.get(name, options.get(other))
        return inputs[value[1]] if isinstance(value, tuple) and value[0] == "%" else value

    query, key, value, mask = given("query"), given("key"), given("value"), given("mask", "attn_mask")
    if given("dropout", "dropout_p"):
        raise ScheduleError("no generated attention", why="it drops weights at random")
    write = _Writer(body, query.tensor.device)
    if given("enable_gqa"):
        key, value = (write.shared(x, query.shape[-3]) for x in (key, value))
    if same_size(key.shape[-2], 0):
        raise ScheduleError("no generated attention", why="there are no keys")
    batch = broadcast(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    query, key, value = (write.expand(x, (*batch, *x.shape[-2:])) for x in (query, key, value))
    wide = accumulation(query.dtype)
    scores = write.product(query, key, transposed=True)
    scale = given("scale")
    if scale is None:
        if not isinstance(query.shape[-1], int):
            raise ScheduleError("no generated attention", why="the size of a head is not known")
        scale = 1 / math.sqrt(query.shape[-1])
    if not isinstance(scale, int | float):
        raise ScheduleError("no generated attention", why="its scale is not known when the kernel is made")
    scores = write("mul", write.cast(scores, wide), write.number(float(scale), wide))
    causal = given("causal", "is_causal")
    if causal:
        rows, columns = (write.positions(n) for n in scores.shape[-2:])
        seen = write("ge", write.reshape(rows, (scores.shape[-2], 1)), columns)
        scores = write("where", seen, scores, write.number(-math.inf, wide))
    if mask is not None and mask.dtype == BOOL:
        # Added, as the call does it: what is no number under the mask stays none.
        mask = write("where", mask, write.number(0.0, wide), write.number(-math.inf, wide))
    if mask is not None:
        scores = write("add", scores, write.cast(mask, wide))
    largest = write.reduce("max", scores)
    exponential = write("exp", write("sub", scores, largest))
    weights = write("div", exponential, write.reduce("sum", exponential))
    if mask is not None or causal:
        empty = write("eq", largest, write.number(-math.inf, wide))
        weights = write("where", empty, write.number(0.0, wide), weights)
    result = write.product(write.cast(weights, value.dtype), value, transposed=False)
    if not same_shape(result.shape, call.result.shape):
        raise ScheduleError("no generated attention", why=f"its result is {call.result.type}")
    result.type = call.result.type
    body.set_outputs([result])
    return body


class _Writer:
    """Appends nodes to a body, whose tensors lie on one device."""

    def __init__(self, body: Graph, device: str) -> None:
        self.body, self.device = body, device

    def __call__(self, op: str, *operands: Value, **attributes: Any) -> Value:
        return self.body.add_node(op, operands, attributes).result

    def number(self, value: float, dtype: DType) -> Value:
        """A number."""
        return self("constant", value=value, dtype=dtype, device=self.device)

    def positions(self, count: Size) -> Value:
        """0, 1, … count - 1."""
        return self("iota", size=count, dtype=I64, device=self.device)

    def cast(self, value: Value, dtype: DType) -> Value:
        """The value in another type."""
        return value if value.dtype == dtype else self("cast", value, dtype=dtype)

    def reshape(self, value: Value, shape: tuple[Size, ...]) -> Value:
        """The value in another shape."""
        return self("reshape", value, shape=shape)

    def expand(self, value: Value, shape: tuple[Size, ...]) -> Value:
        """The value broadcast."""
        return value if same_shape(value.shape, shape) else self("expand", value, shape=shape)

    def shared(self, value: Value, heads: Size) -> Value:
        """Keys or values of which each head serves several queries' heads."""
        *batch, own, rows, columns = value.shape
        if not isinstance(own, int) or not isinstance(heads, int) or own == heads:
            return value
        apart = self.reshape(value, (*batch, own, 1, rows, columns))
        repeated = self.expand(apart, (*batch, own, heads // own, rows, columns))
        return self.reshape(repeated, (*batch, heads, rows, columns))

    def reduce(self, op: str, value: Value) -> Value:
        """A reduction over the last dim."""
        return value if value.shape[-1] == 1 else self(op, value, dims=(-1,))

    def product(self, a: Value, b: Value, transposed: bool) -> Value:
        """``a`` times ``b``, or times ``b`` with its last two dims swapped; with one key it is no contraction."""
        if not transposed and a.shape[-1] == 1:
            return self("mul", a, b)
        if transposed and b.shape[-2] == 1:
            wide = accumulation(a.dtype)
            return self.cast(self.reduce("sum", self("mul", self.cast(a, wide), self.cast(b, wide))), a.dtype)
        rank = len(a.shape)
        batch, row, column = _LETTERS[: rank - 2], _LETTERS[rank - 2], _LETTERS[rank - 1]
        right = f"{column}z" if transposed else f"z{column}"
        return self("contraction", a, b, spec=f"{batch}{row}z,{batch}{right}->{batch}{row}{column}")
