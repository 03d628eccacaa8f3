"""Support for lowering tables: arguments by name, promotion, casts, and results with eager's layout."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, TypeAlias

import sympy
import torch

from fusec.errors import ImportFailure
from fusec.frontend.dtypes import to_dtype, to_torch_dtype
from fusec.frontend.sizes import Real, to_plain
from fusec.ir.graph import Graph, Source, Value
from fusec.ir.ops import OPS, Trait
from fusec.ir.types import BOOL, F64, DType, Size, TensorType, Type, same_shape, simplify, wrapped

Argument: TypeAlias = Any
"""A Value, a number, a size, a torch constant, None, or a list of them."""


@dataclass
class Call:
    """One call of an ATen operation whose arguments are already values of the IR."""

    target: str
    arguments: dict[str, Argument]
    """By the names of the schema, defaults filled in."""
    fakes: dict[str, Any]
    """The same as fake tensors."""
    types: list[Type]
    """Eager's results, flat."""
    used: list[bool]
    """For each result, True if it is read."""
    fake_results: list[Any] = field(default_factory=list)

    def __getitem__(self, name: str) -> Argument:
        return self.arguments[name]

    def get(self, name: str, default: Argument = None) -> Argument:
        """An argument that only some overloads have."""
        return self.arguments.get(name, default)

    @property
    def out(self) -> TensorType:
        """The type of the only (or first) result."""
        first = self.types[0]
        if not isinstance(first, TensorType):
            raise ImportFailure(f"{self.target} returns {first}, not a tensor", why="its lowering is for tensors")
        return first


_SAME = ("ToFloat", "Identity")
_OF_REALS = {
    "Add": "add", "Mul": "mul", "Pow": "pow", "FloatPow": "pow", "Max": "maximum", "Min": "minimum",
    "TrueDiv": "div", "IntTrueDiv": "div", "FloatTrueDiv": "div",
    "OpaqueUnaryFn_sqrt": "sqrt", "OpaqueUnaryFn_exp": "exp", "OpaqueUnaryFn_log": "log",
}  # fmt: skip
"""IR operations for torch's functions of symbolic floats."""


class Lowering:
    """Appends nodes to the graph for one call at a time."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.sources: tuple[Source, ...] = ()
        self.device = "cpu"
        self.fresh: set[Value] = set()
        """Values created for the present call."""
        self.overwritten: Value | None = None
        """The storage that the present call may update in place."""
        self.moved: dict[tuple[Value, str], Value] = {}
        """Copies of numbers on other devices than their own."""

    @contextmanager
    def at(self, source: Source, device: str) -> Iterator[None]:
        """Create nodes with the source location ``source`` on ``device`` within this context."""
        before = self.sources, self.device
        self.sources, self.device = (source,), device
        try:
            yield
        finally:
            self.sources, self.device = before

    @contextmanager
    def overwriting(self, storage: Value | None) -> Iterator[None]:
        """Within this context updates may overwrite a storage: nothing reads its old content afterwards."""
        self.overwritten = storage
        try:
            yield
        finally:
            self.overwritten = None

    def emit(self, op: str, *operands: Value, **attributes: Any) -> Value:
        """Append a node with one result."""
        computes = not OPS[op].has(Trait.VIEW | Trait.WRITE) and op != "bitcast"
        made = [attributes["dtype"]] if "dtype" in attributes else []
        for dtype in (*(v.dtype for v in operands), *made) if computes else ():
            if dtype.kind == "other":
                raise ImportFailure(f"{op} of {dtype}", why="arithmetic is on floats, integers and booleans")
        value = self.graph.add_node(op, operands, attributes, sources=self.sources).result
        self.fresh.add(value)
        return value

    def number(self, value: Any, dtype: DType) -> Value:
        """Return a Python number, a size or an expression of sizes as a 0-d value."""
        if isinstance(value, Real):
            return self.cast(self.real(value.expr), dtype)
        if isinstance(value, torch.SymBool):
            raise ImportFailure(f"the boolean {value}", why="it depends on sizes, and may differ from call to call")
        if isinstance(value, sympy.Expr):
            return self.emit("size", expr=value, dtype=dtype, device=self.device)
        if dtype.kind == "float":
            value = float(value)
        elif dtype.kind == "int":
            value = wrapped(int(value), dtype)
        else:
            value = bool(value)
        return self.emit("constant", value=value, dtype=dtype, device=self.device)

    def real(self, expr: Any) -> Value:
        """A float that is computed on sizes, in float64 as Python does; its whole parts are sizes.

        Args:
            expr: torch's expression, in which each division and root has a name of its own.
        """
        if expr.is_integer:
            return self.number(simplify(to_plain(expr)), F64)
        if expr.is_number:
            return self.number(float(expr), F64)
        name, args = type(expr).__name__, expr.args
        if name in _SAME:
            return self.real(args[0])
        if name == "Pow" and args[1] == -1:
            return self.emit("reciprocal", self.real(args[0]))
        if name not in _OF_REALS:
            raise ImportFailure(f"the number {expr}", why=f"no operation computes {name}", fix="dynamic=False")
        first, *others = map(self.real, args)
        return (
            reduce(partial(self.emit, _OF_REALS[name]), others, first) if others else self.emit(_OF_REALS[name], first)
        )

    def cast(self, value: Value, dtype: DType) -> Value:
        """``value`` as ``dtype``; nothing where it is that already."""
        if value.dtype == dtype:
            return value
        if "other" in (value.dtype.kind, dtype.kind):
            raise ImportFailure(
                f"a cast from {value.dtype} to {dtype}", why="of complex and quantised types only data moves"
            )
        if dtype == BOOL:
            return self.emit("ne", value, self.number(0, value.dtype))
        return self.emit("cast", value, dtype=dtype)

    def operand(self, argument: Argument, dtype: DType) -> Value:
        """An argument as a value of ``dtype``."""
        if not isinstance(argument, Value):
            return self.number(argument, dtype)
        if not isinstance(argument.type, TensorType):
            raise ImportFailure(f"{argument!r} is no tensor", why="operands of arithmetic are tensors or numbers")
        if argument.type.device != self.device:
            if argument.type.rank:
                raise ImportFailure(
                    f"operands on {argument.type.device} and {self.device}", why="a kernel runs on one device",
                    fix="move them to one device",
                )  # fmt: skip
            argument = self.number_here(argument)
        return self.cast(argument, dtype)

    def number_here(self, value: Value) -> Value:
        """Return a 0-d CPU tensor on the present device, for kernels to load: floats are such under ``dynamic=True``.

        A vendor matmul takes it as a launch argument, without waiting for a copy.
        """
        if value.producer is not None and value.producer.is_op("cast"):
            return self.cast(self.number_here(value.producer.operands[0]), value.dtype)  # in the kernel that reads it
        key = value, self.device
        if key not in self.moved:
            one, type = self.number(1, value.dtype), replace(value.tensor, device=self.device)
            attributes = {"target": "aten.mul.Tensor", "args": (("%", 0), ("%", 1)), "kwargs": ()}
            self.moved[key] = self.graph.add_node(
                "opaque", [one, value], attributes | {"operand_types": (type, value.tensor)}, types=[type],
                sources=self.sources,
            ).result  # fmt: skip
        return self.moved[key]

    def pointwise(self, op: str, *arguments: Argument, dtype: DType) -> Value:
        """Add a pointwise operation that computes in ``dtype``."""
        return self.emit(op, *(self.operand(a, dtype) for a in arguments))

    def reshape(self, value: Value, shape: tuple[Size, ...]) -> Value:
        """``value`` in another shape."""
        return value if same_shape(value.shape, shape) else self.emit("reshape", value, shape=shape)

    def expand(self, value: Value, shape: tuple[Size, ...]) -> Value:
        """Return ``value`` broadcast to ``shape``; lengths other than 1 are equal, though perhaps only by guards."""
        if same_shape(value.shape, shape):
            return value
        ahead = len(shape) - len(value.shape)
        if any(not isinstance(n, int) for n in value.shape):
            lengths = zip(value.shape, shape[ahead:], strict=True)
            value = self.reshape(value, tuple(n if n == 1 else wanted for n, wanted in lengths))
        return value if same_shape(value.shape, shape) else self.emit("expand", value, shape=shape)

    def slice(self, value: Value, dim: int, start: Size, length: Size, step: int = 1) -> Value:
        """Return ``length`` elements of ``value`` along ``dim`` from ``start`` on."""
        rank = len(value.shape)
        dim = dim - rank if dim >= 0 else dim
        if start == 0 and step == 1 and length == value.shape[dim]:
            return value
        return self.emit("slice", value, dim=dim, start=start, stop=start + (length - 1) * step + 1, step=step)


Handler: TypeAlias = Callable[[Lowering, Call], "Value | list[Value | None]"]
HANDLERS: dict[str, Handler] = {}
"""The lowering of every modelled operation, by its ATen name."""


def lowers(*targets: str) -> Callable[[Handler], Handler]:
    """Register a function as the lowering of these ATen operations."""

    def register(handler: Handler) -> Handler:
        for target in targets:
            HANDLERS[target] = handler
        return handler

    return register


def common_dtype(call: Call, *names: str) -> DType:
    """The type to which torch promotes these arguments for a comparison."""
    fakes = [call.fakes[n] for n in names]
    fakes = [int(f.node.hint or 0) if isinstance(f, torch.SymInt) else f for f in fakes]
    fakes = [0.0 if isinstance(f, torch.SymFloat) else f for f in fakes]
    return to_dtype(torch.result_type(*fakes))


def rounded(value: Argument, dtype: DType) -> Argument:
    """A Python float rounded to a half type, as eager rounds the scalar it compares with."""
    if isinstance(value, float) and dtype.bytes == 2 and dtype.is_float:
        return float(torch.tensor(value, dtype=to_torch_dtype(dtype)))
    return value


def converted(value: Argument, dtype: DType) -> Argument:
    """A Python number as ATen converts it to the type of a tensor's elements.

    Raises:
        ImportFailure: where the type cannot hold it, for which ATen raises.
    """
    if isinstance(value, (int, float)) and dtype != BOOL:
        if dtype.is_float:
            fits = not math.isfinite(value) or abs(value) <= torch.finfo(to_torch_dtype(dtype)).max
        else:
            limits = torch.iinfo(to_torch_dtype(dtype))
            fits = math.isfinite(value) and (limits.min or -limits.max) <= int(value) <= limits.max
        if not fits:
            raise ImportFailure(f"the number {value} as {dtype}", why="it holds none so large, for which eager raises")
    return rounded(value, dtype)


def negative_dims(dims: Argument, rank: int) -> tuple[int, ...]:
    """Dims as negative, sorted, distinct numbers; none (or None) means all."""
    if isinstance(dims, int):
        dims = [dims]
    if rank == 0:
        return ()
    if dims is None or len(dims) == 0:
        dims = range(rank)
    return tuple(sorted({d if d < 0 else d - rank for d in dims}))
