"""The text of a graph: printed, parsed back, and refused with a place where it is wrong."""

import pytest
from hypothesis import given

from fusec.errors import ParseError
from fusec.ir.graph import Graph, Source
from fusec.ir.parser import parse_graph
from fusec.ir.printer import name_values, print_attribute, print_graph, print_node, print_type
from fusec.ir.structure import structure
from fusec.ir.types import BF16, F32, DType, OtherType, ScalarType, TensorType, contiguous_strides, symbol
from fusec.ir.value_parser import ValueParser
from fusec.ir.verifier import verify_graph
from tests.campaigns.fuzz.graphs import graphs
from tests.graph_equality import difference

RMS_NORM = """
# A comment that stands alone is for people.
graph rms_norm(%x: bf16[s0, 64], %w: bf16[64], %n: int(s0)) {
  %0: bf16[s0, 64] = pow(%x, 2.0)   # layers.0.norm, modeling_llama.py:271 (aten.pow.Tensor_Scalar) "h = x ** 2"
  %1: bf16[s0, 1] = sum(%0) {dims=(-1,)}   # layers.0.norm, modeling_llama.py:271
  %mean: bf16[s0, 1] = div(%1, 64.0)
  %2: bf16[s0, 1] = add(%mean, 1e-06)
  %3: bf16[s0, 1] = rsqrt(%2)

  %4: bf16[s0, 64] = mul(%x, %3)
  %y: bf16[s0, 64] = mul(%4, %w)   # adds nothing to the sources: free words
  return %y, %3 as bf16[s0, 1] @(1, s0)
}
"""


def test_a_comment_may_come_first() -> None:
    assert parse_graph(f"# for people{RMS_NORM}").name == "rms_norm"


def test_hand_written_text_is_a_graph() -> None:
    graph = parse_graph(RMS_NORM)
    verify_graph(graph)
    assert graph.name == "rms_norm"
    assert [v.name for v in graph.inputs] == ["x", "w", "n"]
    assert graph.inputs[2].type == ScalarType("int", symbol("s0"))
    power = graph.nodes[1]
    assert power.sources == (Source("modeling_llama.py", 271, "layers.0.norm", "aten.pow.Tensor_Scalar", "h = x ** 2"),)
    assert power.operands[1].producer is graph.nodes[0] and graph.nodes[0].attributes["value"] == 2.0
    assert graph.nodes[-1].sources == ()
    assert graph.output_types[1] == TensorType(BF16, (symbol("s0"), 1), (1, symbol("s0")))


@given(graphs(size=20))
def test_text_parses_back_to_an_equal_graph(graph: Graph) -> None:
    text = print_graph(graph)
    again = parse_graph(text)
    assert difference(graph, again, order=True, sources=True) is None
    assert print_graph(again) == text
    verify_graph(again)


@given(graphs(size=10))
def test_text_without_sources_is_equal_but_for_them(graph: Graph) -> None:
    again = parse_graph(print_graph(graph, sources=False))
    assert difference(graph, again, order=True) is None


def test_inputs_that_are_frozen_say_so() -> None:
    text = "graph scaled(%x: f32[4], %w: frozen f32[4]) {\n  %0: f32[4] = mul(%x, %w)\n  return %0\n}\n"
    graph = parse_graph(text)
    assert [v.frozen for v in graph.inputs] == [False, True]
    assert print_graph(graph) == text == print_graph(graph.copy())
    plain = parse_graph(text.replace("frozen ", ""))
    assert difference(graph, plain) == "only one input 1 is frozen" and structure(graph) != structure(plain)


def test_short_sources_read_well() -> None:
    graph = Graph()
    x = graph.add_input(TensorType(F32, (4,), (1,)), "x")
    source = Source("transformers/models/llama/modeling_llama.py", 271, "layers.0.mlp", "aten.neg.default", "-x")
    graph.set_outputs([graph.add_node("neg", [x], sources=(source, source)).result])
    assert "  %0: f32[4] = neg(%x)   # layers.0.mlp, modeling_llama.py:271\n" in print_graph(graph, sources="short")


def test_numbers_stand_inside_their_readers() -> None:
    graph = Graph()
    x = graph.add_input(TensorType(F32, (4,), (1,)), "x")
    other = graph.constant(2, BF16)
    negative = graph.add_node("neg", [graph.constant(-0.5, F32)]).result
    total = graph.add_node("add", [x, graph.constant(float("-inf"), F32)]).result
    lone = graph.constant(3.0, F32)
    gpu = graph.add_node("mul", [total, graph.constant(2.0, F32, "cuda:0")]).result
    cast = graph.add_node("cast", [other], {"dtype": F32}).result
    graph.set_outputs([gpu, lone, negative, cast])
    text = print_graph(graph, sources=False)
    assert "neg(-0.5:f32)" in text
    assert "add(%x, -inf)" in text
    assert "mul(%1, 2.0:f32@cuda:0)" in text
    assert "cast(2:bf16)" in text
    assert "= constant() {value=3.0, dtype=f32" in text
    assert difference(graph, parse_graph(text), order=True) is None


@pytest.mark.parametrize(
    "type",
    [
        TensorType(F32, (), ()),
        TensorType(F32, (4, 1), (1, 7), "cuda:0"),
        TensorType(BF16, (symbol("s0") * 2 + 1, 8), contiguous_strides((symbol("s0") * 2 + 1, 8))),
        TensorType(F32, (symbol("s0") // 2, symbol("s1") % 3), (symbol("s1") % 3, 1)),
        TensorType(DType("c64", "other", 8), (2,), (1,)),
        ScalarType("bool"),
        ScalarType("int", symbol("u0") - 1),
        OtherType('a "list"'),
    ],
    ids=str,
)
def test_types_parse_back(type: object) -> None:
    parser = ValueParser(print_type(type))  # type: ignore[arg-type]
    assert parser.type() == type
    parser.end()


@pytest.mark.parametrize(
    "value",
    [
        1, -1, 0.1, -0.0, 1e300, float("inf"), True, None, "a\n\"b\" ü", (), (1,), (1, (2.5, None)), F32,
        symbol("s0"), symbol("s0") * 2 - 3, (symbol("s0") + 1) * symbol("s1"), symbol("s0") / 3, symbol("s0") * 0.1,
        ("%", 0), ("list", (1, ("%", 2))), ("torch", "float32"), ("device", "cpu"), ("list", ()), ("%", "x"),
        TensorType(F32, (2, symbol("s0")), (symbol("s0"), 1)), (None, TensorType(F32, (), (), "cuda:1")),
        symbol("s0") ** 2 - symbol("s1") ** -1, DType("f8", "other", 1),
    ],
    ids=str,
)  # fmt: skip
def test_attributes_parse_back(value: object) -> None:
    graph = Graph()
    node = graph.add_node("opaque", (), {"target": "aten.x", "value": value}, types=[])
    graph.set_outputs([])
    again = parse_graph(print_graph(graph))
    assert print_graph(again) == print_graph(graph)
    assert difference(graph, again, order=True) is None
    assert again.nodes[0].attributes == node.attributes


def test_regions_show_their_body() -> None:
    body = Graph("scaled")
    x = body.add_input(TensorType(F32, (4,), (1,)), "x")
    source = Source("m.py", 1, "mlp")
    y = body.add_node("mul", [x, body.constant(0.5, F32)], sources=(source,)).result
    body.set_outputs([y])
    graph = Graph()
    outer = graph.add_input(x.type, "h")
    attributes = {"fusion": "scale", "kind": "declared", "body": body}
    region = graph.add_node("region", [outer], attributes, types=[y.type], sources=(source,))
    graph.set_outputs([region.result])
    assert print_graph(graph) == (
        "graph graph(%h: f32[4]) {\n"
        '  %0: f32[4] = region(%h) {fusion="scale", kind="declared"} scaled(%x: f32[4]) {\n'
        "    %0: f32[4] = mul(%x, 0.5)   # mlp, m.py:1\n"
        "    return %0\n"
        "  }\n"
        "  return %0\n"
        "}\n"
    )
    assert parse_graph(print_graph(graph)).nodes[0].sources == (source,)


def test_a_broken_graph_still_prints() -> None:
    graph, other = Graph(), Graph()
    foreign = other.add_input(TensorType(F32, (), ()), "x")
    node = graph.add_node("neg", [foreign])
    node.attributes["odd"] = [1]
    graph.outputs = [foreign]
    assert "neg(%?) {odd=<[1]>}" in print_graph(graph)
    assert print_node(node, name_values(graph))
    assert print_attribute([1]) == "<[1]>"


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("graph g(%x: f33[4]) {\n return %x }", "line 1, column 13", "a type (f64, f32"),
        ("graph g(%x: f32[4]) {\n  %0: f32[4] = nega(%x)\n return %0 }", "line 2, column 16", "(neg"),
        ("graph g(%x: f32[4]) {\n  %0: f32[4] = neg(%y)\n return %0 }", "line 2, column 20", "defined above"),
        ("graph g(%x: f32[4]) {\n  %x: f32[4] = neg(%x)\n return %x }", "line 2, column 3", "a new name"),
        ("graph g(%x: f32[4]) {\n return %x", "line 2, column 11", "`}`"),
        ("graph g(%x: f32[4]) {\n return %x } more", "line 2, column 14", "the end of the text"),
        ("graph g(%x: f32[4) {\n return %x }", "line 1, column 18", "`]`"),
        ("graph g(%x: f32[1.5]) {\n return %x }", "line 1, column 17", "a whole number"),
        ("graph g() {\n  %0: f32[] = neg(1.0)\n return %0 }", "line 2, column 22", "a dtype"),
        ("graph g() {\n  ? }", "line 2, column 3", "not '?'"),
        ('graph g() {\n  %0: f32[] = size() {expr=open("x")}\n return %0 }', "line 2, column 28", "function of sizes"),
        ("graph g(%x: f32[4] @(1, 2)) {\n return %x }", "line 1, column 26", "1 strides"),
    ],
)
def test_a_parse_error_names_place_and_expectation(text: str, place: str, expected: str) -> None:
    with pytest.raises(ParseError) as error:
        parse_graph(text)
    assert error.value.what.startswith(place)
    assert expected in error.value.what
