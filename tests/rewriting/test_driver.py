"""The driver of rules: one that is vetoed, that raises, or that is wrong."""

import re
from itertools import pairwise
from typing import Any

import pytest
import torch

from fusec.config import Config
from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph
from fusec.ir.types import I64
from fusec.ir.verifier import verify_graph
from fusec.passes.canonicalize import RULES, normalize
from fusec.pipeline import Context
from fusec.reference.interpreter import evaluate
from fusec.rewriting.driver import Simplification, neighbourhood, simplifies, simplify_graph
from tests.passes.canonicalize.rule_cases import CASES, graph_of, row


def test_a_vetoed_application_is_not_made() -> None:
    graph = graph_of("double-negation")
    context = Context(Config(apply="!0"))
    normalize(graph, context)
    assert [n.op.name for n in graph.nodes] == ["neg", "neg", "exp"]
    assert "not selected" in context.remarks[0].reason


@pytest.mark.parametrize("name", CASES)
def test_a_veto_leaves_a_graph_as_it_was(name: str) -> None:
    """Down to how values lie in memory, behind what was not applied as well."""
    graph = graph_of(name)
    (result,) = graph.outputs
    graph.set_outputs([graph.add_node("cast", [result], {"dtype": result.dtype}).result])
    before = str(graph)
    simplify_graph(graph, RULES, Context(Config(apply="!0..")))
    assert str(graph) == before


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_both_sides_are_seen_with_so_much_of_what_is_before(depth: int) -> None:
    graph = row("\n".join(f"%{b}: f32[3, 4] = exp(%{a})" for a, b in pairwise("xabcdefgr")) + "\nreturn %r")
    last = graph.nodes[-1]
    added = graph.add_node("neg", graph.inputs)
    before, after = neighbourhood(last, added.result, [added], depth=depth)
    assert [n.op.name for n in before.nodes] == (depth + 1) * ["exp"]
    assert [n.op.name for n in after.nodes] == ["neg"]


def test_a_rule_that_raises_is_left_out() -> None:
    def broken(graph: Graph, node: Any) -> None:
        raise KeyError("a bug")

    context = Context()
    simplify_graph(graph_of("one-over"), [Simplification("broken", ("div",), broken, True)], context)
    (failure,) = context.remarks.of("failure")
    assert "broken" in failure.message


def test_a_rule_that_does_not_end_is_left_out() -> None:
    @simplifies("neg")
    def again(graph: Graph, node: Any) -> Any:
        return graph.add_node("neg", node.operands).result

    context = Context()
    simplify_graph(row("%r: f32[3, 4] = neg(%x)\nreturn %r"), [again], context)
    (failure,) = context.remarks.of("failure")
    assert "without an end" in failure.reason


def test_a_wrong_rule_is_told_with_both_sides_in_order() -> None:
    @simplifies("exp")
    def negated(graph: Graph, node: Any) -> Any:
        return graph.add_node("neg", [node.result]).result if not node.result.users else None

    graph, context = row("%r: f32[3, 4] = exp(%x)\nreturn %r"), Context(Config(verify=True))
    assert not simplify_graph(graph, [negated], context)
    (failure,) = context.remarks.of("failure")
    before, after = map(float, re.findall(r"\): (\S+) and (\S+?)(?:,|$)", failure.reason)[0])
    assert before > 0 > after == -before


@pytest.mark.parametrize(
    "text",
    [
        """graph g(%x: f32[1, 4], %y: f32[1, 4]) {
          %old: f32[1, 4] = sum(%x) {dims=(-2,)}
          %new: f32[1, 4] = write(%x, %y)
          %r: bool[1, 4] = lt(%old, %new)
          return %r
        }""",
        """graph g(%x: f32[1, 4], %index: i64[1]) {
          %old: f32[1, 4] = sum(%x) {dims=(-2,)}
          %new: f32[1, 4] = write(%x, %old, %index) {dim=-2}
          return %new
        }""",
        """graph g(%x: f32[1, 4], %y: f32[1, 4]) {
          %old: f32[1, 4] = neg(%x)
          %new: f32[1, 4] = write(%x, %y)
          %r: f32[1, 4] = sub(%new, %old)
          return %r
        }""",
        """graph g(%x: f32[1, 4], %y: f32[1, 4]) {
          %twice: f32[1, 8] = concat(%x, %x) {dim=-1}
          %old: f32[1, 2] @(8, 2) = slice(%twice) {dim=-1, start=0, stop=4, step=2}
          %new: f32[1, 4] = write(%x, %y)
          return %old
        }""",
    ],
)
def test_what_a_write_replaces_is_not_read_behind_it(text: str) -> None:
    graph = parse_graph(text)
    inputs = [torch.zeros(1, dtype=torch.int64) if v.dtype == I64 else torch.randn(1, 4) for v in graph.inputs]
    expected = evaluate(graph, [x.clone() for x in inputs], mutate=True)
    normalize(graph)
    verify_graph(graph)
    for e, f in zip(expected, evaluate(graph, inputs, mutate=True), strict=True):
        assert torch.equal(e, f)


def test_what_a_write_replaces_may_be_read_ahead_of_it() -> None:
    graph = parse_graph("""graph g(%x: f32[1, 4], %y: f32[1, 4]) {
      %old: f32[1, 4] = sum(%x) {dims=(-2,)}
      %r: f32[1, 4] = exp(%old)
      %new: f32[1, 4] = write(%x, %y)
      return %r, %new
    }""")
    normalize(graph)
    assert [n.op.name for n in graph] == ["exp", "write"]
