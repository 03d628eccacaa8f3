"""Kernel regions as the pipeline makes them: right in the interpreter, within their buffers, no spills on any chip."""

import re

import pytest
import torch
import torch.nn.functional as F

from fusec.codegen import target_named
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.kernel import Load, walk
from fusec.codegen.triton import TritonTarget, check
from fusec.codegen.triton.check import RegionCheck, check_region, multiplies_matrices
from fusec.config import Config
from fusec.debug.capture import capture
from fusec.errors import ScheduleError
from fusec.frontend import trace
from fusec.ir.graph import Graph, Node
from fusec.ir.printer import print_graph
from fusec.ir.types import F32, I64, TensorType, symbol
from fusec.models.gpt2 import GPT2
from fusec.models.gpt2 import PRESETS as GPT2_PRESETS
from fusec.models.inputs import padded_mask, sample_tokens
from fusec.models.llama import PRESETS as LLAMA_PRESETS
from fusec.models.llama import Llama
from tests.codegen.triton_regions import kernel_regions
from tests.contexts import plan_of

VENDOR = Config(small_m=0)
"""All products are the vendor's."""


def different(region: Node) -> str:
    """The text of a region without names and places: equal layers have equal regions."""
    lines = print_graph(region.body).splitlines()
    return re.sub(r"%\w*[a-z]\w*", "%", "\n".join(line.partition("#")[0] for line in lines))


def add_rms_norm(x, residual, weight):
    hidden = x + residual
    wide = hidden.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * scaled.to(x.dtype), hidden


def gelu_layer_norm(x, weight, bias):
    return F.layer_norm(F.gelu(x), (x.shape[-1],), weight, bias)


def masked_softmax(scores, mask):
    return torch.softmax(scores * 0.3 + mask, -1)


def rotary(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def packed_swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def clamp_if_any_overflows(x, residual):
    hidden = x + residual
    limit = torch.where(torch.isinf(hidden).any(), 64504.0, 65504.0)
    return torch.clamp(hidden, -limit, limit)


def column_mean(x):
    return x.mean(0)


FUNCTIONS = {
    add_rms_norm: ((2, 5, 48), (2, 5, 48), (48,)),
    gelu_layer_norm: ((6, 40), (40,), (40,)),
    masked_softmax: ((2, 3, 7, 19), (2, 1, 7, 19)),
    rotary: ((2, 3, 5, 16), (5, 16), (5, 16)),
    packed_swiglu: ((7, 46),),
    column_mean: ((9, 33),),
}


@pytest.mark.parametrize(
    ("symbolic", "dtype"),
    [
        (False, torch.float32),
        (True, torch.bfloat16),
        pytest.param(False, torch.bfloat16, marks=pytest.mark.thorough),
        pytest.param(True, torch.float32, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions(function, symbolic, dtype):
    if symbolic and function is rotary:
        pytest.skip("a concatenation along a dim of unknown size stays outside kernels")
    inputs = [torch.randn(shape, dtype=dtype) for shape in FUNCTIONS[function]]
    regions = kernel_regions(trace(function, inputs, symbolic=symbolic), VENDOR)
    assert regions
    for region in regions:
        outcome = check_region(region, function.__name__)
        assert outcome.ok, outcome


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions_in_float16(function):
    inputs = [torch.randn(shape, dtype=torch.float16) for shape in FUNCTIONS[function]]
    for region in kernel_regions(trace(function, inputs, symbolic=False), VENDOR):
        outcome = check_region(region, function.__name__, chips=["sm_90"])
        assert outcome.ok, outcome


def test_scalars_kept_in_lanes_of_vector_registers_are_no_spill():
    """AMD's compiler calls it one, but nothing goes to memory: here, where it unrolls sixteen steps."""
    inputs = [torch.randn(2, 8, 112).half() for _ in range(2)]
    (region,) = kernel_regions(trace(clamp_if_any_overflows, inputs, symbolic=False))
    assert check_region(region, "clamp", ["gfx942"]).ok


@pytest.mark.parametrize("width", [0, 16])
def test_sums_over_nothing(width):
    def sums(x, w):
        return x.sum(-1) + 1, x.amin(0) * 2, F.linear(x, w).relu()

    regions = kernel_regions(trace(sums, [torch.randn(3, width), torch.randn(20, width)], symbolic=False))
    assert len(regions) > 1
    for region in regions:
        outcome = check_region(region, chips=["sm_80"])
        assert outcome.ok, outcome


def test_an_axis_may_be_tiled_in_one_loop_and_serial_in_another():
    """What is summed along a row is added to a transposed matrix, whose rows lie along the same axis."""

    def shifted(x, y):
        return x + (y.sum(-1, keepdim=True) * 2).exp()

    (region,) = kernel_regions(trace(shifted, [torch.randn(3, 3).t(), torch.randn(3)], symbolic=False))
    outcome = check_region(region, chips=["sm_80"])
    assert outcome.ok, outcome


def repeated(x):
    """The element that is repeated is the same for all, so that no inner loop is around its load."""
    return torch.cat([x, x], -2) + 1


def summed(x):
    """The loop of the sum runs, as no loop of an empty dim is around it."""
    total = x.sum(-1)
    return total + total


@pytest.mark.parametrize("target", ["cpp", "triton"])
@pytest.mark.parametrize(("function", "shape"), [(repeated, (3, 0, 1)), (summed, (0, 0, 3))])
def test_nothing_is_read_from_an_empty_tensor(target, function, shape):
    (region,) = kernel_regions(trace(function, [torch.randn(shape)], symbolic=False))
    kernel = target_named(target).schedule(plan_of(region, target), "kernel")
    assert not unproven_accesses(kernel)
    assert not any(isinstance(s, Load) for s in walk(kernel.body))


@pytest.mark.parametrize("length", [0, "n"])
def test_nothing_is_stored_where_a_write_has_no_rows(length):
    """The destination has one row, with stride 0."""
    n = length if length == 0 else symbol("n")
    graph = Graph()
    x = graph.add_input(TensorType(F32, (1,), (0,)), "x")
    rows = graph.add_input(TensorType(F32, (n,), (1,)), "rows")
    numbers = graph.add_input(TensorType(I64, (n,), (1,)), "numbers")
    written = graph.add_node("write", [x, graph.add_node("exp", [rows]).result, numbers], {"dim": -1}).result
    graph.set_outputs([written])
    (region,) = kernel_regions(graph)
    kernel = TritonTarget().schedule(plan_of(region), "kernel")
    number = torch.ones(1).as_strided((1,), (0,))
    inputs = {"rows": torch.zeros(0), "x": number, "numbers": torch.zeros(0, dtype=torch.long)}
    (found,) = check.run_kernel(kernel, region.body, [inputs[v.name] for v in region.body.inputs], {"n": 0})
    assert found.tolist() == [1.0]


@pytest.mark.parametrize("wrong", [False, True])
def test_what_a_kernel_writes_in_place_is_compared(wrong, monkeypatch):
    def count(counter, x):
        counter.add_(2)
        return x * counter

    counter, x = torch.arange(40), torch.randn(40)
    (graph,) = capture(count, counter.clone(), x)
    if wrong:
        monkeypatch.setattr(check, "TritonKernel", lambda kernel: lambda buffers, symbols: None)
    outcomes = [check_region(region, chips=()) for region in kernel_regions(graph)]
    assert any(b.role == "update" for outcome in outcomes for b in outcome.kernel.buffers)
    assert all(outcome.ok != wrong for outcome in outcomes)


@pytest.mark.parametrize(
    ("function", "shapes", "dtype", "expected"),
    [
        (torch.matmul, ((4, 8), (8, 6)), torch.float16, True),
        (torch.matmul, ((4, 8), (8, 6)), torch.float32, False),  # what a chip multiplies as f32 is rounded to less
        (torch.matmul, ((1, 8), (8, 6)), torch.bfloat16, False),
        (torch.matmul, ((4, 8), (8, 1)), torch.bfloat16, False),
        (torch.matmul, ((4, 1), (1, 6)), torch.bfloat16, False),
        (torch.bmm, ((3, 1, 8), (3, 8, 6)), torch.bfloat16, False),
        (torch.bmm, ((3, 2, 8), (3, 8, 6)), torch.bfloat16, True),
        (torch.add, ((4, 8), (4, 8)), torch.bfloat16, False),
    ],
)
def test_products_of_half_types_with_rows_and_columns_want_a_matrix_unit(function, shapes, dtype, expected):
    body = trace(function, [torch.randn(shape).to(dtype) for shape in shapes], symbolic=False)
    assert multiplies_matrices(body) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dynamic", "dtype"),
    [
        ("llama", False, torch.bfloat16),
        pytest.param("gpt2", True, torch.float32, marks=pytest.mark.thorough),
    ],
)
def test_models(name, dynamic, dtype):
    model = Llama(LLAMA_PRESETS["tiny"]) if name == "llama" else GPT2(GPT2_PRESETS["tiny"])
    inputs = sample_tokens(100, 2, 9), padded_mask(2, 9, "left")
    (graph,) = capture(model.to(dtype).eval(), *inputs, dynamic=dynamic)
    regions = {different(region): region for region in kernel_regions(graph, VENDOR)}
    assert len(regions) > 4
    for region in regions.values():
        outcome = check_region(region, region.attributes["label"] or name)
        assert outcome.ok, outcome


def test_a_wrong_kernel_does_not_pass():
    (region,) = kernel_regions(trace(packed_swiglu, [torch.randn(4, 8)], symbolic=False), VENDOR)
    (other,) = kernel_regions(trace(lambda x: F.silu(x[:, 4:]) * x[:, :4], [torch.randn(4, 8)], symbolic=False), VENDOR)

    kernel = TritonTarget().schedule(plan_of(region), "swapped")
    assert check._compare(kernel, region.body, None).passed
    comparison = check._compare(kernel, other.body, None)
    assert not comparison.passed
    assert not RegionCheck(kernel, comparison, (), ()).ok


def test_batched_matmuls_are_refused():
    graph = Graph()
    body = trace(torch.bmm, [torch.randn(2, 4, 4)] * 2, symbolic=False)
    operands = [graph.add_input(v.type) for v in body.inputs]
    types = [v.type for v in body.outputs]
    node = graph.add_node("region", operands, {"fusion": "", "kind": "kernel", "body": body}, types=types)
    with pytest.raises(ScheduleError, match="it is batched"):
        check_region(node)
