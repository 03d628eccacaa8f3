"""The driver of rules: one that is vetoed, that raises, or that is wrong."""

import re
from typing import Any

from fusec.config import Config
from fusec.ir.graph import Graph
from fusec.passes.canonicalize import normalize
from fusec.pipeline import Context
from fusec.rewriting.driver import Simplification, simplifies, simplify_graph
from tests.passes.canonicalize.rule_cases import graph_of, row


def test_a_vetoed_application_is_not_made() -> None:
    graph = graph_of("double-negation")
    context = Context(Config(apply="!0"))
    normalize(graph, context)
    assert [n.op.name for n in graph.nodes] == ["neg", "neg", "exp"]
    assert "not selected" in context.remarks[0].reason


def test_a_rule_that_raises_is_left_out() -> None:
    def broken(graph: Graph, node: Any) -> None:
        raise KeyError("a bug")

    context = Context()
    simplify_graph(graph_of("one-over"), [Simplification("broken", ("div",), broken, True)], context)
    (failure,) = context.remarks.of("failure")
    assert "broken" in failure.message


def test_a_wrong_rule_is_told_with_both_sides_in_order() -> None:
    @simplifies("exp")
    def negated(graph: Graph, node: Any) -> Any:
        return graph.add_node("neg", [node.result]).result if not node.result.users else None

    graph, context = row("%r: f32[3, 4] = exp(%x)\nreturn %r"), Context(Config(verify=True))
    assert not simplify_graph(graph, [negated], context)
    (failure,) = context.remarks.of("failure")
    before, after = map(float, re.findall(r"\): (\S+) and (\S+?)(?:,|$)", failure.reason)[0])
    assert before > 0 > after == -before
