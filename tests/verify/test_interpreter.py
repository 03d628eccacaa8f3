"""The interpreter against torch itself."""

import pytest
import torch
from hypothesis import given

from fusec.errors import GraphError
from fusec.ir.graph import Graph
from fusec.ir.ops import OPS, Trait
from fusec.ir.parser import parse_graph
from fusec.ir.types import ScalarType, TensorType, evaluate_size
from fusec.reference.dtypes import torch_dtype
from fusec.reference.interpreter import POINTWISE, bind_symbols, evaluate
from fusec.verify.samples import float_inputs
from tests.campaigns.fuzz.graphs import graphs

RMS_NORM = """graph rms_norm(%x: {t}[s0, 64], %w: {t}[64]) {{
  %0: {t}[s0, 64] = pow(%x, 2)
  %1: {t}[s0, 1] = sum(%0) {{dims=(-1,)}}
  %2: {t}[s0, 1] = div(%1, 64)
  %3: {t}[s0, 1] = add(%2, 1e-06)
  %4: {t}[s0, 1] = rsqrt(%3)
  %5: {t}[s0, 64] = mul(%x, %4)
  %6: {t}[s0, 64] = mul(%5, %w)
  return %6
}}"""


@pytest.mark.parametrize(("name", "dtype"), [("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_each_operation_rounds_as_eager_does(name: str, dtype: torch.dtype) -> None:
    x, w = torch.randn(5, 64).to(dtype), torch.randn(64).to(dtype)
    (found,) = evaluate(parse_graph(RMS_NORM.format(t=name)), [x, w])
    assert torch.equal(found, x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 64 + 1e-6) * w)


def test_the_override_computes_in_float64() -> None:
    x, w = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
    (found,) = evaluate(parse_graph(RMS_NORM.format(t="bf16")), [x, w], dtype=torch.float64)
    expected = torch.rms_norm(x.double(), (64,), w.double(), 1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


def test_every_pointwise_operation_has_a_meaning() -> None:
    named = {o.name for o in OPS.values() if o.has(Trait.POINTWISE)}
    assert named == {*POINTWISE, "cast", "bitcast", "constant"}


@given(graphs(size=15))
def test_results_have_the_types_that_the_graph_says(graph: Graph) -> None:
    symbols = {"s0": 5}
    inputs = [
        x.to(torch_dtype(v.dtype)) if isinstance(v.type, TensorType) else x
        for v, x in zip(graph.inputs, float_inputs(graph, symbols, "normal", 0), strict=True)
    ]
    assert bind_symbols(graph, inputs) == (symbols if graph.symbols() else {})
    for value, found in zip(graph.outputs, evaluate(graph, inputs), strict=True):
        assert found.dtype == torch_dtype(value.dtype)
        assert tuple(found.shape) == tuple(evaluate_size(n, symbols) for n in value.shape)


def test_a_constant_keeps_full_precision_through_a_region() -> None:
    graph = parse_graph("""graph g(%x: bf16[4]) {
      %0: bf16[4] = region(%x, 1.001) {fusion="scale", kind="declared"} scale(%x: bf16[4], %c: bf16[]) {
        %0: bf16[4] = mul(%x, %c)
        return %0
      }
      %1: bf16[] = mul(3.0:bf16, 0.1:bf16)
      return %0, %1
    }""")
    x = torch.tensor([100.0, 200.0, 300.0, 7.0]).bfloat16()
    scaled, product = evaluate(graph, [x])
    assert torch.equal(scaled, x * 1.001)
    assert torch.equal(product, torch.tensor(3.0 * torch.tensor(0.1).item()).bfloat16())


def test_a_number_on_the_left() -> None:
    graph = parse_graph("""graph g(%x: bf16[4]) {
      %0: bf16[4] = sub(1.001, %x)
      %1: bf16[4] = div(1.001, %x)
      %2: bf16[4] = maximum(%x, 1.5)
      %3: bool[4] = lt(%x, 2.5)
      %4: bf16[4] = where(%3, 0.0:bf16, -inf:bf16)
      %5: bf16[4] = where(%3, %x, -3.0)
      return %0, %1, %2, %4, %5
    }""")
    x = torch.tensor([1.0, 2.0, 3.0, 0.3]).bfloat16()
    subtracted, divided, greatest, mask, kept = evaluate(graph, [x])
    assert torch.equal(subtracted, (1.001 - x.float()).bfloat16())
    assert torch.equal(divided, (1.001 / x.float()).bfloat16())
    assert torch.equal(greatest, x.clamp(min=1.5))
    assert mask.tolist() == [0, 0, -torch.inf, 0]
    assert torch.equal(kept, torch.where(x < 2.5, x, -3.0))


def test_views_sizes_and_contraction() -> None:
    graph = parse_graph("""graph g(%x: f32[s0, 6], %w: f32[3, 6]) {
      %0: f32[s0, 2, 3] = reshape(%x) {shape=(s0, 2, 3)}
      %1: f32[2, s0, 3] @(3, 6, 1) = permute(%0) {dims=(1, 0, 2)}
      %2: f32[2, s0, 2] @(3, 6, 2) = slice(%1) {dim=-1, start=0, stop=3, step=2}
      %3: f32[2, s0, 5] = concat(%2, %1) {dim=-1}
      %4: f32[s0, 3] = contraction(%x, %w) {spec="az,bz->ab"}
      %5: f32[] = size() {expr=2*s0 + 1, dtype=f32}
      %6: f32[s0, 3] = div(%4, %5)
      %7: i64[s0] = iota() {size=s0, dtype=i64}
      %8: f32[2, s0, 3] = expand(%4) {shape=(2, s0, 3)}
      return %3, %6, %7, %8
    }""")
    x, w = torch.randn(4, 6), torch.randn(3, 6)
    joined, divided, positions, expanded = evaluate(graph, [x, w])
    moved = x.reshape(4, 2, 3).permute(1, 0, 2)
    assert torch.equal(joined, torch.cat([moved[..., ::2], moved], -1))
    torch.testing.assert_close(divided, x @ w.T / 9)
    assert positions.tolist() == [0, 1, 2, 3]
    assert expanded.stride()[0] == 0


def test_reductions_keep_nan_and_bear_empty_rows() -> None:
    graph = parse_graph("""graph g(%x: f32[2, s0]) {
      %0: f32[2, 1] = max(%x) {dims=(-1,)}
      %1: f32[1, 1] = min(%x) {dims=(-2, -1)}
      %2: f32[1, 1] = prod(%x) {dims=(-2, -1)}
      return %0, %1, %2
    }""")
    x = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
    greatest, least, product = evaluate(graph, [x])
    assert greatest[0].isnan() and greatest[1] == 3 and least.isnan() and product.isnan()
    greatest, least, product = evaluate(graph, [torch.empty(2, 0)])
    assert greatest.flatten().tolist() == [-torch.inf] * 2 and least.item() == torch.inf and product.item() == 1


WRITE = """graph g(%cache: f32[4, 2], %new: f32[1, 2], %at: i64[1]) {
  %0: f32[4, 2] = write(%cache, %new, %at) {dim=0}
  return %0
}"""


def test_a_write_changes_its_destination_when_asked() -> None:
    graph = parse_graph(WRITE)
    cache, new, at = torch.zeros(4, 2), torch.ones(1, 2), torch.tensor([2])
    (result,) = evaluate(graph, [cache, new, at])
    assert result[2].tolist() == [1, 1] and cache.sum() == 0
    (result,) = evaluate(graph, [cache, new, at], mutate=True)
    assert cache[2].tolist() == [1, 1] and result.data_ptr() == cache.data_ptr()


def test_an_operation_without_float64_computes_in_the_types_of_the_graph() -> None:
    graph = parse_graph("""graph g(%x: bf16[8, 16], %w: bf16[2, 16, 8], %ends: i32[2]) {
      %0: bf16[8, 8] = opaque(%x, %w, %ends) {target="aten._grouped_mm.default", args=($0, $1, $2)}
      return %0
    }""")
    x, w = torch.randn(8, 16).bfloat16(), torch.randn(2, 16, 8).bfloat16()
    ends = torch.tensor([3, 8], dtype=torch.int32)
    (found,) = evaluate(graph, [x, w, ends], dtype=torch.float64)
    assert found.dtype == torch.float64
    exact = torch.cat([x[:3].double() @ w[0].double(), x[3:].double() @ w[1].double()])
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=1e-2)


def test_opaque_calls_decode_their_arguments() -> None:
    graph = parse_graph("""graph g(%x: bf16[s0, 4], %n: int(s0)) {
      %0: f32[s0, 4] = opaque(%x) {target="aten.softmax.int", args=($0, -1), kwargs=(("dtype", ("torch", "float32")),)}
      %v: f32[s0, 2], %i: i64[s0, 2] = opaque(%0) {target="aten.topk.default", args=($0, 2)}
      %1: f32[s0 + 1, 2] = opaque() {
        target="aten.zeros.default", args=([s0 + 1, 2],), kwargs=(("device", ("device", "cpu")),)}
      %l: other<"tensors"> = opaque(%0) {target="aten.split.Tensor", args=($0, 2, -1)}
      %c: f32[s0, 4] = opaque(%l) {target="aten.cat.default", args=($0, -1)}
      %r: f32[s0, 4] = ordered(%x) {target="aten.rand.default", args=([s0, 4],)}
      return %0, %v, %i, %1, %c, %r
    }""")
    x = torch.randn(3, 4).bfloat16()
    torch.manual_seed(1)
    soft, values, places, zeros, joined, drawn = evaluate(graph, [x, 3])
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3, 4))
    assert torch.equal(soft, torch.softmax(x, -1, dtype=torch.float32)) and torch.equal(joined, soft)
    assert torch.equal(values, soft.topk(2).values) and torch.equal(places, soft.topk(2).indices)
    assert zeros.shape == (4, 2)
    assert evaluate(graph, [x, 3], dtype=torch.float64)[0].dtype == torch.float64


def test_an_unknown_operation_is_named() -> None:
    graph = parse_graph('graph g() {\n %0: f32[] = opaque() {target="aten.no_such_op.default"}\n return %0 }')
    with pytest.raises(GraphError, match="no_such_op"):
        evaluate(graph, [])


def test_symbols_are_bound_by_shapes_numbers_and_expressions() -> None:
    graph = parse_graph("graph g(%x: f32[2*s0 + 1, s1], %n: int(s2), %m: int(s1*s3)) {\n return %x }")
    assert bind_symbols(graph, [torch.empty(7, 5), 9, 20]) == {"s0": 3, "s1": 5, "s2": 9, "s3": 4}
    assert isinstance(graph.inputs[1].type, ScalarType)
    with pytest.raises(GraphError, match="has shape"):
        bind_symbols(parse_graph("graph g(%x: f32[4]) {\n return %x }"), [torch.empty(5)])
    clash = parse_graph("graph g(%x: f32[s0], %y: f32[s0]) {\n return %x }")
    with pytest.raises(GraphError, match="s0 is 2 and 3"):
        bind_symbols(clash, [torch.empty(2), torch.empty(3)])
    with pytest.raises(GraphError, match="is unknown"):
        evaluate_size(graph.inputs[0].shape[0], {})


def test_the_sign_of_nan_is_that_of_torch() -> None:
    graph = parse_graph("""graph g(%x: f32[4]) {
      %r: f32[4] = sign(%x)
      return %r
    }""")
    x = torch.tensor([torch.nan, -torch.inf, -0.0, 3.0])
    assert torch.equal(evaluate(graph, [x])[0], x.sign())


@pytest.mark.parametrize("op", ["cast(%x) {dtype=i64}", "floor(%x)", "sum(%x) {dims=()}"])
def test_a_write_does_not_change_what_was_computed_before(op: str) -> None:
    graph = parse_graph(f"""graph g(%x: i64[2]) {{
      %old: i64[2] = {op}
      %more: i64[2] = add(%x, 1)
      %new: i64[2] = write(%x, %more)
      return %old, %new
    }}""")
    old, new = evaluate(graph, [torch.tensor([3, 4])], mutate=True)
    assert old.tolist() == [3, 4] and new.tolist() == [4, 5]
