"""Exact evaluation of a graph over finite fields: two graphs that differ as formulas differ here, with no tolerance.

Method: random evaluation of a polynomial identity (Schwartz, Zippel), with exponentials as in Mirage (Wu et al.,
OSDI 2025): with primes p, q and q | p-1, an exponent lives in Z_q and ``exp(x) = g^x`` in Z_p, where g has order q.
Mirage has two primes, and so one exponential on a path; here a tower of four primes, each dividing the next one
less one, allows three. A number is kept modulo all four; each exponential uses up the lowest.

What holds exactly: + - x / and integer powers; exp(a+b) = exp(a)·exp(b); sqrt(a·b) = sqrt(a)·sqrt(b) and
rsqrt = 1/sqrt (sqrt is x^((p+1)/4), so sqrt(x)² is x up to a sign); |x| = sqrt(x²) = x·sign(x), with the Legendre
symbol as sign; sigmoid, tanh, expm1 and exp2 by way of exp; erf and sin are odd, cos is even. Every other function
(log, floor, pow with an odd exponent…) is a keyed hash of its operands: equal operands give equal results, and
no other identity holds. Order is that of the representatives around 0, so it is fixed but not monotonic in
arithmetic: max(2x) = 2·max(x) does not hold. Casts between float types are the identity. Infinities, NaN, opaque
calls and casts of a computed float to an integer are not expressible in a field: the result is then ``Unknown``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusec.ir.graph import Graph, Node
from fusec.ir.types import TensorType, evaluate_sizes
from fusec.reference.interpreter import POINTWISE, Machine, apply_view
from fusec.verify import modular
from fusec.verify.modular import BASES, LEVELS, PRIMES


@dataclass(frozen=True)
class FieldTensor:
    """A tensor of residues, one for each prime; those that an exponential used up are None."""

    residues: tuple[Tensor | None, ...]

    @property
    def top(self) -> Tensor:
        """The residue that every value has, as the representative next to 0, by which values are ordered."""
        last = self.residues[-1]
        assert last is not None
        return torch.where(last > PRIMES[-1] // 2, last - PRIMES[-1], last)

    def map(self, function: Callable[..., Tensor], *others: "FieldTensor") -> "FieldTensor":
        """Apply a function of residues and their prime, wherever all operands have one."""
        rows = zip(PRIMES, self.residues, *(o.residues for o in others), strict=True)
        return FieldTensor(tuple(_mapped(function, xs, p) for p, *xs in rows))


def _mapped(function: Callable[..., Tensor], residues: Sequence[Tensor | None], p: int) -> Tensor | None:
    return None if any(x is None for x in residues) else function(*residues, p)


@dataclass(frozen=True)
class Unknown:
    """The field cannot express the graph."""

    reason: str


class _Inexpressible(Exception):
    pass


def evaluate_field(graph: Graph, inputs: Sequence[Any], symbols: Mapping[str, int]) -> list[Any] | Unknown:
    """The outputs: field tensors for floats, ordinary tensors for integers and booleans.

    Args:
        graph: the graph to evaluate.
        inputs: field tensors (see ``draw``) for float tensors; ordinary tensors and numbers otherwise.
        symbols: sizes by name.
    """
    machine = FieldMachine(symbols, None, False)
    try:
        outputs = machine.run(graph, list(inputs))
        return [machine.tensor(x, v.type) for x, v in zip(outputs, graph.outputs, strict=True)]
    except _Inexpressible as reason:
        return Unknown(str(reason))


def draw(shape: Sequence[int], generator: torch.Generator) -> FieldTensor:
    """Random elements."""
    return FieldTensor(tuple(torch.randint(1, p, tuple(shape), generator=generator) for p in PRIMES))


def same_elements(a: Any, b: Any) -> Tensor:
    """Return a mask of the elements that are equal in two outputs."""
    if isinstance(a, FieldTensor) and isinstance(b, FieldTensor):
        both = [(x, y) for x, y in zip(a.residues, b.residues, strict=True) if x is not None and y is not None]
        return torch.stack([x == y for x, y in both]).all(0)
    return torch.as_tensor(a == b)


def lift(number: float | int) -> FieldTensor:
    """A number as a 0-d field tensor: exact, where a short fraction rounds to the float that fraction."""
    if not math.isfinite(number):
        raise _Inexpressible(f"the number {number}")
    if (name := _IRRATIONAL.get(float(number))) is not None:
        return _named(name)
    exact = Fraction(number)
    near = exact.limit_denominator(1_000_000)
    ratio = near if float(near) == number else exact
    parts = (ratio.numerator % p * pow(ratio.denominator, -1, p) % p for p in PRIMES)
    return FieldTensor(tuple(map(torch.tensor, parts)))


_IRRATIONAL = {
    math.log(2): "ln 2", 1 / math.log(2): "1/ln 2", math.sqrt(2): "sqrt 2", math.sqrt(0.5): "1/sqrt 2",
    1 / math.sqrt(2): "1/sqrt 2",
}  # fmt: skip
"""Floats that represent a number which is no fraction."""


def _named(name: str) -> FieldTensor:
    match name.removeprefix("1/"):
        case "sqrt 2":
            found = lift(2).map(modular.sqrt)
        case _:
            found = lift(3).map(lambda x, p: modular.keyed("ln 2", p, x))
    return found.map(modular.inverse) if name.startswith("1/") else found


class FieldMachine(Machine):
    """The interpreter with field tensors instead of floats."""

    def tensor(self, datum: Any, type: Any, dtype: torch.dtype | None = None) -> Any:
        """A number is lifted."""
        if isinstance(datum, (int, float)) and isinstance(type, TensorType) and type.dtype.is_float:
            return lift(datum)
        return super().tensor(datum, type, dtype)

    def source(self, node: Node, result: TensorType) -> Any:
        """Positions become residues."""
        found = super().source(node, result)
        return _from_integers(found.to(torch.int64)) if isinstance(found, Tensor) and result.dtype.is_float else found

    def full(self, node: Node, result: TensorType) -> Any:
        """Return a tensor filled with a residue."""
        if not result.dtype.is_float:
            return super().full(node, result)
        shape = evaluate_sizes(result.shape, self.symbols)
        return lift(node.attributes["value"]).map(lambda x, p: x.expand(shape))

    def opaque(self, node: Node, operands: Sequence[Any]) -> list[Any]:
        """Beyond the field."""
        raise _Inexpressible(f"a call of {node.attributes.get('target')}")

    def cast(self, operand: Any, source: TensorType, result: TensorType) -> Any:
        """The identity between floats."""
        if isinstance(operand, FieldTensor):
            if result.dtype.is_float:
                return operand
            raise _Inexpressible(f"a cast to {result.dtype}")
        if not result.dtype.is_float:
            return super().cast(operand, source, result)
        return _from_integers(operand.to(torch.int64)) if isinstance(operand, Tensor) else float(operand)

    def view(self, node: Node, operands: Sequence[Any]) -> Any:
        """Moves residues."""
        if not isinstance(operands[0], FieldTensor):
            return super().view(node, operands)
        first, *others = operands
        return first.map(lambda *xs: apply_view(node, xs[:-1], self.symbols), *others)

    def write(self, node: Node, destination: Any, value: Any, *index: Any) -> Any:
        """Writes residues."""
        if not isinstance(destination, FieldTensor):
            return super().write(node, destination, value, *index)
        if node.attributes.get("combine", "add") != "add":
            raise _Inexpressible(f"a scatter by {node.attributes['combine']}")
        return destination.map(lambda d, v, p: super(FieldMachine, self).write(node, d, v, *index) % p, value)

    def look_up(self, node: Node, table: Any, index: Any) -> Any:
        """Moves residues."""
        if not isinstance(table, FieldTensor):
            return super().look_up(node, table, index)
        return table.map(lambda x, p: super(FieldMachine, self).look_up(node, x, index))

    def contract(self, node: Node, a: Any, b: Any) -> Any:
        """A sum of products of residues."""
        if not isinstance(a, FieldTensor):
            return super().contract(node, a, b)
        by = partial(torch.einsum, node.attributes["spec"])
        return a.map(lambda x, y, p: modular.bilinear(by, x, y, p), b)

    def convolve(self, node: Node, x: Any, weight: Any) -> Any:
        """A sum of products of residues."""
        by = partial(super().convolve, node)
        return x.map(lambda x, w, p: modular.bilinear(by, x, w, p), weight)

    def reduce(self, node: Node, x: Any) -> Any:
        """A sum, product or extreme of residues."""
        dims = node.attributes["dims"]
        if not isinstance(x, FieldTensor) or not dims:
            return super().reduce(node, x)
        if node.is_op("sum"):
            return x.map(lambda r, p: r.sum(dims, keepdim=True) % p)
        if node.is_op("prod"):
            return x.map(lambda r, p: modular.product(r, dims, p))
        return _extreme(node.op.name, x, dims)

    def scan(self, node: Node, x: Any) -> Any:
        """Sums or products of residues."""
        if not isinstance(x, FieldTensor):
            return super().scan(node, x)
        d = node.attributes["dim"]
        if node.is_op("cumsum"):
            return x.map(lambda r, p: r.cumsum(d) % p)
        return x.map(lambda r, p: modular.products(r, d, p))

    def argsort(self, node: Node, x: Any) -> Any:
        """The order of representatives."""
        return super().argsort(node, x.top if isinstance(x, FieldTensor) else x)

    def pointwise(self, node: Node, operands: list[Any], result: TensorType) -> Any:
        """Floats by the table below, integers as torch has them."""
        name = node.op.name
        if name == "bitcast":
            raise _Inexpressible("the bits of a number")
        if not any(v.tensor.dtype.is_float for v in node.operands):
            return super().pointwise(node, operands, result)
        if name == "pow" and isinstance(operands[1], (int, float)) and float(2 * operands[1]).is_integer():
            return _half_power(self.tensor(operands[0], node.operands[0].type), int(2 * operands[1]))
        tensors = self.tensors(node, operands)
        if name == "where":
            condition, x, y = tensors
            return x.map(lambda a, b, p: torch.where(condition, a, b), y)
        return _FUNCTIONS.get(name, lambda *xs: _hashed(name, *xs))(*tensors)


def _from_integers(x: Tensor) -> FieldTensor:
    return FieldTensor(tuple(x % p for p in PRIMES))


def _exponential(x: FieldTensor) -> FieldTensor:
    residues: list[Tensor | None] = [None] * LEVELS
    for level, exponent in enumerate(x.residues[:-1]):
        if exponent is not None:
            residues[level + 1] = modular.power(torch.tensor(BASES[level]), exponent, PRIMES[level + 1])
    if residues[-1] is None:
        raise _Inexpressible(f"an exponential of {LEVELS - 1} exponentials")
    return FieldTensor(tuple(residues))


def _half_power(x: FieldTensor, halves: int) -> FieldTensor:
    """X to the power of halves/2."""
    base = x if halves % 2 == 0 else x.map(modular.sqrt)
    exponent = abs(halves) // 2 if halves % 2 == 0 else abs(halves)
    found = base.map(lambda r, p: modular.power(r, exponent, p))
    return found.map(modular.inverse) if halves < 0 else found


def _extreme(name: str, x: FieldTensor, dims: tuple[int, ...]) -> FieldTensor:
    """The elements at the greatest or least representative."""
    kept = [d for d in range(-x.top.ndim, 0) if d not in dims]

    def rows(r: Tensor) -> Tensor:
        return r.permute(*kept, *dims).flatten(len(kept))

    order = rows(x.top)
    if order.shape[-1] == 0:
        raise _Inexpressible(f"the {name} of nothing")
    place = (order.argmax(-1, keepdim=True) if name == "max" else order.argmin(-1, keepdim=True)).long()
    shape = [1 if d - x.top.ndim in dims else n for d, n in enumerate(x.top.shape)]
    return x.map(lambda r, p: rows(r).gather(-1, place).reshape(shape))


def _add(x: FieldTensor, y: FieldTensor) -> FieldTensor:
    return x.map(lambda a, b, p: (a + b) % p, y)


def _subtract(x: FieldTensor, y: FieldTensor) -> FieldTensor:
    return x.map(lambda a, b, p: (a - b) % p, y)


def _multiply(x: FieldTensor, y: FieldTensor) -> FieldTensor:
    return x.map(lambda a, b, p: a * b % p, y)


def _invert(x: FieldTensor) -> FieldTensor:
    return x.map(modular.inverse)


def _root(x: FieldTensor) -> FieldTensor:
    return x.map(modular.sqrt)


def _negate(x: FieldTensor) -> FieldTensor:
    return x.map(lambda a, p: -a % p)


def _sigmoid(x: FieldTensor) -> FieldTensor:
    return _invert(_add(lift(1), _exponential(_negate(x))))


def _tanh(x: FieldTensor) -> FieldTensor:
    """(e²ˣ-1)/(e²ˣ+1)."""
    square = _exponential(_add(x, x))
    return _multiply(_subtract(square, lift(1)), _invert(_add(square, lift(1))))


def _hashed(name: str, *operands: FieldTensor) -> FieldTensor:
    first, *rest = operands
    return first.map(lambda *xs: modular.keyed(name, xs[-1], *xs[:-1]), *rest)


def _odd(name: str) -> Callable[[FieldTensor], FieldTensor]:
    return lambda x: _multiply(x, _hashed(name, _multiply(x, x)))


def _chosen(wins: Callable[[Tensor, Tensor], Tensor]) -> Callable[[FieldTensor, FieldTensor], FieldTensor]:
    return lambda x, y: x.map(lambda a, b, p: torch.where(wins(x.top, y.top), a, b), y)


def _compared(name: str) -> Callable[[FieldTensor, FieldTensor], Tensor]:
    return lambda x, y: POINTWISE[name](x.top, y.top)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": _add, "sub": _subtract, "mul": _multiply, "div": lambda x, y: _multiply(x, _invert(y)),
    "neg": _negate, "reciprocal": _invert, "sqrt": _root, "rsqrt": lambda x: _invert(_root(x)),
    "abs": lambda x: x.map(lambda a, p: a * modular.sign(a, p) % p), "sign": lambda x: x.map(modular.sign),
    "exp": _exponential, "exp2": lambda x: _exponential(_multiply(x, _named("ln 2"))),
    "expm1": lambda x: _subtract(_exponential(x), lift(1)), "sigmoid": _sigmoid, "tanh": _tanh,
    "log1p": lambda x: _hashed("log", _add(x, lift(1))),
    "log2": lambda x: _multiply(_hashed("log", x), _named("1/ln 2")),
    "erf": _odd("erf"), "sin": _odd("sin"), "cos": lambda x: _hashed("cos", _multiply(x, x)),
    "maximum": _chosen(torch.ge), "minimum": _chosen(torch.le),
    "isnan": lambda x: torch.zeros_like(x.top, dtype=torch.bool),
    "isinf": lambda x: torch.zeros_like(x.top, dtype=torch.bool),
    **{name: _compared(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}  # fmt: skip
