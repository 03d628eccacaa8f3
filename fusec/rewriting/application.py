"""Applying declarations to a graph: each match becomes a region that carries the matched nodes as its body."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import sympy

from fusec.ir.graph import Graph, Node, Source, Value
from fusec.ir.types import DType, TensorType
from fusec.rewriting.driver import cut
from fusec.rewriting.fusion import Fusion
from fusec.rewriting.match import Match, MatchFailure, Pattern
from fusec.rewriting.matcher import Matcher
from fusec.rewriting.pattern import Declaration, PatternLibrary
from fusec.rewriting.rule import Rewrite


class MatchJournal(Protocol):
    """What applying declarations tells of its doings; the pipeline's context is one."""

    @property
    def verifies(self) -> bool:
        """Whether both sides of every application are to be compared."""

    def application(self, name: str, sources: Iterable[Source] = (), message: str = "") -> bool:
        """Number an application, and say whether it may be made."""

    def agrees(self, name: str, before: Graph, after: Graph, exact: bool = True) -> bool:
        """Whether both sides mean the same."""

    def near_miss(self, failure: MatchFailure) -> None:
        """Take note of an attempt that failed."""


def apply_declared(
    declared: Declaration, graph: Graph, library: PatternLibrary, journal: MatchJournal | None = None
) -> int:
    """Replace every match of a declaration; how many there were. Node order is restored."""
    count = 0
    ops, deep = {n.op.name for n in graph.nodes}, ops_within(graph)
    for dtype in _float_types(graph):
        for pattern in library.patterns(declared, dtype, deep):
            if pattern.ops <= ops:
                count += _apply_pattern(declared, pattern, dtype, graph, library, journal)
    if count:
        graph.sort()
        graph.erase_dead()
    return count


def ops_within(graph: Graph) -> set[str]:
    """Names of the operations in a graph and in the bodies of its regions."""
    found = set()
    for node in graph.nodes:
        found.add(node.op.name)
        if node.is_op("region"):
            found |= ops_within(node.body)
    return found


def _float_types(graph: Graph) -> list[DType]:
    """The float types in a graph, narrow ones first: their patterns have the casts to wide ones inside."""
    found = {
        r.type.dtype: None
        for n in graph.nodes
        for r in n.results
        if isinstance(r.type, TensorType) and r.type.dtype.is_float
    }
    return sorted(found, key=lambda d: d.bytes)


def _apply_pattern(
    declared: Declaration, pattern: Pattern, dtype: DType, graph: Graph, library: PatternLibrary,
    journal: MatchJournal | None,
) -> int:  # fmt: skip
    assert pattern.root.producer is not None
    count, outputs = 0, set(graph.outputs)
    matchers: dict[int, Matcher | None] = {}
    for root in graph.nodes:
        if root.op is not pattern.root.producer.op or root not in graph:
            continue
        value = _root_value(root, pattern)
        if value is None or value.dtype != pattern.root.dtype:
            continue
        rank = len(value.shape)
        if rank not in matchers:
            fitting = library.at_rank(pattern, declared, dtype, rank)
            matchers[rank] = Matcher(fitting, graph, outputs) if fitting else None
        matcher = matchers[rank]
        if matcher is None:
            continue
        found = matcher.match(value)
        if isinstance(found, MatchFailure):
            if journal is not None and found.depth > 0 and pattern.is_telling:
                journal.near_miss(found)
            continue
        replaced = _replace(declared, found, graph, library, dtype, journal)
        if replaced:
            count += 1
            outputs.clear()
            outputs.update(graph.outputs)
    return count


def _root_value(root: Node, pattern: Pattern) -> Value | None:
    """The result of a node that the pattern's root may stand for."""
    wanted = pattern.root.producer
    assert wanted is not None
    if not root.is_op("region"):
        value = root.results[0] if len(root.results) == 1 else None
        return value if value is not None and isinstance(value.type, TensorType) else None
    if root.attributes.get("fusion") != wanted.attributes.get("fusion") or "returns" not in root.attributes:
        return None
    at = wanted.attributes["returns"][pattern.root.index]
    returns = root.attributes["returns"]
    return root.results[returns.index(at)] if at in returns else None


def _replace(
    declared: Declaration, match: Match, graph: Graph, library: PatternLibrary, dtype: DType,
    journal: MatchJournal | None,
) -> bool:  # fmt: skip
    nodes = sorted_nodes(match, graph)
    sources = tuple(dict.fromkeys(s for n in nodes for s in n.sources))
    if journal is not None and not journal.application(declared.name, sources, describe(match)):
        return False
    size = len(graph)
    if isinstance(declared, Rewrite):
        results = _right_side(declared, match, graph, library, dtype, sources)
    else:
        results = _region(declared, match, graph, nodes, sources)
    added = graph.newest(len(graph) - size)
    if journal is not None and journal.verifies:
        inputs = list(dict.fromkeys(v for n in added for v in n.operands if v.producer not in added))
        exact = not isinstance(declared, Rewrite) or declared.exact
        before = cut(inputs, nodes, list(results))
        after = cut(inputs, added, list(results.values()))
        if not journal.agrees(declared.name, before, after, exact):
            graph.erase_dead(added)
            return False
    for old, new in results.items():
        graph.replace_value(old, new)
    graph.erase_dead(nodes)
    return True


def sorted_nodes(match: Match, graph: Graph) -> list[Node]:
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
    """A match in words."""
    how = "" if match.pattern.spelling in ("reference", "before") else f", spelled {match.pattern.spelling}"
    return f"{match.pattern.name}{how}"


def _region(
    declared: Fusion[Any, Any], match: Match, graph: Graph, nodes: list[Node], sources: tuple[Source, ...]
) -> dict[Value, Value]:
    parameters, operands, scalars = [], [], []
    for p in declared.parameters:
        value = match.tensor(p.name) if p.dims is not None else match.scalars.get(p.name)
        if p.dims is None and not isinstance(value, Value):
            scalars.append((p.name, value))
        elif isinstance(value, Value):
            parameters.append(p.name)
            operands.append(value)
    outside = _outside(match, nodes, graph)
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


def _outside(match: Match, nodes: list[Node], graph: Graph) -> list[tuple[int, Value]]:
    """The outputs of a match that something outside reads, with their positions in what the declaration returns."""
    inner, outputs = set(nodes), set(graph.outputs)
    found = [
        (at, value)
        for at, value in zip(match.pattern.returns, match.outputs, strict=True)
        if value in outputs or any(u not in inner for u in value.users)
    ]
    distinct = list({v: (at, v) for at, v in reversed(found)}.values())[::-1]
    return distinct or [(match.pattern.returns[0], match.outputs[0])]


def _right_side(
    declared: Rewrite, match: Match, graph: Graph, library: PatternLibrary, dtype: DType, sources: tuple[Source, ...]
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
        attributes = {k: _substituted(v, match.sizes) for k, v in node.attributes.items()}
        if bound is not None and value is not None:
            attributes["value"] = -bound if value < 0 else bound
        copy = graph.add_node(node.op.name, [v for v in operands if v is not None], attributes, sources=sources)
        to.update(zip(node.results, copy.results, strict=True))
    return {old: new for old, v in zip(match.outputs, made.outputs, strict=True) if (new := to[v]) is not None}


def _substituted(value: Any, sizes: dict[sympy.Symbol, Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(_substituted(v, sizes) for v in value)
    if isinstance(value, sympy.Expr):
        found = value.subs(sizes, simultaneous=True)
        return int(found) if found.is_Integer else found
    return value


def attempts(declared: Declaration, graph: Graph, library: PatternLibrary) -> Iterator[Match | MatchFailure]:
    """What becomes of every attempt to match a declaration, with nothing replaced; matches may overlap."""
    outputs = set(graph.outputs)
    for dtype in _float_types(graph):
        for pattern in library.patterns(declared, dtype):
            for root in graph.nodes:
                assert pattern.root.producer is not None
                if root.op is not pattern.root.producer.op:
                    continue
                value = _root_value(root, pattern)
                fitting = library.at_rank(pattern, declared, dtype, len(value.shape)) if value is not None else None
                if fitting is not None and value is not None:
                    yield Matcher(fitting, graph, outputs).match(value)
