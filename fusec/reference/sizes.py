"""Symbols of sizes get their values from the inputs of a call."""

from collections.abc import Container, Iterator, Sequence
from typing import Any, cast

import sympy

from fusec.errors import GraphError
from fusec.ir.graph import Graph
from fusec.ir.types import ScalarType, Size, TensorType


def bind_symbols(graph: Graph, inputs: Sequence[Any]) -> dict[str, int]:
    """The value of every symbol that the inputs' shapes, strides and numbers determine.

    Raises:
        GraphError: where an input contradicts the type it should have.
    """
    symbols: dict[str, int] = {}
    derived: list[tuple[sympy.Expr, int]] = []
    for expr, value, binding in _facts(graph, inputs):
        if not isinstance(expr, int) and expr.is_Symbol:
            if symbols.setdefault(expr.name, value) != value and binding:
                raise GraphError(f"size {expr} is {symbols[expr.name]} and {value}", where=f"inputs of {graph.name}")
        elif not isinstance(expr, int):
            derived.append((expr, value))
    before = -1
    while len(symbols) > before:  # a product may be of symbols that come later
        before = len(symbols)
        for expr, value in derived:
            unknown = [s for s in expr.free_symbols if s.name not in symbols]
            if len(unknown) == 1:
                (missing,) = unknown
                known = expr.subs({s: symbols[s.name] for s in expr.free_symbols if s is not missing})
                found = [n for n in sympy.solve(known - value, missing) if n.is_Integer and n > 0]
                if found:
                    symbols[missing.name] = int(found[0])
    return symbols


def unknown_symbol(size: Size | None, known: Container[str]) -> tuple[sympy.Symbol, Size, Size] | None:
    """Return the one symbol of a size that is not known, where it is linear in it, with its slope and the rest."""
    if size is None or isinstance(size, int):
        return None
    unknown = [s for s in size.free_symbols if s.name not in known]
    if len(unknown) != 1:
        return None
    (symbol,) = unknown
    slope = size.coeff(symbol, 1)
    rest = (size - slope * symbol).expand()
    linear = slope != 0 and symbol not in rest.free_symbols and symbol not in slope.free_symbols
    return (symbol, slope, rest) if linear else None


def as_number(argument: Any) -> int:
    """A number that a graph is called with; the ragged length of a nested tensor is a symbol that has none."""
    import torch

    return cast("int", argument) if isinstance(argument, torch.SymInt) else int(argument)


def _facts(graph: Graph, inputs: Sequence[Any]) -> Iterator[tuple[Size, int, bool]]:
    """Yield expressions with their values here, shapes before strides, and whether these must agree."""
    for value, datum in zip(graph.inputs, inputs, strict=True):
        if isinstance(value.type, ScalarType) and value.type.expr is not None:
            yield value.type.expr, as_number(datum), True
        elif isinstance(value.type, TensorType) and value.type.rank:
            shape = tuple(datum.shape)
            fixed = [(n, m) for n, m in zip(value.type.shape, shape, strict=False) if isinstance(n, int)]
            if len(shape) != value.type.rank or any(n != m for n, m in fixed):
                raise GraphError(
                    f"input {value.index} has shape {shape}", where=graph.name, why=f"{value.type} is expected"
                )
            for n, m in zip(value.type.shape, shape, strict=True):
                yield n, m, True
    for value, datum in zip(graph.inputs, inputs, strict=True):
        if isinstance(value.type, TensorType) and value.type.rank:
            for n, m in zip(value.type.strides, datum.stride(), strict=True):
                yield n, m, False
