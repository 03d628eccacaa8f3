"""Apply declarations to a graph: each match becomes a region with the matched nodes as its body."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import sympy

from fusec.ir.graph import Graph, Node, Source, Value
from fusec.ir.ops import Trait
from fusec.ir.types import DType, TensorType
from fusec.rewriting.driver import cut, erase_unread
from fusec.rewriting.effects import breaks_order, writes_by_storage
from fusec.rewriting.fusion import Fusion
from fusec.rewriting.index import Index
from fusec.rewriting.listener import RewriteListener
from fusec.rewriting.match import Match, MatchFailure, Pattern
from fusec.rewriting.matcher import Matcher
from fusec.rewriting.rule import Declaration, Rewrite


class Patterns(Protocol):
    """The patterns of declarations; ``PatternLibrary`` makes them, and applies earlier declarations to do so."""

    @property
    def normalize(self) -> Callable[[Graph], None]:
        """Canonicalizes a graph."""

    def patterns(self, declared: Declaration, dtype: DType, index: Index | None = None) -> Iterator[Pattern]:
        """Yield the patterns of a declaration; with an index, those whose operations it holds."""

    def at_rank(self, pattern: Pattern, declared: Declaration, dtype: DType, rank: int) -> Pattern | None:
        """Return a pattern with its root at another rank."""

    def traced(
        self, declared: Declaration, function: Callable[..., Any], dtype: DType, present: tuple[str, ...], batch: int
    ) -> tuple[Graph, dict[str, Any]]:
        """Return the graph of one side of a declaration, and the samples it was traced with."""


def apply_declared(
    declarations: Iterable[Declaration], graph: Graph, library: Patterns, listener: RewriteListener | None = None
) -> int:
    """Replace every match of each declaration in turn; return their number. Node order is restored."""
    work = _Application(graph, library, listener)
    count = sum(map(work.apply, declarations))
    if count:
        graph.sort()
    return count


class _Application:
    """Declarations applied to one graph, one after the other."""

    def __init__(self, graph: Graph, library: Patterns, listener: RewriteListener | None) -> None:
        self.graph, self.library, self.listener = graph, library, listener
        self.index, self.outputs = Index(graph), set(graph.outputs)
        self.writes = [node for node in graph if node.written]

    def apply(self, declared: Declaration) -> int:
        """Replace every match of a declaration; return their number."""
        return sum(
            self.apply_pattern(declared, pattern, dtype)
            for dtype in self.index.float_types
            for pattern in self.library.patterns(declared, dtype, self.index)
        )

    def apply_pattern(self, declared: Declaration, pattern: Pattern, dtype: DType) -> int:
        count, matchers = 0, dict[int, Matcher | None]()
        for value in _roots(pattern, self.index):
            rank = len(value.shape)
            if rank not in matchers:
                fitting = self.library.at_rank(pattern, declared, dtype, rank)
                matchers[rank] = Matcher(fitting, self.graph, self.outputs) if fitting else None
            matcher = matchers[rank]
            if matcher is None:
                continue
            found = matcher.match(value)
            if isinstance(found, Match):
                count += self.replace(declared, found, dtype)
            elif self.listener is not None and found.depth > 0 and pattern.is_distinctive:
                self.listener.near_miss(found)
        return count

    def replace(self, declared: Declaration, match: Match, dtype: DType) -> bool:
        """Replace a match by its region or right side, if the listener allows it; return whether it did."""
        graph, listener, nodes = self.graph, self.listener, sorted_nodes(match)
        # Numbers that layers share name all of them.
        sources = tuple(dict.fromkeys(s for n in nodes if not n.has(Trait.SOURCE) for s in n.sources))
        if listener is not None and not listener.application(declared.name, sources, describe(match)):
            return False
        size = len(graph)
        if isinstance(declared, Rewrite):
            results = _right_side(declared, match, graph, self.library, dtype, sources)
        else:
            results = _region(declared, match, graph, nodes, sources, self.outputs)
        added = graph.newest(len(graph) - size)
        if breaks_order(graph, added, results, writes_by_storage(self.writes)):
            graph.erase_dead(added)
            return False
        if listener is not None and listener.verifies:
            inputs = list(dict.fromkeys(v for n in added for v in n.operands if v.producer not in added))
            exact = not isinstance(declared, Rewrite) or declared.exact
            before = cut(inputs, nodes, list(results))
            after = cut(inputs, added, list(results.values()))
            if not listener.agrees(declared.name, before, after, exact):
                graph.erase_dead(added)
                return False
        for old, new in results.items():
            graph.replace_value(old, new)
            if old in self.outputs:
                self.outputs.discard(old)
                self.outputs.add(new)
        self.index.add(added)
        self.index.drop(erase_unread(graph, [*nodes, *added]))
        return True


def _roots(pattern: Pattern, index: Index) -> Iterator[Value]:
    """Yield the values that may match the pattern's root."""
    wanted = pattern.root.producer
    assert wanted is not None
    for node in index.like(wanted):
        value = _result(node, _returned(wanted)[pattern.root.index])
        if value is not None and isinstance(value.type, TensorType) and value.dtype == pattern.root.dtype:
            yield value


def _result(node: Node, position: int) -> Value | None:
    """Return the result at this position of the tuple that the node's declaration returns."""
    returned = _returned(node)
    fits = len(returned) == len(node.results) and position in returned
    return node.results[returned.index(position)] if fits else None


def _returned(node: Node) -> tuple[int, ...]:
    return node.attributes.get("returns", ()) if node.is_op("region") else (0,)


def sorted_nodes(match: Match) -> list[Node]:
    """The matched nodes, operands before users."""
    wanted, placed = set(match.nodes.values()), dict[Node, None]()

    def place(node: Node) -> None:
        if node in placed:
            return
        for v in node.operands:
            if v.producer is not None and v.producer in wanted:
                place(v.producer)
        placed[node] = None

    for node in match.nodes.values():
        place(node)
    return list(placed)


def describe(match: Match) -> str:
    """Return the name of the matched declaration, and of its spelling."""
    how = "" if match.pattern.spelling in ("reference", "before") else f", spelled {match.pattern.spelling}"
    return f"{match.pattern.name}{how}"


def _region(
    declared: Fusion[Any, Any],
    match: Match,
    graph: Graph,
    nodes: list[Node],
    sources: tuple[Source, ...],
    outputs: set[Value],
) -> dict[Value, Value]:
    parameters, operands, scalars = [], [], []
    for p in declared.parameters:
        value = match.tensor(p.name) if p.dims is not None else match.scalars.get(p.name)
        if p.dims is None and not isinstance(value, Value):
            scalars.append((p.name, value))
        elif isinstance(value, Value):
            parameters.append(p.name)
            operands.append(value)
    outside = _outside(match, nodes, outputs)
    body = cut(operands, nodes, [v for _, v in outside], declared.name)
    for name, inner in zip(parameters, body.inputs, strict=True):
        inner.name = name
    attributes = {
        "fusion": declared.name,
        "kind": "declared",
        "spelling": match.pattern.spelling,
        "parameters": tuple(parameters),
        "scalars": tuple(scalars),
        "returns": tuple(i for i, _ in outside),
        "body": body,
    }
    region = graph.add_node("region", operands, attributes, types=[v.type for _, v in outside], sources=sources)
    return dict(zip((v for _, v in outside), region.results, strict=True))


def _outside(match: Match, nodes: list[Node], outputs: set[Value]) -> list[tuple[int, Value]]:
    """Return the outputs of a match that are read outside, with their positions in what the declaration returns."""
    inner = set(nodes)
    found = [
        (at, value)
        for at, value in zip(match.pattern.returns, match.outputs, strict=True)
        if value in outputs or any(u not in inner for u in value.users)
    ]
    return list({v: (at, v) for at, v in reversed(found)}.values())[::-1]


def _right_side(
    declared: Rewrite, match: Match, graph: Graph, library: Patterns, dtype: DType, sources: tuple[Source, ...]
) -> dict[Value, Value]:
    assert declared.after is not None
    present = tuple(dict.fromkeys(match.pattern.tensors.values()))
    batch = next((count for _, count in match.pattern.leading.values()), 0)
    made, samples = library.traced(declared, declared.after, dtype, present, batch)
    library.normalize(made)
    to = {v: match.tensor(v.name) for v in made.inputs}
    numbers = {n: name for name, n in samples.items() if isinstance(n, float)}
    for node in made.nodes:
        operands = [to[v] for v in node.operands]
        value = node.attributes.get("value")
        name = numbers.get(abs(value)) if isinstance(value, float) else None
        bound = match.scalars[name] if name else None
        if isinstance(bound, Value):
            to[node.result] = bound
            continue
        attributes = {k: substituted(v, match.sizes) for k, v in node.attributes.items()}
        if bound is not None and value is not None:
            attributes["value"] = -bound if value < 0 else bound
        copy = graph.add_node(node.op.name, [v for v in operands if v is not None], attributes, sources=sources)
        to.update(zip(node.results, copy.results, strict=True))
    return {old: new for old, v in zip(match.outputs, made.outputs, strict=True) if (new := to[v]) is not None}


def substituted(value: Any, sizes: dict[sympy.Symbol, Any]) -> Any:
    """Return an attribute with sizes in the place of symbols."""
    if isinstance(value, tuple):
        return tuple(substituted(v, sizes) for v in value)
    if isinstance(value, sympy.Expr):
        found = value.subs(sizes, simultaneous=True)
        return int(found) if found.is_Integer else found
    return value


def attempts(declared: Declaration, graph: Graph, library: Patterns) -> Iterator[Match | MatchFailure]:
    """Yield the outcome of every attempt to match a declaration, with nothing replaced; matches may overlap."""
    index, outputs = Index(graph), set(graph.outputs)
    for dtype in index.float_types:
        for pattern in library.patterns(declared, dtype):
            for value in _roots(pattern, index):
                fitting = library.at_rank(pattern, declared, dtype, len(value.shape))
                if fitting is not None:
                    yield Matcher(fitting, graph, outputs).match(value)
