"""Canonicalization: equivalent computations get one form, so that one pattern finds them."""

from dataclasses import dataclass
from typing import ClassVar

from fusec.ir.graph import Graph
from fusec.passes.canonicalize import (
    arithmetic,
    byte_matmuls,
    casts,
    concatenations,
    contractions,
    lookups,
    numbers,
    scatters,
    slices,
    sorted_rows,
    views,
)
from fusec.passes.canonicalize.subexpressions import merge_equal
from fusec.pipeline import Context
from fusec.rewriting.driver import Simplification, simplify_graph
from fusec.rewriting.listener import RewriteListener

RULES: tuple[Simplification, ...] = tuple(
    rule
    for module in (
        numbers,
        casts,
        arithmetic,
        views,
        slices,
        contractions,
        byte_matmuls,
        concatenations,
        sorted_rows,
        lookups,
        scatters,
    )
    for rule in vars(module).values()
    if isinstance(rule, Simplification)
)
"""The rules of all files. Of those for one operation the first that fits is applied, in the order of each file."""

_ROUNDS = 4
"""Merging equal nodes can open new simplifications; this often it is tried."""


def normalize(graph: Graph, listener: RewriteListener | None = None) -> None:
    """Bring a graph to its normal form. Patterns go through this very function."""
    graph.erase_dead()
    for _ in range(_ROUNDS):
        simplify_graph(graph, RULES, listener)
        if not merge_equal(graph):
            break


@dataclass(frozen=True)
class Canonicalize:
    """Bring a graph to canonical form: algebra, casts, views, contractions, equal and dead computations."""

    name: ClassVar[str] = "canonicalize"

    def apply(self, graph: Graph, context: Context) -> None:
        """Canonicalize the graph in place."""
        normalize(graph, context)
