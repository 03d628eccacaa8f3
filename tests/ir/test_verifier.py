"""The verifier passes what is right and names what is broken."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given

from fusec.errors import GraphError
from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph
from fusec.ir.types import BF16, F32, TensorType
from fusec.ir.verifier import verify_graph
from tests.campaigns.fuzz.graphs import graphs

TEXT = """graph g(%x: f32[4, 4], %w: f32[4]) {
  %a: f32[4, 4] = mul(%x, %w)
  %b: f32[4, 4] = exp(%a)
  %c: f32[4, 4] = region(%b) {fusion="twice", kind="declared"} body(%x: f32[4, 4]) {
    %d: f32[4, 4] = add(%x, %x)
    return %d
  }
  return %c
}"""


@given(graphs(size=25))
def test_random_graphs_are_right(graph: Graph) -> None:
    verify_graph(graph)
    verify_graph(graph.copy())


def _forget_reader(g: Graph) -> None:
    g.inputs[0].users.clear()


def _invent_reader(g: Graph) -> None:
    g.inputs[0].users[g.nodes[1]] = None


def _keep_erased_reader(g: Graph) -> None:
    g.inputs[0].users[Graph().add_node("neg", [g.inputs[1]])] = None


def _disorder(g: Graph) -> None:
    first, second, third = g.nodes
    g._nodes = dict.fromkeys((second, first, third))


def _read_foreign(g: Graph) -> None:
    g.replace_operands(g.nodes[1], [Graph().add_input(g.inputs[0].type)])


def _change_type(g: Graph) -> None:
    g.nodes[1].result.type = g.nodes[1].result.tensor.with_dtype(BF16)


def _change_shape(g: Graph) -> None:
    g.nodes[1].result.type = TensorType(F32, (4, 5), (5, 1))


def _promise_other_type(g: Graph) -> None:
    g.output_types = [g.outputs[0].tensor.with_dtype(BF16)]


def _promise_too_much(g: Graph) -> None:
    g.output_types = g.output_types * 2


def _return_foreign(g: Graph) -> None:
    g.outputs = [Graph().add_input(g.outputs[0].type)]


def _list_attribute(g: Graph) -> None:
    g.nodes[1].attributes["note"] = [1, 2]


def _drop_operand(g: Graph) -> None:
    g.replace_operands(g.nodes[0], g.nodes[0].operands[:1])


def _pass_other_shape_to_body(g: Graph) -> None:
    g.replace_operands(g.nodes[2], [g.inputs[1]])


def _break_body(g: Graph) -> None:
    body = g.nodes[2].body
    body.nodes[0].result.type = TensorType(F32, (4, 4), (4, 1)).with_dtype(BF16)
    body.outputs = list(body.inputs)
    body.output_types = [body.inputs[0].type]


def _unknown_kind(g: Graph) -> None:
    g.nodes[2].attributes["kind"] = "other"


def _write_with_other_strides(g: Graph) -> None:
    write = g.add_node("write", [g.inputs[0], g.outputs[0]])
    write.result.type = TensorType(F32, (4, 4), (1, 4))


def _misplace_input(g: Graph) -> None:
    g.inputs.reverse()


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (_forget_reader, "a use list lacks a reader"),
        (_invent_reader, "does not read the value"),
        (_keep_erased_reader, "a node that is not in the graph"),
        (_disorder, "used before it is defined"),
        (_read_foreign, "belongs to another graph"),
        (_change_type, "has not the type of its operation"),
        (_change_shape, "has not the type of its operation"),
        (_promise_other_type, "not the promised type"),
        (_promise_too_much, "differ in number"),
        (_return_foreign, "not defined in the graph"),
        (_list_attribute, "a kind that is not allowed"),
        (_drop_operand, "number of operands is wrong"),
        (_pass_other_shape_to_body, "operand 0 differs from the body's"),
        (_break_body, "in its body: a result has not the type"),
        (_unknown_kind, "unknown kind"),
        (_write_with_other_strides, "other strides than its destination"),
        (_misplace_input, "an input has the wrong position"),
    ],
)
def test_a_broken_graph_is_named(breakage: Callable[[Graph], None], message: str) -> None:
    graph = parse_graph(TEXT)
    verify_graph(graph)
    graph = parse_graph(TEXT)
    breakage(graph)
    with pytest.raises(GraphError, match=message):
        verify_graph(graph)


CACHE = """graph cache(%cache: f32[8, 4], %new: f32[2, 4], %at: i64[2]) {{
  %row: f32[1, 4] = slice(%cache) {{dim=-2, start=0, stop=1, step=1}}
  {line}
  return %w
}}"""
FULL = "%f: f32[8, 4] = full() {value=0.0, shape=(8, 4), dtype=f32}"
WRITE = "%w: f32[8, 4] = write(%cache, %new, %at) {dim=0}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (WRITE, None),
        ("%t: f32[4, 8] = permute(%cache) {dims=(1, 0)} %z: f32[4, 2] = permute(%new) {dims=(1, 0)}"
         "%w: f32[4, 8] = write(%t, %z, %at) {dim=1}", None),
        (WRITE + "%e: f32[8, 4] = exp(%w)", None),
        (WRITE + "%e: f32[8, 4] = exp(%cache)", "read after its storage was written"),
        (WRITE.replace("%w", "%v") + WRITE.replace("%cache", "%v"), None),
        ("%e: f32[8, 4] = exp(%cache)" + WRITE.replace("%cache", "%e"), "not the storage of a graph input"),
        (WRITE.replace("%w", "%v") + FULL + WRITE.replace("%cache", "%f"), None),
        (FULL + WRITE.replace("%cache", "%f") + "%e: f32[8, 4] = exp(%f)", "read after its storage was written"),
    ],
)  # fmt: skip
def test_only_inputs_and_what_was_made_for_it_are_written_and_old_values_are_read_before(
    line: str, message: str | None
) -> None:
    graph = parse_graph(CACHE.format(line=line))
    if message is None:
        verify_graph(graph)
        assert graph.written_inputs == [0]
        return
    with pytest.raises(GraphError, match=message):
        verify_graph(graph)


@pytest.mark.parametrize(("dtype", "combine"), [("f32", "pow"), ("bool", "add"), ("bool", "mul")])
def test_elements_are_combined_by_few_operations(dtype: str, combine: str) -> None:
    text = f"""graph g(%x: {dtype}[4, 3], %new: {dtype}[2, 3], %at: i64[2, 3]) {{{{
      %a: {dtype}[4, 3] = scatter(%x, %new, %at) {{{{dim=-2, combine="{{}}"}}}}
      return %a
    }}}}"""
    verify_graph(parse_graph(text.format("maximum")))
    with pytest.raises(GraphError, match="combines elements"):
        verify_graph(parse_graph(text.format(combine)))


CONVOLUTION = """graph g(%x: f32[2, 6, {n}], %w: f32[{weight}]) {{
  %a: f32[2, 8, {out}] = convolution(%x, %w) {{stride=({stride},), padding=(1,), dilation=(2,), groups={groups}}}
  return %a
}}"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"n": "s0", "out": "floor((s0 - 3)/2) + 1"}, None),
        ({"groups": 2, "weight": "8, 3, 3"}, None),
        ({"groups": 2}, "2 groups of"),
        ({"groups": 3, "weight": "8, 2, 3"}, "3 groups of"),
        ({"stride": "2, 1"}, "1 numbers each"),
        ({"weight": "8, 6, 3, 1"}, "is no convolution weight"),
        ({"out": 10}, "not the type of its operation"),
    ],
)
def test_a_convolution_fits_its_operands(change: dict[str, Any], message: str | None) -> None:
    sizes = {"n": 20, "weight": "8, 6, 3", "out": 9, "stride": 2, "groups": 1}
    text = CONVOLUTION.format(**(sizes | change))
    if message is None:
        verify_graph(parse_graph(text))
        return
    with pytest.raises(GraphError, match=message):
        verify_graph(parse_graph(text))


@pytest.mark.parametrize(
    ("start", "stop", "fits"), [(0, 4, True), (2, 2, True), (0, 5, False), (3, 2, False), (-1, 2, False)]
)
def test_a_slice_lies_within_its_dim(start: int, stop: int, fits: bool) -> None:
    graph = Graph()
    x = graph.add_input(TensorType(F32, (3, 4), (4, 1)))
    with nullcontext() if fits else pytest.raises(GraphError, match="is empty or outside dim 4"):
        graph.add_node("slice", [x], {"dim": -1, "start": start, "stop": stop, "step": 1})
