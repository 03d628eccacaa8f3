"""Operations on numbers: folded to what torch computes in that type, or left where a bit or an error could differ."""

import math

import pytest
import torch

from fusec.ir.graph import Graph
from fusec.ir.types import BF16, BOOL, DTYPES, F16, F32, F64, I8, I32, I64, U8
from fusec.passes.canonicalize.numbers import cast_of_number, constant_folding, number_of, rounded
from fusec.reference.dtypes import torch_dtype

TORCH = {"neg": torch.neg, "abs": torch.abs, "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
         "sqrt": torch.sqrt, "floor_divide": torch.floor_divide, "maximum": torch.maximum, "minimum": torch.minimum,
         "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}  # fmt: skip
FOLDED = [
    *((op, dtype, pair) for op in ("add", "sub", "mul") for dtype in (F32, F64) for pair in ((0.1, 0.3), (-7.7, 1e8))),
    *((op, I64, (a, b)) for op in ("add", "sub", "mul", "maximum", "minimum") for a, b in ((7, -2), (-3, -9))),
    *((op, F32, (1.0, b)) for op in ("eq", "ne", "lt", "le", "gt", "ge") for b in (0.5, 1.0, 2.0)),
    *((op, BF16, (1.0, 1.001)) for op in ("eq", "lt", "ge")),
    ("floor_divide", I64, (7, 2)), ("floor_divide", I64, (-7, 2)), ("floor_divide", I32, (7, -2)),
    ("neg", F32, (0.1,)), ("neg", I32, (5,)), ("abs", F64, (-0.1,)), ("abs", I8, (-127,)),
    ("add", I8, (100, 27)), ("mul", I8, (-127, 1)), ("div", F32, (1.0, 3.0)), ("div", F64, (2.0, 3.0)),
    ("sqrt", F32, (2.0,)), ("sqrt", F64, (0.3,)), ("add", F32, (math.inf, 1.0)), ("mul", F32, (1e30, 1e30)),
]  # fmt: skip
LEFT = [
    ("floor_divide", I64, (7, 0)), ("add", I8, (100, 28)), ("mul", I8, (-128, 1)), ("sub", I8, (-100, 29)),
    ("div", F32, (1.0, 0.0)), ("div", F32, (-1.0, 3.0)), ("div", F32, (math.inf, 3.0)), ("div", I64, (6, 3)),
    ("sqrt", F32, (-1.0,)), ("sqrt", F32, (math.inf,)), ("add", BF16, (1.0, 2.0)), ("mul", F16, (1.0, 2.0)),
    ("maximum", F32, (1.0, 2.0)), ("floor_divide", F32, (7.0, 2.0)), ("div", BF16, (1.0, 3.0)),
]  # fmt: skip


def folded(op, dtype, numbers):
    graph = Graph()
    node = graph.add_node(op, [graph.constant(n, dtype) for n in numbers])
    found = constant_folding.apply(graph, node)
    assert found is None or found.dtype == node.result.dtype
    return None if found is None else number_of(found)


@pytest.mark.parametrize(("op", "dtype", "numbers"), FOLDED, ids=str)
def test_a_folded_number_is_torchs(op, dtype, numbers):
    wanted = TORCH[op](*(torch.tensor(n, dtype=torch_dtype(dtype)) for n in numbers))
    found = folded(op, dtype, numbers)
    assert found is not None and found == wanted.item() and math.copysign(1, found) == math.copysign(1, wanted.item())


@pytest.mark.parametrize(("op", "dtype", "numbers"), LEFT, ids=str)
def test_what_could_differ_is_left(op, dtype, numbers):
    assert folded(op, dtype, numbers) is None


def test_only_numbers_are_folded():
    graph = Graph()
    x = graph.add_node("size", (), {"expr": 3, "dtype": F32, "device": "cpu"}).result
    assert constant_folding.apply(graph, graph.add_node("add", [x, graph.constant(1.0, F32)])) is None


@pytest.mark.parametrize("wanted", [F64, F32, BF16, F16, I64, I8, U8, BOOL], ids=str)
@pytest.mark.parametrize("given", [F64, F32, BF16, I64, BOOL], ids=str)
@pytest.mark.parametrize("number", [0.0, 1.0, 0.1, -2.5, 300.0, 1e6 + 1, math.inf])
def test_a_cast_number_is_the_number_in_both_types(number, given, wanted):
    if not given.is_float and not float(number).is_integer():
        return
    value = number if given.is_float else (bool(number) if given == BOOL else int(number))
    graph = Graph()
    node = graph.add_node("cast", [graph.constant(value, given)], {"dtype": wanted})
    found = cast_of_number.apply(graph, node)
    exact = torch.tensor(value, dtype=torch_dtype(given)).to(torch_dtype(wanted)).double().item()
    if found is None:
        rounds = exact != value or (wanted.kind == "int" and given.is_float)
        assert rounds or (given, wanted) in ((F64, F32),), "nothing keeps it from being folded"
    elif (given, wanted) == (F64, F32):
        assert number_of(found) == number  # as precise as it was: its user rounds it
    else:
        assert found.dtype == wanted and float(number_of(found)) == exact == float(value)


def test_every_type_is_known():
    assert set(DTYPES.values()) >= {F64, F32, BF16, F16, I64, I32, I8, U8, BOOL}


@pytest.mark.parametrize(("dtype", "kind"), [(F32, torch.float32), (BF16, torch.bfloat16), (F16, torch.float16)])
def test_rounding_is_torchs(dtype, kind):
    for x in (0.1, 1 / 3, 1e-9, 65519.0, 3.0e38, -2.7182818, 1.00390625, 1.01171875):
        assert rounded(x, dtype) == torch.tensor(x, dtype=torch.float64).to(kind).item()


@pytest.mark.parametrize(
    ("dtype", "number", "rest"),
    [
        (I8, 300, 44),
        (I8, 200, -56),
        (U8, 300, 44),
        (U8, -1, 255),
        (I32, 2**31, -(2**31)),
        (I64, 2**63, -(2**63)),
        (I8, -129, 127),
    ],
)
def test_what_overflows_an_integer_is_its_rest(dtype, number, rest):
    assert rounded(number, dtype) == rest and rounded(rest, dtype) == rest
