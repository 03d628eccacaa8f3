"""The interpreter: runs every operation through torch, as oracle of the tests and where no kernel exists."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusec.ir.graph import Graph, Node, Value, storage
from fusec.ir.ops import Trait, multiplies_bytes, split_spec
from fusec.ir.types import DType, TensorType, accumulation, evaluate_size, evaluate_sizes
from fusec.reference.dtypes import TORCH_DTYPES, torch_dtype
from fusec.reference.opaque import call_opaque
from fusec.reference.sizes import bind_symbols

__all__ = ["POINTWISE", "Machine", "apply_view", "bind_symbols", "call_opaque", "evaluate"]

Datum: TypeAlias = Any
"""A tensor, a Python number (a 0-d value in full precision), or an object that only opaque nodes exchange."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers, by their size in bytes."""


def evaluate(
    graph: Graph,
    inputs: Sequence[Datum],
    symbols: Mapping[str, int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    mutate: bool = False,
) -> list[Datum]:
    """The outputs of a graph.

    Args:
        graph: the graph to evaluate.
        inputs: tensors, and numbers for scalar inputs; a 0-d input may be a number too.
        symbols: sizes by name; read from the inputs unless given.
        dtype: compute all float arithmetic in this dtype: casts between float dtypes are then no-ops, so that
            float64 yields the reference of the graph. Unless given, each operation rounds as eager torch does.
        mutate: writes change the inputs' storage, as they do in a compiled program; otherwise they work on copies.
    """
    if symbols is None:
        symbols = bind_symbols(graph, inputs)
    return Machine(symbols, dtype, mutate).evaluate(graph, inputs)


class Machine:
    """Runs graphs with one setting of sizes and dtype."""

    def __init__(self, symbols: Mapping[str, int], override: torch.dtype | None, mutate: bool) -> None:
        self.symbols, self.override, self.mutate = dict(symbols), override, mutate

    def dtype(self, dtype: DType) -> torch.dtype:
        """The type that values of ``dtype`` have here."""
        return self.override if self.override is not None and dtype.is_float else torch_dtype(dtype)

    def enter(self, value: Value, datum: Datum) -> Datum:
        """An input as the override wants it."""
        if isinstance(datum, Tensor) and isinstance(value.type, TensorType) and datum.is_floating_point():
            return datum if self.override is None else datum.to(self.override)
        return datum

    def tensor(self, datum: Datum, type: Any, dtype: torch.dtype | None = None) -> Datum:
        """Return a number as a tensor, where the type says that it is one."""
        if isinstance(datum, (int, float)) and isinstance(type, TensorType):
            return torch.full((), datum, dtype=dtype or self.dtype(type.dtype), device=type.device)
        return datum

    def evaluate(self, graph: Graph, inputs: Sequence[Datum]) -> list[Datum]:
        """Return the outputs for the caller's inputs, which the override converts."""
        with torch.no_grad():
            outputs = self.run(graph, [self.enter(v, x) for v, x in zip(graph.inputs, inputs, strict=True)])
            return [self.tensor(x, v.type) for v, x in zip(graph.outputs, outputs, strict=True)]

    def run(self, graph: Graph, inputs: Sequence[Datum]) -> list[Datum]:
        """Return the outputs; numbers stay Python numbers."""
        known: dict[Value, Datum] = dict(zip(graph.inputs, inputs, strict=True))
        left = {v: len(v.users) for v in graph.inputs} | {r: len(r.users) for n in graph.nodes for r in n.results}
        for v in graph.outputs:
            left[v] += 1
        for node in graph.nodes:
            results = self.node(node, [known[v] for v in node.operands])
            known.update(zip(node.results, results, strict=True))
            for v in dict.fromkeys(node.operands):
                left[v] -= 1
                if not left[v]:
                    del known[v]
        return [known[v] for v in graph.outputs]

    def node(self, node: Node, operands: list[Datum]) -> list[Datum]:
        """Return the results of one node; computed results are copied where writes could change their memory."""
        results = self.computed(node, operands)
        if not self.mutate or node.is_alias or node.writes or not node.has(Trait.POINTWISE | Trait.REDUCTION):
            return results
        return [x.clone() if isinstance(x, Tensor) and any(x is y for y in operands) else x for x in results]

    def computed(self, node: Node, operands: list[Datum]) -> list[Datum]:
        """The results of one node, which may be its operands."""
        if node.has(Trait.REGION):
            return self.run(node.body, operands)
        if node.has(Trait.OPAQUE):
            return self.opaque(node, operands)
        result = node.results[0].type
        assert isinstance(result, TensorType)
        if node.has(Trait.SOURCE):
            return [self.source(node, result)]
        if node.has(Trait.VIEW):
            return [self.view(node, self.tensors(node, operands))]
        if node.is_op("full"):
            return [self.full(node, result)]
        if node.has(Trait.WRITE):
            return [self.write(node, *self.tensors(node, operands))]
        if node.has(Trait.LOOKUP):
            return [self.look_up(node, *self.tensors(node, operands))]
        if node.is_op("cast"):
            return [self.cast(operands[0], node.operands[0].tensor, result)]
        if node.is_op("bitcast"):
            return [self.tensors(node, operands)[0].view(torch_dtype(result.dtype)).to(self.dtype(result.dtype))]
        if node.has(Trait.POINTWISE):
            return [self.pointwise(node, operands, result)]
        tensors = self.tensors(node, operands)
        if node.has(Trait.REDUCTION):
            return [self.reduce(node, tensors[0])]
        if node.has(Trait.SCAN):
            return [self.scan(node, tensors[0])]
        if node.has(Trait.SORT):
            return [self.argsort(node, tensors[0])]
        return [self.convolve(node, *tensors) if node.has(Trait.CONVOLUTION) else self.contract(node, *tensors)]

    def tensors(self, node: Node, operands: Sequence[Datum]) -> list[Datum]:
        """Return the operands with numbers converted to tensors."""
        return [self.tensor(x, v.type) for x, v in zip(operands, node.operands, strict=True)]

    def opaque(self, node: Node, operands: Sequence[Datum]) -> list[Datum]:
        """The call itself."""
        return call_opaque(node, operands, self.symbols, dtype=self.override)

    def view(self, node: Node, operands: Sequence[Datum]) -> Datum:
        """A view through torch."""
        return apply_view(node, operands, self.symbols)

    def contract(self, node: Node, a: Datum, b: Datum) -> Datum:
        """An einsum, which accumulates half types in float32 and bytes in int32; of one row and column a dot product.

        Libraries may sum a matmul with a single result in one chain, which is less exact than eager's dot product.
        """
        if multiplies_bytes(node.attributes):
            a, b = (x.to(torch_dtype(node.attributes["dtype"])) for x in (a, b))
        result = torch.einsum(node.attributes["spec"], a, b)
        terms, out = split_spec(node.attributes["spec"])
        left, right = ([letter for letter in term if letter not in out] for term in terms)
        if result.numel() != 1 or left != right or a.dtype not in (torch.float32, torch.float64):
            return result
        return torch.dot(a.reshape(-1), b.reshape(-1)).reshape(result.shape)

    def convolve(self, node: Node, x: Datum, weight: Datum) -> Datum:
        """Torch's convolution."""
        stride, padding, dilation = (
            evaluate_sizes(node.attributes[name], self.symbols) for name in ("stride", "padding", "dilation")
        )
        groups = node.attributes["groups"]
        return torch.convolution(x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)

    def source(self, node: Node, result: TensorType) -> Datum:
        """A number or the positions."""
        attributes = node.attributes
        if node.is_op("constant"):
            return attributes["value"]
        if node.is_op("size"):
            size = evaluate_size(attributes["expr"], self.symbols)
            return float(size) if result.dtype.is_float else size
        size = evaluate_size(attributes["size"], self.symbols)
        return torch.arange(size, dtype=self.dtype(result.dtype), device=result.device)

    def cast(self, operand: Datum, source: TensorType, result: TensorType) -> Datum:
        """Rounds; under an override only between floats and integers."""
        if isinstance(operand, Tensor):
            return operand.to(self.dtype(result.dtype))
        rounded = self.tensor(operand, source).to(self.dtype(result.dtype))
        return rounded.item()

    def pointwise(self, node: Node, operands: list[Datum], result: TensorType) -> Datum:
        """Apply a function of the table below; of numbers alone it returns a number, rounded to its own type."""
        if self.override is not None and not any(isinstance(x, Tensor) for x in operands):
            return Machine(self.symbols, None, False).pointwise(node, operands, result).item()
        function = POINTWISE[node.op.name]
        wanted = self.dtype(result.dtype)
        plain = all(isinstance(x, Tensor) for x in operands)
        if not plain and not self.takes_numbers(node, operands):
            operands = [self.in_accumulation(x, v) for x, v in zip(operands, node.operands, strict=True)]
        found = function(*operands)
        return found if found.dtype == wanted else found.to(wanted)

    def takes_numbers(self, node: Node, operands: list[Datum]) -> bool:
        """Return whether torch accepts numbers at these operands and keeps their precision."""
        first, *rest = operands
        if node.is_op("where"):
            return isinstance(first, Tensor) and any(isinstance(x, Tensor) for x in rest)
        return isinstance(first, Tensor) and node.op.name in _TAKES_A_NUMBER

    def in_accumulation(self, operand: Datum, value: Value) -> Datum:
        """Return the operand as a tensor of the dtype in which its arithmetic accumulates."""
        dtype = self.dtype(accumulation(value.tensor.dtype))
        return operand.to(dtype) if isinstance(operand, Tensor) else self.tensor(operand, value.type, dtype)

    def reduce(self, node: Node, x: Datum) -> Datum:
        """Return a reduction with keepdim."""
        dims = node.attributes["dims"]
        if not dims:
            return x
        if node.is_op("sum"):
            return torch.sum(x, dims, keepdim=True, dtype=x.dtype)
        if node.is_op("prod"):
            wide = x.to(self.dtype(accumulation(node.operands[0].tensor.dtype)))
            for d in dims:
                wide = torch.prod(wide, d, keepdim=True, dtype=wide.dtype)
            return wide.to(x.dtype)
        return _extreme(node.op.name, x, dims)

    def scan(self, node: Node, x: Datum) -> Datum:
        """Return the sums or products of elements and those before them."""
        return (torch.cumsum if node.is_op("cumsum") else torch.cumprod)(x, node.attributes["dim"], dtype=x.dtype)

    def argsort(self, node: Node, x: Datum) -> Datum:
        """Return where the first elements in order are."""
        count = evaluate_size(node.attributes["count"], self.symbols)
        return argsort(x, node.attributes["descending"], count)

    def look_up(self, node: Node, table: Datum, index: Datum) -> Datum:
        """Return elements of a table; torch raises an error for an index out of range."""
        return LOOKUPS[node.op.name](table, node.attributes["dim"], index)

    def full(self, node: Node, result: TensorType) -> Datum:
        """Return a tensor filled with a number."""
        shape = evaluate_sizes(result.shape, self.symbols)
        return torch.full(shape, node.attributes["value"], dtype=self.dtype(result.dtype), device=result.device)

    def write(self, node: Node, destination: Datum, value: Datum, *index: Datum) -> Datum:
        """Return the updated destination, which is changed in place under ``mutate``."""
        target: Tensor = destination if self.mutate else destination.clone()
        if storage(node.operands[1]) is storage(node.operands[0]):  # ATen does not copy to memory that it copies from
            value = value.clone()
        if node.is_op("scatter"):
            return scatter(target, node.attributes["dim"], index[0].to(torch.int64), value, reducing(node))
        if index:
            return place(target, node.attributes["dim"], index[0].to(torch.int64), value)
        return target.copy_(value)


def place(target: Tensor, dim: int, index: Tensor, rows: Tensor) -> Tensor:
    """Copy rows to their places along ``dim``; torch raises an error for a place out of range."""
    if target.is_complex() or target.dtype in TORCH_DTYPES.values():
        return target.index_copy_(dim, index, rows)
    bits = _BITS[target.itemsize]  # torch has no such function for float8 and unsigned integers
    target.view(bits).index_copy_(dim, index, rows.view(bits))
    return target


def scatter(target: Tensor, dim: int, index: Tensor, value: Tensor, reduce: str | None) -> Tensor:
    """Scatter elements along ``dim`` in place, in order; with ``reduce``, as torch names it, combine them."""
    if reduce is None:
        return target.scatter_(dim, index, value)
    return target.scatter_reduce_(dim, index, value, reduce)


def argsort(x: Tensor, descending: bool, count: int) -> Tensor:
    """Return where the first elements of each row in order are."""
    return torch.sort(x, stable=True, descending=descending).indices[..., :count]


def reducing(node: Node) -> str | None:
    """Return torch's name for the operation by which a scatter combines elements; None where it replaces them."""
    names = {"add": "sum", "mul": "prod", "maximum": "amax", "minimum": "amin"}
    return names[node.attributes["combine"]] if "combine" in node.attributes else None


def take(table: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return the table's elements along ``dim`` at an index of any rank."""
    if dim == -table.ndim == -2:
        return torch.embedding(table, index)
    d = dim % table.ndim
    found = table.index_select(d, index.reshape(-1))
    return found.reshape((*table.shape[:d], *index.shape, *table.shape[d + 1 :]))


LOOKUPS: dict[str, Callable[[Tensor, int, Tensor], Tensor]] = {"take": take, "gather": torch.gather}
"""Lookups by operation: functions of a table, a dim and an index."""


def apply_view(node: Node, operands: Sequence[Tensor], symbols: Mapping[str, int]) -> Tensor:
    """The result of a view node; it shares the operand's storage where torch can."""
    attributes, x = node.attributes, operands[0]
    name = node.op.name
    if name == "reshape":
        return x.reshape(evaluate_sizes(attributes["shape"], symbols))
    if name == "permute":
        return x.permute(attributes["dims"])
    if name == "expand":
        return x.expand(evaluate_sizes(attributes["shape"], symbols))
    if name == "window":
        size, step = evaluate_sizes((attributes["size"], attributes["step"]), symbols)
        return x.unfold(attributes["dim"], size, step)
    if name == "concat":
        return torch.cat(list(operands), attributes["dim"])
    start, stop, step = evaluate_sizes((attributes["start"], attributes["stop"], attributes["step"]), symbols)
    return torch.ops.aten.slice.Tensor(x, attributes["dim"], start, stop, step)


def _extreme(name: str, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Max or min; of no elements the least or greatest value, where torch would refuse."""
    if any(x.shape[d] == 0 for d in dims):
        shape = [1 if d - x.ndim in dims else n for d, n in enumerate(x.shape)]
        limits = (-torch.inf, torch.inf) if x.is_floating_point() else _int_limits(x.dtype)
        return x.new_full(shape, limits[name == "min"])
    return torch.amax(x, dims, keepdim=True) if name == "max" else torch.amin(x, dims, keepdim=True)


def _int_limits(dtype: torch.dtype) -> tuple[int, int]:
    return (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _divide(x: Tensor, y: Any) -> Tensor:
    return torch.div(x, y) if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _rounded(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that leaves integers unchanged."""
    return lambda x: function(x) if x.is_floating_point() else x


def _maximum(a: Tensor, b: Tensor) -> Tensor:
    """Return the maximum, of two zeros the first, as eager's clamp and relu do; its maximum differs in full vectors."""
    return torch.where((a >= b) | a.isnan(), a, b)


def _minimum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a <= b) | a.isnan(), a, b)


POINTWISE: dict[str, Callable[..., Tensor]] = {
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "floor": _rounded(torch.floor),
    "ceil": _rounded(torch.ceil), "round": _rounded(torch.round), "trunc": _rounded(torch.trunc), "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p, "log2": torch.log2, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "erf": torch.erf,
    "sin": torch.sin, "cos": torch.cos, "not": torch.bitwise_not, "isnan": torch.isnan, "isinf": torch.isinf,
    "add": torch.add, "mul": torch.mul, "maximum": _maximum, "minimum": _minimum,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "sub": torch.sub, "div": _divide,
    "pow": torch.pow, "atan2": torch.atan2, "floor_divide": functools.partial(torch.div, rounding_mode="floor"),
    "remainder": torch.remainder, "fmod": torch.fmod, "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le,
    "gt": torch.gt, "ge": torch.ge, "where": torch.where,
}  # fmt: skip
"""The function of every pointwise operation on tensors, except ``cast``, which needs its dtype."""

_TAKES_A_NUMBER = frozenset({
    "add", "mul", "sub", "div", "pow", "floor_divide", "remainder", "fmod", "and", "or", "xor", "shift_left",
    "shift_right", "eq", "ne", "lt", "le", "gt", "ge",
})  # fmt: skip
