"""The normal form of any graph: it is its own, means the same, and its outputs stay apart."""

import pytest
from hypothesis import given

from fusec.ir.graph import Graph, base
from fusec.ir.verifier import verify_graph
from fusec.passes.canonicalize import normalize
from fusec.verify.rewrites import check_rewrite
from tests.campaigns.fuzz.graphs import graphs
from tests.passes.canonicalize.rule_cases import row


@given(graphs(effects=False))
def test_a_normal_form_is_its_own(graph: Graph) -> None:
    normalize(graph)
    verify_graph(graph)
    once = str(graph)
    normalize(graph)
    assert str(graph) == once


@given(graphs(effects=False))
def test_a_normal_form_means_the_same(graph: Graph) -> None:
    plain = graph.copy()
    normalize(graph)
    verdict = check_rewrite(plain, graph, exact=False)
    assert verdict, verdict.message


def test_an_output_is_never_another_name_of_an_input_or_output() -> None:
    graph = row("%a: f32[3, 4] = mul(%x, 1.0)\n%b: f32[3, 4] = exp(%x)\n%c: f32[3, 4] = exp(%x)\nreturn %a, %b, %c")
    normalize(graph)
    assert len(set(graph.outputs)) == 3
    assert graph.inputs[0] not in graph.outputs


@pytest.mark.parametrize("spelled", ["mul(1.0, %x)", "add(-0.0, %x)", "sub(%x, 0.0)", "pow(%x, 1.0)"])
def test_an_output_that_becomes_an_input_in_two_steps_stays_a_copy(spelled: str) -> None:
    graph = row(f"%a: f32[3, 4] = {spelled}\nreturn %a")
    normalize(graph)
    assert base(graph.outputs[0]) not in graph.inputs


def test_storage_that_is_written_to_is_not_shared() -> None:
    graph = row(
        "%a: f32[3, 4] = exp(%x)\n%b: f32[3, 4] = exp(%x)\n%c: f32[3, 4] = tanh(%x)\n"
        "%w: f32[3, 4] = write(%a, %c)\n%v: f32[3, 4] = write(%b, %x)\nreturn %w, %v"
    )
    normalize(graph)
    assert sum(n.is_op("exp") for n in graph.nodes) == 2
