"""Lengths that are equal to others or multiples of them, as expressions of fewer symbols.

Where a model splits a dim into groups, torch guards that the number of groups ``g`` divides its length ``n``, and the
length of a group is a quotient, ``floor(n / g)``. Little can be proven of what is derived from it, such as
``g * floor(n / g)`` elements. So ``n`` is written as ``g * q``, and the length of a group is a symbol, ``q``.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from math import gcd
from typing import Any, TypeAlias

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from fusec.ir.types import symbol

Fact: TypeAlias = tuple[Any, Any, bool]
"""Two of torch's expressions: the second divides the first, or, where the last is true, they are equal."""

_products: ContextVar[Mapping[str, sympy.Expr]] = ContextVar("products")


def _of_attention(query: Any, key: Any, value: Any, *mask: Any) -> list[tuple[Any, Any]]:
    """As many batches, as many keys as values and mask columns."""
    batch = zip(query[:-2], key[:-2], strict=False)
    return [*batch, *zip(key[:-1], value[:-1], strict=False), *((key[-2], given[-1]) for given in mask)]


_EQUAL: dict[Any, Callable[..., list[tuple[Any, Any]]]] = {
    torch.ops.aten.scaled_dot_product_attention.default: _of_attention,
    torch.ops.aten.linear.default: lambda x, weight, *bias: [(x[-1], weight[-1])],
}
"""By operation: the lengths that are equal, from the shapes of its operands."""


def finalize_lengths(graph: torch.fx.Graph) -> None:
    """Guard on the lengths that a call of attention or of a linear layer requires to be equal.

    Dynamo makes the lengths of a growing cache, or of weights that are inputs, different symbols, and ATen's own check
    is inside the call, which stays whole. Comparing symbols installs a guard, which unifies them.
    """
    for node in graph.nodes:
        if (equal := _EQUAL.get(node.target)) is not None:
            shapes = (a.meta["val"].shape for a in node.args[:4] if isinstance(a, torch.fx.Node))
            for a, b in equal(*shapes):
                if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
                    bool(a == b)


def product_for(name: str) -> sympy.Expr:
    """Return what is written for a symbol of torch: a symbol of the same name, or a product while a graph has any."""
    return _products.get({}).get(name) or symbol(name)


@contextmanager
def multiples_as_products(graph: torch.fx.Graph) -> Iterator[None]:
    """Write lengths as products where guards of a graph make them multiples or equal, while it is imported.

    Where only twice a length is known to be a multiple, a guard is added by which the length itself is one.
    """
    token = _products.set(_Multiples(graph).products)
    try:
        yield
    finally:
        _products.reset(token)


def _numbers(node: torch.fx.Node) -> list[torch.SymInt]:
    """Return the symbolic numbers of a node: the lengths of a tensor, or itself."""
    fake = node.meta.get("val")
    return [n for n in (fake.shape if isinstance(fake, torch.Tensor) else (fake,)) if isinstance(n, torch.SymInt)]


def _facts(graph: torch.fx.Graph, environment: Any) -> list[Fact]:
    """Return what guards say of lengths, and the quotients in a graph that are by no number, simple ones first.

    Those in the shapes of a reshape are exact, but torch does not note it of all. Neither does it note that ``n`` is a
    multiple of 8 where it is split into ``floor(n / 8)`` parts.
    """
    found: set[Fact] = {(*fact.args, False) for fact in environment.divisible}
    found |= {(*guard.expr.args, True) for guard in environment.guards if isinstance(guard.expr, sympy.Eq)}
    for n in (n for node in graph.nodes if node.op == "call_function" for n in _numbers(node)):
        found |= {(*part.args, False) for part in n.node.expr.atoms(FloorDiv) if not part.args[1].is_Integer}
    found |= {(*part.args, False) for _, divisor, _ in found for part in divisor.atoms(FloorDiv)}
    return sorted(found, key=lambda fact: (fact[0].count_ops() + fact[1].count_ops(), str(fact)))


def _divides(divisor: Any, number: Any) -> bool:
    """Return whether a number divides another in this call, and then by a guard in every call."""
    hints = [n.node.hint if isinstance(n, torch.SymInt) else int(n) for n in (number, divisor)]
    return hints[0] % hints[1] == 0 and bool(number % divisor == 0)


class _Multiples:
    """The lengths of a graph that are multiples of others."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.known: dict[str, torch.SymInt] = {}
        """Each symbol that is a length of an input or a positive number, and each part of one, as torch's number."""
        self.products: dict[str, sympy.Expr] = {}
        for n in (n for node in graph.find_nodes(op="placeholder") for n in _numbers(node)):
            if n.node.expr.is_Symbol and n.node.has_hint() and n.node.hint > 0:
                self.known[n.node.expr.name] = n
        facts = _facts(graph, next(iter(self.known.values())).node.shape_env) if self.known else []
        before = -1
        while len(self.products) > before:  # some follow from others
            before = len(self.products)
            for number, other, equal in facts:
                self._use(self._plain(number), self._plain(other), equal)

    def _plain(self, expr: Any) -> sympy.Expr:
        """Return a number of torch over our symbols; nan where it is no product or exact quotient of them."""
        if expr.is_Symbol:
            return self.products.get(expr.name, symbol(expr.name))
        if expr.is_Integer:
            return expr
        parts = [self._plain(part) for part in expr.args]
        if expr.is_Mul:
            return sympy.Mul(*parts)
        quotient = sympy.cancel(parts[0] / parts[1]) if isinstance(expr, FloorDiv) else sympy.nan
        return quotient if quotient.is_integer else sympy.nan

    def _use(self, number: sympy.Expr, other: sympy.Expr, equal: bool) -> None:
        """Write a length as a product, where it is known to be a multiple of another or equal."""
        above, below = sympy.fraction(sympy.cancel(number / other))
        if not equal:
            self._divide(above, below)
        elif above.is_Symbol and above.name in self.known:
            self._write(above, below)
        elif below.is_Symbol and below.name in self.known:
            self._write(below, above)

    def _divide(self, number: sympy.Expr, divisor: sympy.Expr) -> None:
        """Write a length as a product, where a divisor divides a multiple of it."""
        (times, length), (factor, other) = number.as_coeff_Mul(), divisor.as_coeff_Mul()
        n, size = self.known.get(str(length)), 1 if other == 1 else self.known.get(str(other))
        if n is None or size is None or divisor == 1:
            return
        times, factor = int(times), int(factor) // gcd(int(times), int(factor))
        if _divides(size * factor, n):
            self._write(length, factor * other * self._part(length, n // (size * factor)))
        elif _divides(times, size) and _divides(size // times * factor, n):
            part = self._part(other, size // times)
            self._write(other, times * part)
            self._write(length, factor * part * self._part(length, n // (size // times * factor)))

    def _part(self, length: sympy.Symbol, number: Any) -> sympy.Symbol:
        """Return a new symbol for a part of a length."""
        name = f"{length.name}_part"
        self.known[name] = number
        return symbol(name)

    def _write(self, length: sympy.Symbol, product: sympy.Expr) -> None:
        """Replace a length everywhere."""
        if length not in product.free_symbols:
            self.products = {name: expr.subs(length, product) for name, expr in self.products.items()}
            self.products[length.name] = product
