"""Chooses the sizes on which both sides of a rewrite are run, small where the graph's attributes allow.

A symbol becomes a small prime that no static size has. Static sizes are unchanged while the graphs are cheap to
run. Otherwise large sizes are divided by a common factor: a set of sizes *contains* the factor if it includes, with
each size, all sizes that a slice or concat adds up to it, and if every reshape has as many such sizes on either side
(4096 and 128 in 4096 = 32·128). Attributes, and numbers that equal such a size or its reciprocal (the count in a
mean), are divided as well. If no such set exists, or an opaque call contains a size, the real sizes are used; if they
are too large to run, there is no trial.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fusec.errors import GraphError
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import ScalarType, Size, TensorType, evaluate_size, evaluate_sizes

_SMALL = 16
"""Sizes up to this are never scaled."""
_CHEAP, _AFFORDABLE = 1 << 21, 1 << 27
"""Element operations of one run that need no scaling, and that are still run where scaling fails."""
_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79)


@dataclass(frozen=True)
class Trial:
    """Both sides, with sizes to run them on."""

    before: Graph
    after: Graph
    symbols: dict[str, int]
    note: str = ""

    @property
    def writes(self) -> bool:
        """Return whether a graph writes to inputs."""
        return bool(self.before.written_inputs or self.after.written_inputs)


def trials(before: Graph, after: Graph) -> Iterator[Trial]:
    """The sizes to try, cheapest first."""
    symbols = _choose_symbols(before, after)
    cost = _cost(before, symbols) + _cost(after, symbols)
    if cost > _CHEAP:
        scaled = _scale(before, after, symbols)
        if scaled is not None:
            yield scaled
    if cost <= _AFFORDABLE:
        yield Trial(before, after, symbols, f" (sizes {symbols})" if symbols else "")


def _choose_symbols(before: Graph, after: Graph) -> dict[str, int]:
    """Distinct primes, or multiples of them where a size must be divisible."""
    names = sorted({*before.symbols(), *after.symbols()})
    values = [*_values(before), *_values(after)]
    sizes = {n for v in values for n in _sizes_of(v)}
    static = {n for n in sizes if isinstance(n, int)}
    primes = [p for p in _PRIMES if p not in static]
    for factor in (1, 2, 4, 8, 16, 32, 64):
        symbols = {name: p * factor for name, p in zip(names, primes, strict=False)}
        try:
            if all(evaluate_size(n, symbols) >= 0 for n in sizes if not isinstance(n, int)):
                return symbols
        except GraphError:
            continue
    raise GraphError("no small sizes fit the graph", where=before.name, why=f"symbols {', '.join(names)}")


def _values(graph: Graph) -> Iterator[Value]:
    yield from graph.inputs
    for node in graph.nodes:
        yield from node.results
        if node.has(Trait.REGION):
            yield from _values(node.body)


def _nodes(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        if node.has(Trait.REGION):
            yield from _nodes(node.body)


def _sizes_of(value: Value) -> tuple[Size, ...]:
    return value.type.shape if isinstance(value.type, TensorType) else ()


def _cost(graph: Graph, symbols: dict[str, int]) -> int:
    """Element operations of a run."""
    total = 0
    for node in _nodes(graph):
        if node.has(Trait.CONTRACTION):
            total += math.prod(evaluate_sizes(tuple(node.label_sizes.values()), symbols))
        elif node.has(Trait.CONVOLUTION):
            sizes = (*node.result.shape, *node.operands[1].shape[1:])
            total += math.prod(evaluate_sizes(sizes, symbols))
        total += sum(math.prod(evaluate_sizes(_sizes_of(r), symbols)) for r in node.results)
    return total


# -- scaling static sizes --------------------------------------------------------------------------------------


def scaled_down(graph: Graph) -> Iterator[Graph]:
    """Yield copies of a graph with one set of its static sizes divided by a common factor, the largest sizes first."""
    graphs = (graph, graph)
    for size in sorted({_coefficient(n) for v in _values(graph) for n in _sizes_of(v)}, reverse=True):
        divisible = _divisible(size, graphs) if size > 1 else set()
        factor = _factor(divisible, graphs) if divisible else 1
        if factor > 1:
            try:
                yield _Scaled(divisible, factor).graph(graph)
            except GraphError:
                continue


def _scale(before: Graph, after: Graph, symbols: dict[str, int]) -> Trial | None:
    """Divide one set of sizes after the other, while that helps and fits."""
    graphs, divided = (before, after), False
    tried: set[int] = set()
    while sum(_cost(g, symbols) for g in graphs) > _CHEAP:
        sizes = sorted(
            {_coefficient(n) for g in graphs for v in _values(g) for n in _sizes_of(v)} - tried, reverse=True
        )
        if not sizes or sizes[0] <= _SMALL:
            break
        tried.add(sizes[0])
        divisible = _divisible(sizes[0], graphs)
        factor = _factor(divisible, graphs) if divisible else 1
        if factor > 1:
            try:
                graphs, divided = tuple(_Scaled(divisible, factor).graph(g) for g in graphs), True  # type: ignore[assignment]
            except GraphError:
                continue
    return Trial(*graphs, symbols, f" (sizes scaled down{f', {symbols}' if symbols else ''})") if divided else None


def _coefficient(size: Size) -> int:
    return (
        size if isinstance(size, int) else int(abs(size.as_coeff_Mul()[0])) if size.as_coeff_Mul()[0].is_Integer else 1
    )


def _divisible(seed: int, graphs: tuple[Graph, Graph]) -> set[int]:
    """Return the smallest set of sizes around ``seed`` that can be divided together; empty where there is none."""
    nodes = [n for g in graphs for n in _nodes(g)]
    divisible = {seed}
    while True:
        count = len(divisible)
        for node in nodes:
            if node.has(Trait.OPAQUE) and _mentions(node.attributes.get("args"), divisible):
                return set()
            if not _join_sums(node, divisible) or not _join_products(node, divisible):
                return set()
        if len(divisible) == count:
            return divisible


def _mentions(value: Any, sizes: set[int]) -> bool:
    if isinstance(value, tuple):
        return any(_mentions(v, sizes) for v in value)
    return isinstance(value, int) and value in sizes


def _join_sums(node: Node, divisible: set[int]) -> bool:
    """Put the sizes that a slice or concat adds up into one set."""
    if node.is_op("slice"):
        d, start, stop, step = (node.attributes[k] for k in ("dim", "start", "stop", "step"))
        terms = [node.operands[0].shape[d], node.result.shape[d], start, stop]
        if step != 1 and any(_coefficient(n) in divisible for n in terms):
            return False
    elif node.is_op("concat"):
        terms = [v.shape[node.attributes["dim"]] for v in (*node.operands, node.result)]
    else:
        return True
    numbers = {_coefficient(n) for n in terms if n != 0}
    if numbers & divisible:
        if not all(isinstance(n, int) for n in terms):
            return False
        divisible |= numbers
    return True


def _join_products(node: Node, divisible: set[int]) -> bool:
    """Make both sides of a reshape contain the factor equally often."""
    if not node.is_op("reshape"):
        return True
    left, right = (Counter(_coefficient(n) for n in v.shape) for v in (node.operands[0], node.result))
    left, right = left - right, right - left
    for _ in range(4):
        a, b = (sum(k for n, k in side.items() if n in divisible) for side in (left, right))
        if a == b:
            return True
        free = sorted((n for n in (right if a > b else left) if n not in divisible and n > _SMALL), reverse=True)
        if not free:
            return False
        divisible.add(free[-1] if a < b else free[0])
    return False


def _factor(divisible: set[int], graphs: tuple[Graph, Graph]) -> int:
    """The largest common factor that leaves every size at least 2, and different from the fixed ones."""
    common = math.gcd(*divisible)
    least = min(divisible)
    fixed = {_coefficient(n) for g in graphs for v in _values(g) for n in _sizes_of(v)} - divisible
    candidates = [f for f in range(common, 1, -1) if common % f == 0 and least // f >= 2]
    apart = [f for f in candidates if not fixed & {n // f for n in divisible}]
    return next(iter(apart or candidates), 1)


class _Scaled:
    """Copies graphs with some sizes divided."""

    def __init__(self, divisible: set[int], factor: int) -> None:
        self.divisible, self.factor = divisible, factor

    def graph(self, graph: Graph) -> Graph:
        """Return the scaled copy; types are inferred again, so that an inconsistent attribute is noticed."""
        out = Graph(graph.name)
        to: dict[Value, Value] = {v: out.add_input(self.type(v.type), v.name) for v in graph.inputs}
        for node in graph.nodes:
            declared = node.has(Trait.OPAQUE | Trait.REGION)
            types = [self.type(r.type) for r in node.results] if declared else None
            operands, attributes = [to[v] for v in node.operands], self.attributes(node)
            copy = out.add_node(node.op.name, operands, attributes, types=types, sources=node.sources)
            to.update(zip(node.results, copy.results, strict=True))
        out.set_outputs([to[v] for v in graph.outputs])
        return out

    def type(self, type: Any) -> Any:
        if isinstance(type, TensorType):
            return type.with_shape(tuple(map(self.size, type.shape)))
        return (
            ScalarType(type.kind, self.size(type.expr))
            if isinstance(type, ScalarType) and type.expr is not None
            else type
        )

    def size(self, size: Size) -> Size:
        if isinstance(size, int):
            return size // self.factor if size in self.divisible else size
        return size / self.factor if _coefficient(size) in self.divisible else size

    def attributes(self, node: Node) -> dict[str, Any]:
        attributes = dict(node.attributes)
        for key in ("shape", "start", "stop", "size", "expr"):
            if key in attributes:
                value = attributes[key]
                attributes[key] = tuple(map(self.size, value)) if isinstance(value, tuple) else self.size(value)
        if node.is_op("constant"):
            attributes["value"] = self.number(attributes["value"])
        if node.has(Trait.REGION):
            attributes["body"] = self.graph(node.body)
        return attributes

    def number(self, value: Any) -> Any:
        if isinstance(value, bool) or not math.isfinite(value) or value == 0:
            return value
        if value in self.divisible:
            return type(value)(value // self.factor)
        count = round(1 / value) if abs(value) < 1 else 0
        return self.factor / count if count in self.divisible and value == 1 / count else value
