"""Sorting: what reads storage stays ahead of the write that changes it, wherever in the list it was appended."""

from collections.abc import Callable

import pytest

from fusec.config import Config
from fusec.ir.graph import Graph, Value, storage
from fusec.ir.types import F32, TensorType, contiguous_strides
from fusec.ir.verifier import verify_graph
from fusec.passes import default_pipeline
from tests.contexts import context_of

TYPE = TensorType(F32, (4, 8), contiguous_strides((4, 8)))


def silu(graph: Graph, x: Value) -> Value:
    return graph.add_node("mul", [x, graph.add_node("sigmoid", [x]).result]).result


def half(graph: Graph, x: Value) -> Value:
    return graph.add_node("div", [x, graph.constant(2.0, F32)]).result


def flat(graph: Graph, x: Value) -> Value:
    return graph.add_node("reshape", [x], {"shape": (32,)}).result


def called(graph: Graph, x: Value) -> Value:
    """A view that ATen makes."""
    given = {"target": "aten.diagonal.default", "args": (("%", 0),), "kwargs": (), "operand_types": (x.tensor,)}
    row = TensorType(F32, (4,), (9,))
    return graph.add_node("opaque", [x], given | {"views": 0}, types=[row]).result


@pytest.mark.parametrize("function", [silu, half, lambda graph, x: silu(graph, flat(graph, x))])
def test_rewriting_a_reader_of_what_is_written_later(function: Callable[[Graph, Value], Value]) -> None:
    graph = Graph()
    cache, new = graph.add_input(TYPE, "cache"), graph.add_input(TYPE, "new")
    old = function(graph, cache)
    graph.add_node("write", [cache, new])
    graph.set_outputs([graph.add_node("exp", [old]).result])
    context = context_of(config=Config(disable="group", strict=True))
    default_pipeline(context.config).run(graph, context)
    assert any(record.changed for record in context.records)


def test_a_reader_behind_the_write_through_a_view_of_aten_comes_first() -> None:
    graph = Graph()
    cache, new = graph.add_input(TYPE, "cache"), graph.add_input(TYPE, "new")
    view = called(graph, cache)
    graph.add_node("write", [cache, new])
    graph.set_outputs([graph.add_node("exp", [view]).result])
    graph.sort()
    verify_graph(graph)
    assert [n.op.name for n in graph] == ["opaque", "exp", "write"] and storage(view) is cache


def test_a_reader_behind_the_write_through_a_view_comes_first() -> None:
    graph = Graph()
    cache, new = graph.add_input(TYPE, "cache"), graph.add_input(TYPE, "new")
    row = graph.add_node("slice", [cache], {"dim": -2, "start": 0, "stop": 1, "step": 1}).result
    part = graph.add_node("slice", [new], {"dim": -2, "start": 0, "stop": 1, "step": 1}).result
    graph.add_node("write", [row, part])
    graph.set_outputs([graph.add_node("exp", [flat(graph, cache)]).result])
    graph.sort()
    verify_graph(graph)
    assert [n.op.name for n in graph][-1] == "write"
