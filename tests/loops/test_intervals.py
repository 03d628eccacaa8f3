"""Intervals of integers hold what is computed, and tables are functions of the code alone."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from fusec.frontend import trace
from fusec.ir.graph import Graph, Value
from fusec.ir.types import F32, I8, I16, I32, I64, U8, DType, ScalarType, TensorType, contiguous_strides, symbol
from fusec.loops.indexing import lower_to_loops, walk
from fusec.loops.intervals import interval
from fusec.loops.tables import tables
from fusec.reference.interpreter import evaluate

BINARY = ("add", "sub", "mul", "maximum", "minimum", "and", "or", "xor")
BY_CONSTANT = ("shift_right", "shift_left", "floor_divide", "remainder")
NUMBERS = {torch.int8: (-128, -1, 0, 3, 127), torch.uint8: (0, 1, 15, 200, 255)}


def tensor(body: Graph, dtype: DType, *shape: int) -> Value:
    return body.add_input(TensorType(dtype, shape, contiguous_strides(shape)))


@st.composite
def expressions(draw: st.DrawFn) -> Graph:
    body = Graph()
    values = [tensor(body, dtype, 5) for dtype in (I8, U8)]
    for _ in range(draw(st.integers(1, 6))):
        a = draw(st.sampled_from(values))
        kind = draw(st.sampled_from(("binary", "constant", "cast", "where")))
        others = [v for v in values if v.dtype == a.dtype]
        if kind == "binary":
            found = body.add_node(draw(st.sampled_from(BINARY)), [a, draw(st.sampled_from(others))])
        elif kind == "constant":
            by = body.constant(draw(st.integers(1, 7)), a.dtype, "cpu")
            found = body.add_node(draw(st.sampled_from(BY_CONSTANT)), [a, by])
        elif kind == "cast":
            found = body.add_node("cast", [a], {"dtype": draw(st.sampled_from((I8, U8, I16, I32, I64)))})
        else:
            condition = body.add_node("lt", [a, draw(st.sampled_from(others))]).result
            found = body.add_node("where", [condition, a, draw(st.sampled_from(others))])
        values.append(found.result)
    body.set_outputs(values[2:])
    return body


@given(expressions())
def test_every_element_is_inside(body: Graph) -> None:
    inputs = [torch.tensor(numbers, dtype=dtype) for dtype, numbers in NUMBERS.items()]
    for value, result in zip(body.outputs, evaluate(body, inputs), strict=True):
        low, high = interval(value) or (0, 0)
        assert low <= int(result.min()) <= int(result.max()) <= high


def test_a_nibble() -> None:
    body = Graph()
    x = tensor(body, U8, 4)
    four, fifteen = body.constant(4, U8, "cpu"), body.constant(15, U8, "cpu")
    assert interval(body.add_node("shift_right", [x, four]).result) == (0, 15)
    low = body.add_node("and", [x, fifteen]).result
    assert interval(low) == (0, 15)
    assert interval(body.add_node("cast", [low], {"dtype": F32}).result) is None
    assert interval(body.add_node("sub", [low, body.constant(8, U8, "cpu")]).result) == (0, 255)  # wraps around


@pytest.mark.parametrize(("mask", "lanes", "found"), [(15, 16, 16), (15, 8, 0), (31, 8, 0), (7, 8, 8), (0, 16, 0)])
def test_codes_that_a_register_holds(mask: int, lanes: int, found: int) -> None:
    """In two registers a table of so few operations is slower than they."""
    body = Graph()
    x, s = tensor(body, U8, 3, 32), tensor(body, F32, 3, 1)
    code = body.add_node("and", [x, body.constant(mask, U8, "cpu")]).result
    weight = body.add_node("mul", [body.add_node("cast", [code], {"dtype": F32}).result, s]).result
    body.set_outputs([weight])
    ((output,), (_, (columns,), *_)) = (nest := lower_to_loops(body)).outputs, nest.axes
    result = tables([output.root], columns, lanes)
    assert [table.entry.size for table in result.values()] == ([found] if found else [])


@pytest.mark.parametrize("lanes", [8, 16])
def test_what_is_computed_from_an_index_is_no_code(lanes: int) -> None:
    def unpacked(words: Tensor, scale: Tensor) -> Tensor:
        return (((words >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15).float() - 8) * scale

    body = trace(unpacked, (torch.ones(3, 1, dtype=torch.int32), torch.ones(3, 1)), symbolic=False)
    ((output,), (_, (columns,), *_)) = (nest := lower_to_loops(body)).outputs, nest.axes
    codes = [table.code for table in tables([output.root], columns, lanes).values()]
    assert all(any(item.kind == "load" for item in walk([code])) for code in codes)


@pytest.mark.parametrize(
    ("spelled", "kind", "first"),
    [
        ("x & 15", "load", 0),
        ("x >> 4", "load", 4),
        ("(x >> 2) & 15", "load", 2),
        ("(x & 240) >> 4", "load", 4),
        ("((x.int() & 255) >> 4) & 15", "load", 4),
        ("((x & 31) >> 1) & 15", "load", 1),
        ("((x & 61) >> 1) & 15", "and", 1),  # a bit of the code is cleared
        ("((x + 1) >> 1) & 15", "add", 1),
    ],
)
@pytest.mark.parametrize("lanes", [8, 16, 32])
def test_bits_above_a_code_are_left_in(spelled: str, kind: str, first: int, lanes: int) -> None:
    """As far as registers that are full ignore them."""

    def weights(x: Tensor) -> Tensor:
        return ((eval(spelled).float() - 8) * 0.5).exp()

    body = trace(weights, (torch.arange(64, dtype=torch.uint8),), symbolic=False)
    ((output,), ((columns,), *_)) = (nest := lower_to_loops(body)).outputs, nest.axes
    (table,) = tables([output.root], columns, lanes).values()
    item, shift = table.field(lanes)
    if lanes == 32:
        assert item is table.code and shift == 0
    else:
        assert shift == first and kind == (item.node.op.name if item.kind == "pointwise" else item.kind)


def test_what_varies_with_more_is_no_table() -> None:
    body = Graph()
    x, s = tensor(body, U8, 3, 32), tensor(body, F32, 3, 32)
    code = body.add_node("and", [x, body.constant(15, U8, "cpu")]).result
    scaled = body.add_node("mul", [body.add_node("cast", [code], {"dtype": F32}).result, s]).result
    body.set_outputs([scaled])
    ((output,), (_, (columns,), *_)) = (nest := lower_to_loops(body)).outputs, nest.axes
    assert tables([output.root], columns, 16) == {}


def test_operations_of_other_values() -> None:
    """A size is no tensor, and an operation without a rule may be any number."""
    body = Graph()
    size = body.add_input(ScalarType("int", symbol("s0")), "n")
    x = tensor(body, I64, 4)
    attributes = {"target": "aten.roll.default", "args": (("%", 0), ("%", 1)), "kwargs": (), "operand_types": ()}
    found = body.add_node("opaque", [x, size], attributes, types=[x.type]).result
    assert interval(found) == (-(2**63), 2**63 - 1)


@pytest.mark.parametrize(("combine", "found"), [("add", (-128, 127)), ("mul", (-128, 127)), ("maximum", (0, 1))])
def test_scattered_sums(combine: str, found: tuple[int, int]) -> None:
    body = Graph()
    places = tensor(body, I64, 9)
    full = body.add_node("full", [], {"value": 0, "shape": (4,), "dtype": I8, "device": "cpu"}).result
    ones = body.add_node("expand", [body.constant(1, I8, "cpu")], {"shape": (9,)}).result
    assert interval(body.add_node("scatter", [full, ones, places], {"dim": -1, "combine": combine}).result) == found
