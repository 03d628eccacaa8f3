"""Edits that would complete a match, tried: whether the fusion matches then, and whether the values are the same."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fusec.errors import GraphError
from fusec.ir.graph import Graph, Value
from fusec.ir.printer import print_graph
from fusec.rewriting.application import Patterns, apply_declared
from fusec.rewriting.match import OTHER, SAME, MatchFailure
from fusec.rewriting.rule import Declaration
from fusec.verify.rewrites import EquivalenceResult, check_rewrite


def tried_edits(
    graph: Graph, failures: Sequence[MatchFailure], declarations: Sequence[Declaration], library: Patterns
) -> list[MatchFailure]:
    """Return failed matches with the outcome of their edits, made in copies of the graph and of its parts."""
    known: dict[tuple[str, str], EquivalenceResult] = {}
    fusing: dict[Value, bool] = {}
    for declared in declarations:
        mine = [f for f in failures if f.fusion == declared.name and f.substitution is not None]
        fusing |= _fusing(graph, mine, declared, library) if mine else {}
    tried = (f.substitution is not None and fusing.get(f.substitution.root) for f in failures)
    return [_with_outcome(f, known) if fuses else f for f, fuses in zip(failures, tried, strict=True)]


def _fusing(
    graph: Graph, failures: Sequence[MatchFailure], declared: Declaration, library: Patterns
) -> dict[Value, bool]:
    """Make edits for one declaration in a copy of a graph, and return by root which of them it matches."""
    work = Graph(graph.name)
    to = {v: work.add_input(v.type, v.name, v.frozen) for v in graph.inputs}
    work.splice(graph.nodes, to)
    work.set_outputs([to[v] for v in graph.outputs])
    roots: dict[Value, Value] = {}
    for failure in failures:
        substitution: Any = failure.substitution
        if substitution.root not in roots:
            with suppress(GraphError):  # operands of other dtypes, of which the pattern knows nothing
                inner, outer = substitution.made(work, to)
                work.replace_value(to[substitution.root], outer)
                roots[substitution.root], to[substitution.root] = inner, outer
    count = len(work.outputs)
    work.set_outputs([*work.outputs, *roots.values()])
    work.erase_dead()
    work.sort()
    library.normalize(work)
    apply_declared([declared], work, library)
    producers = (value.producer for value in work.outputs[count:])
    names = [node.attributes.get("fusion") if node else None for node in producers]
    return {root: name == declared.name for root, name in zip(roots, names, strict=True)}


def _with_outcome(failure: MatchFailure, known: dict[tuple[str, str], EquivalenceResult]) -> MatchFailure:
    """Compare both sides of an edit that fuses; equal sides are compared once."""
    before, after = failure.substitution.sides()
    key = (print_graph(before, sources=False), print_graph(after, sources=False))
    if key not in known:
        known[key] = check_rewrite(before, after, exact=False)
    if known[key].passed:
        return replace(failure, outcome=SAME)
    return replace(failure, outcome=OTHER, difference=known[key].unusual)
