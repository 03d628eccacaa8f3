"""Structural equality: what counts, and what does not."""

import pytest
from hypothesis import given

from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph
from tests.campaigns.fuzz.graphs import graphs
from tests.graph_equality import difference, equal_graphs

BASE = """graph g(%x: f32[4, 4], %y: f32[4, 4]) {
  %a: f32[4, 4] = exp(%x)
  %b: f32[4, 4] = neg(%y)
  %c: f32[4, 4] = sub(%a, %b)
  %d: f32[4, 4] = add(%c, 1e-06)
  %e: f32[4, 1] = sum(%d) {dims=(-1,)}
  return %e
}"""


def test_names_and_order_do_not_count() -> None:
    lines = BASE.replace("%a", "%z").splitlines()
    lines[1], lines[2] = lines[2], lines[1]
    other = parse_graph("\n".join(lines))
    assert equal_graphs(parse_graph(BASE), other)
    assert not equal_graphs(parse_graph(BASE), other, order=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sub(%a, %b)", "sub(%b, %a)"),
        ("exp(%x)", "exp(%y)"),
        ("1e-06", "1e-05"),
        ("1e-06", "1e-06:f32@cuda:0"),
        ("dims=(-1,)", "dims=(-2,)"),
        ("neg", "abs"),
        ("%e: f32[4, 1]", "%e: bf16[4, 1]"),
        ("return %e", "return %e as f32[4, 1] @(1, 4)"),
        ("return %e", "return %e, %a"),
        ("%y: f32[4, 4])", "%y: f32[4, 4] cuda:0)"),
    ],
)
def test_everything_else_counts(old: str, new: str) -> None:
    assert not equal_graphs(parse_graph(BASE), parse_graph(BASE.replace(old, new)))


def test_sharing_counts() -> None:
    once = parse_graph("graph g(%x: f32[]) {\n %a: f32[] = exp(%x)\n %b: f32[] = add(%a, %a)\n return %b }")
    twice = parse_graph(
        "graph g(%x: f32[]) {\n %a: f32[] = exp(%x)\n %c: f32[] = exp(%x)\n %b: f32[] = add(%a, %c)\n return %b }"
    )
    assert not equal_graphs(once, twice) and not equal_graphs(twice, once)


def test_dead_nodes_count_only_in_order() -> None:
    dead = parse_graph(BASE.replace("  return", "  %dead: f32[4, 4] = exp(%y)\n  return"))
    assert equal_graphs(parse_graph(BASE), dead)
    assert not equal_graphs(parse_graph(BASE), dead, order=True)


@given(graphs())
def test_a_copy_is_equal(graph: Graph) -> None:
    assert difference(graph, graph.copy(), order=True, sources=True) is None
