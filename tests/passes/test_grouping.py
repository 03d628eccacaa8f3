"""Grouping: which nodes are fused into one kernel, which are not, and the reasons in remarks."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from torch import Tensor
from torch.nn import functional as F

from fusec.analysis.machine import CHIPS, Machine, assumed_cpu
from fusec.config import Config
from fusec.dynamo import backend_for
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import OPS, Trait
from fusec.ir.types import BF16, BOOL, F32, F64, I64, Size, TensorType, contiguous_strides
from fusec.ir.verifier import verify_graph
from fusec.loops.plan import Plan, plan_kernel
from fusec.passes.fold_bias import FoldBiasIntoGemm
from fusec.passes.grouping import Group
from fusec.refusal import Refusal
from fusec.remarks import Remark
from tests.campaigns.fuzz.graphs import graphs
from tests.contexts import context_of
from tests.machines import cpu, profile


class Model(Graph):
    """A graph that is quick to write."""

    def tensor(self, *shape: Size) -> Value:
        return self.add_input(TensorType(F32, shape, contiguous_strides(shape)))

    def do(self, op: str, *operands: Value, **attributes: Any) -> Value:
        return self.add_node(op, operands, attributes).result

    def call(self, value: Value) -> Value:
        attributes = {"target": "aten.cumsum.default", "args": (("%", 0), -1), "operand_types": (value.type,)}
        return self.add_node("opaque", [value], attributes, types=[value.type]).result

    def norm(self, x: Value) -> Value:
        total = self.do("sum", self.do("mul", x, x), dims=(-1,))
        return self.do("mul", x, self.do("rsqrt", total))

    def group(
        self,
        *outputs: Value,
        machine: Machine | None = None,
        unschedulable: Callable[[Plan], Refusal | None] = lambda plan: None,
    ) -> list[Node]:
        self.set_outputs(outputs)
        self.context = replace(context_of(machine=machine), unschedulable=unschedulable)
        Group().apply(self, self.context)
        verify_graph(self)
        return [n for n in self.nodes if n.has(Trait.REGION)]

    def reasons(self) -> str:
        return "; ".join(r.reason for r in self.context.remarks.of("missed"))


def test_residual_and_norm_are_one_kernel_with_two_results() -> None:
    m = Model()
    h = m.do("add", m.tensor(40, 64), m.tensor(40, 64))
    (region,) = m.group(m.norm(h), h)
    assert len(region.results) == 2


def test_norm_matmuls_and_gate_of_few_rows_are_one_kernel() -> None:
    m = Model()
    x, gate, up = m.tensor(2, 64), m.tensor(128, 64), m.tensor(128, 64)
    normed = m.norm(x)
    g, u = (m.do("contraction", normed, w, spec="az,bz->ab") for w in (gate, up))
    (region,) = m.group(m.do("mul", m.do("sigmoid", g), u))
    assert sum(n.is_op("contraction") for n in region.body.nodes) == 2


def test_a_group_without_a_schedule_is_split_until_it_has_one() -> None:
    m = Model()
    normed = m.norm(m.tensor(2, 64))
    product = m.do("contraction", normed, m.tensor(64, 64), spec="az,bz->ab")

    def unschedulable(plan: Plan) -> Refusal | None:
        names = {n.op.name for n in plan.body.nodes}
        return Refusal("a planted refusal") if {"sum", "contraction"} <= names or len(names) > 3 else None

    regions = m.group(m.do("add", product, normed), unschedulable=unschedulable)
    plans = [plan_kernel(region.body, m.context.limits) for region in regions]
    assert not any(map(unschedulable, plans)) and len(regions) == len(m.nodes)
    assert {n.op.name for r in regions for n in r.body.nodes} >= {"sum", "mul", "rsqrt", "contraction", "add"}
    assert "its kernel has no schedule: a planted refusal" in m.reasons()


@pytest.mark.parametrize(("shape", "spec"), [((100, 64), "az,bz->ab"), ((4, 25, 64), "abz,cz->abc")])
def test_a_large_matmul_and_its_bias_are_one_vendor_call_where_that_is_faster(
    shape: tuple[int, ...], spec: str
) -> None:
    m = Model()
    product = m.do("contraction", m.tensor(*shape), m.tensor(32, 64), spec=spec)
    (region,) = m.group(m.do("add", product, m.tensor(32)), machine=cpu())
    FoldBiasIntoGemm().apply(m, m.context)
    verify_graph(m)
    assert m.nodes == [region] and region.attributes["kind"] == "vendor"
    assert [n.op.name for n in region.body] == ["contraction", "add"]


def test_a_bias_stays_a_kernel_where_the_matmul_has_another_use() -> None:
    m = Model()
    product = m.do("contraction", m.tensor(100, 64), m.tensor(32, 64), spec="az,bz->ab")
    (region,) = m.group(m.do("add", product, m.tensor(32)), product, machine=cpu())
    FoldBiasIntoGemm().apply(m, m.context)
    assert region.attributes["kind"] == "kernel" and len(m) == 2


def test_a_table_is_not_recomputed_for_each_head() -> None:
    m = Model()
    angles = m.tensor(1, 1, 100, 64)
    regions = m.group(m.do("mul", m.tensor(2, 8, 100, 64), m.do("cos", angles)))
    assert len(regions) == 2
    assert "would be computed 16 times" in m.reasons()


@pytest.mark.parametrize("length", [2, 100])
def test_the_order_of_factors_does_not_matter(length: int) -> None:
    """A table that two kernels read has its own kernel, whether it is their first operand or their second."""
    found = []
    for order in (1, -1):
        m = Model()
        table, weight = m.do("cos", m.tensor(length, 64)), m.tensor(64, 64)
        factors = [(m.tensor(heads, length, 64), table)[::order] for heads in (2, 3)]
        readers = [m.do("contraction", m.do("mul", *pair), weight, spec="abz,zc->abc") for pair in factors]
        found.append([(r.attributes["label"], len(r.results)) for r in m.group(*map(m.call, readers))])
    assert found[0] == found[1]
    assert ("cos", 1) in found[0]


def test_a_mask_is_stored_as_booleans_and_selected_where_it_is_read() -> None:
    """A mask that several kernels add is one byte an element in memory; what an opaque call reads is stored."""
    m = Model()
    seen = m.do("and", *(m.do("gt", m.tensor(40, 40), m.tensor(40, 40)) for _ in range(2)))
    numbers = (m.do("constant", value=value, dtype=F32, device="cpu") for value in (0.0, -math.inf))
    bias = m.do("where", seen, *numbers)
    sums = [m.do("sum", m.do("add", m.tensor(heads, 40, 40), bias), dims=(-1,)) for heads in (2, 3)]
    regions = m.group(*sums)
    assert sorted(sum(n.is_op("where") for n in r.body) for r in regions)[-2:] == [1, 1]
    assert [v.dtype for r in regions for v in r.results if v.shape == (40, 40)] == [BOOL]

    m = Model()
    seen = m.do("gt", m.tensor(40, 40), m.tensor(40, 40))
    numbers = (m.do("constant", value=value, dtype=F32, device="cpu") for value in (0.0, -math.inf))
    (mask,) = m.group(m.call(m.do("where", seen, *numbers)))
    assert mask.result.dtype == F32


def rotated(heads: int, length: int) -> tuple[Model, Value]:
    """Return heads times the cosine of angles that they share."""
    m = Model()
    table = m.do("cos", m.tensor(1, length, 64))
    return m, m.do("mul", m.tensor(heads, length, 64), table)


def test_a_fusion_that_would_lose_time_is_reported_with_the_loss() -> None:
    m, out = rotated(heads=16, length=100)
    assert len(m.group(out)) == 2
    cpu, table, rest = assumed_cpu(), 100 * 64 * 4, 2 * 16 * 100 * 64 * 4
    cos, near = OPS["cos"].cost * 100 * 64 / cpu.peaks["vector f32"], cpu.cache_gb_s
    separate = max(2 * table / near, cos) + (table + rest) / near + 1e3 * cpu.launch_us
    together = max((table + rest) / near, 16 * cos + 16 * 100 * 64 / cpu.peaks["vector f32"])
    assert f"{(together - separate) / 1e3:.3g} µs slower in all, for {2 * table} bytes less" in m.reasons()


@pytest.mark.parametrize("dim", [-3, -2, -1])
def test_a_softmax_is_one_kernel_along_whichever_dim(dim: int) -> None:
    """Its rows are the outer loops, whichever dims of its result they are."""
    m = Model()
    x = m.tensor(400, 300, 200)
    e = m.do("exp", m.do("sub", x, m.do("max", x, dims=(dim,))))
    assert len(m.group(m.do("div", e, m.do("sum", e, dims=(dim,))))) == 1


def test_a_value_that_is_cheaper_to_recompute_than_to_launch_is_recomputed() -> None:
    """Computing the cosines of two rows sixteen times takes less time than a launch."""
    m, out = rotated(heads=16, length=2)
    assert len(m.group(out)) == 1


def test_fusion_depends_on_the_machine() -> None:
    m, out = rotated(heads=16, length=100)
    assert len(m.group(out, machine=CHIPS["a100"])) == 1  # arithmetic that hides behind the memory is free
    slow = replace(assumed_cpu(), peaks={"vector f32": 0.1, "matrix f32": 0.1})
    m, out = rotated(heads=16, length=2)
    assert len(m.group(out, machine=slow)) == 2


def test_a_remark_says_what_a_kernel_saves() -> None:
    m = Model()
    h = m.do("exp", m.tensor(400, 640))
    m.group(m.do("neg", h))
    (remark,) = m.context.remarks.of("passed")
    cpu, moved, numel = assumed_cpu(), 2 * 400 * 640 * 4, 400 * 640
    one, other = OPS["exp"].cost * numel / cpu.peaks["vector f32"], numel / cpu.peaks["vector f32"]
    near = moved / cpu.cache_gb_s
    saved = max(near, one) + max(near, other) - max(near, one + other) + 1e3 * cpu.launch_us
    assert remark.figures == {"bytes_saved": str(moved), "gain_us": round(saved / 1e3, 3)}


def test_a_kernel_of_one_operation_has_no_remark() -> None:
    m = Model()
    assert len(m.group(m.do("exp", m.tensor(400, 640)))) == 1
    assert not m.context.remarks.of("passed")


def test_rows_that_several_kernels_read_are_looked_up_by_each() -> None:
    m = Model()
    table = m.tensor(100, 64)
    places = m.add_input(TensorType(I64, (40,), (1,)))
    row = m.do("take", table, places, dim=-2)
    both = m.do("concat", row, m.tensor(40, 64), dim=-1)
    x, y = m.do("mul", m.tensor(8, 40, 128), both), m.do("mul", m.call(m.tensor(5, 40, 128)), both)
    regions = m.group(x, y)
    assert len(regions) == 2 and all(sum(n.is_op("take") for n in r.body.nodes) == 1 for r in regions)


def test_a_row_with_a_reader_in_aten_is_looked_up_once() -> None:
    m = Model()
    row = m.do("take", m.tensor(100, 64), m.add_input(TensorType(I64, (40,), (1,))), dim=-2)
    x, y = m.do("mul", m.tensor(8, 40, 64), row), m.do("mul", m.call(m.tensor(5, 40, 64)), row)
    regions = m.group(x, y, m.call(row))
    assert sum(n.is_op("take") for r in regions for n in r.body.nodes) == 1


def test_a_row_is_looked_up_before_its_table_is_written() -> None:
    m = Model()
    table, places = m.tensor(100, 64), m.add_input(TensorType(I64, (40,), (1,)))
    row = m.do("take", table, places, dim=-2)
    written = m.do("write", table, m.do("neg", m.tensor(100, 64)))
    late = m.do("mul", m.call(m.do("slice", written, dim=-2, start=0, stop=40, step=1)), row)
    m.group(m.do("mul", m.tensor(8, 40, 64), row), late)
    lookups = [n for n in m.nodes if n.has(Trait.REGION) and any(i.is_op("take") for i in n.body.nodes)]
    write = next(n for n in m.nodes if n.written)
    assert len(lookups) == 1 and m.nodes.index(lookups[0]) < m.nodes.index(write)


def test_a_value_that_only_the_next_kernel_reads_is_sunk_into_it() -> None:
    m = Model()
    h = m.do("add", m.do("sum", m.tensor(40, 2, 64), dims=(-2,)), m.tensor(40, 1, 64))
    norm = m.norm(h)
    first, second = m.group(norm, h)
    assert [n.op.name for n in first.body.nodes] == ["sum", "add"] and len(first.results) == 1
    assert norm not in first.results and sum(n.is_op("mul") for n in second.body.nodes) == 2


def test_a_value_with_one_remaining_reader_is_fused_with_it() -> None:
    """A factor of the rows, once no kernel before the norm reads it."""
    m = Model()
    u = m.do("exp", m.tensor(1, 1, 64))
    h = m.do("add", m.do("sum", m.tensor(40, 2, 64), dims=(-2,)), m.tensor(40, 1, 64))
    first, second = m.group(m.do("mul", m.norm(m.do("mul", h, u)), u), h)
    assert [n.op.name for n in first.body.nodes] == ["sum", "add"]
    assert any(n.is_op("exp") for n in second.body.nodes)


def test_decisions_are_the_same_every_time() -> None:
    def grouped() -> tuple[str, list[Remark]]:
        m, out = rotated(heads=16, length=100)
        m.group(m.norm(out))
        return str(m), list(m.context.remarks)

    assert grouped() == grouped()


def test_no_kernel_depends_on_itself() -> None:
    m = Model()
    h = m.do("exp", m.tensor(8, 64))
    regions = m.group(m.do("add", m.call(h), h))
    assert len(regions) == 2
    assert "another kernel reads the one and is read by the other" in m.reasons()


def test_no_kernel_depends_on_itself_through_a_group_that_extends_past_it() -> None:
    """The matmul and ``b`` would be fused across a group, a node of which follows both."""
    m = Model()
    product = m.do("contraction", m.tensor(2, 64), m.tensor(64, 64), spec="az,bz->ab")
    early = m.do("exp", m.tensor(2, 64))
    b = m.do("add", product, m.call(early))
    late = m.do("add", m.call(product), early)
    m.group(b, late)
    assert "another kernel reads the one and is read by the other" in m.reasons()


def test_no_kernel_writes_twice_to_the_same_memory() -> None:
    m = Model()
    key = m.do("exp", m.tensor(8, 64))
    first = m.do("write", m.tensor(8, 64), key)
    m.group(m.do("add", key, m.do("write", first, m.tensor(8, 64))))
    assert "a kernel writes twice to the same memory" in m.reasons()


def test_stores_of_each_layer_at_shared_rows_are_one_kernel() -> None:
    """What the second layer stores depends on the first; its keys and values join each other."""
    m = Model()
    x, rows = m.tensor(3, 64), m.add_input(TensorType(I64, (3,), (1,)))
    for _ in range(2):
        key, value = m.do("exp", x), m.do("sin", x)
        for new in (key, value):
            written = m.do("write", m.tensor(90, 64), new, rows, dim=-2)
        x = m.call(m.do("take", written, rows, dim=-2))
    stores = [region for region in m.group(x) if region.writes]
    assert [len(region.results) for region in stores] == [2, 2]


def test_a_read_of_a_row_of_a_cache_stays_before_its_write() -> None:
    m = Model()
    cache, new = m.tensor(8, 64), m.tensor(1, 64)
    row = m.do("slice", cache, dim=-2, start=0, stop=1, step=1)
    before = m.do("exp", row)
    written = m.do("write", m.do("slice", cache, dim=-2, start=0, stop=1, step=1), m.do("neg", new))
    m.group(m.do("add", before, m.do("sin", written)))
    assert "another kernel reads the one and is read by the other" in m.reasons()


def test_a_cast_of_an_overwritten_value_runs_before_the_write() -> None:
    """A cast to a wider type costs nothing in the kernel that reads it, but that kernel depends on the write."""
    m = Model()
    cache = m.tensor(8, 64)
    wide = m.do("cast", cache, dtype=F64)
    written = m.do("write", cache, m.do("neg", m.tensor(8, 64)))
    m.group(m.do("add", wide, m.do("cast", m.call(written), dtype=F64)))


def test_a_reader_of_a_cast_of_the_old_value_runs_before_the_write() -> None:
    """The reader stands behind the write in the graph, and the last kernel needs both writes."""
    m = Model()
    number, new = m.tensor(3, 3), m.tensor(3, 3)
    wide = m.do("cast", number, dtype=F64)
    first = m.do("write", number, new)
    old = m.do("add", wide, wide)
    second = m.do("write", first, new)
    m.group(m.do("add", second, second), old)


@given(graphs(30, symbolic=False))
def test_grouping_keeps_a_graph_whole(graph: Graph) -> None:
    Group().apply(graph, context_of())
    verify_graph(graph)


def test_a_read_of_a_cache_stays_before_its_write() -> None:
    m = Model()
    cache, new = m.tensor(8, 64), m.tensor(8, 64)
    before = m.do("sum", cache, dims=(-2,))
    written = m.do("write", cache, m.do("neg", new))
    regions = m.group(m.do("add", before, m.do("sin", written)))
    order = m.nodes
    write = next(r for r in regions if cache in r.written)
    reader = next(r for r in regions if cache in r.operands and cache not in r.written)
    assert order.index(reader) < order.index(write)


def test_a_view_without_a_loop_nest_is_an_alias_of_a_copy() -> None:
    """Leaving out the first element of a transposed matrix is no loop over rows and columns."""
    m = Model()
    flat = m.do("reshape", m.do("permute", m.tensor(4, 3), dims=(1, 0)), shape=(12,))
    (region,) = m.group(m.do("slice", flat, dim=-1, start=1, stop=12, step=1))
    assert region.result.shape == (12,)
    assert m.outputs[0].producer is not None and m.outputs[0].producer.is_op("slice")


def test_a_returned_view_does_not_separate_kernels() -> None:
    m = Model()
    rows = m.do("reshape", m.do("exp", m.tensor(32, 64)), shape=(4, 8, 64))
    (region,) = m.group(rows, m.norm(rows))
    assert len(region.results) == 2


def test_shifted_windows_are_no_opaque_calls() -> None:
    m = Model()
    windows = m.do("reshape", m.call(m.tensor(8, 16, 32)), shape=(2, 2, 2, 4, 4, 32))
    image = m.do("reshape", m.do("permute", windows, dims=(0, 1, 3, 2, 4, 5)), shape=(2, 8, 8, 32))
    low, high = (m.do("slice", image, dim=-3, start=a, stop=b, step=1) for a, b in ((0, 6), (6, 8)))
    m.group(m.do("add", m.do("concat", high, low, dim=-3), m.tensor(2, 8, 8, 32)))
    assert not any(n.is_op("concat") for n in m.nodes)


def test_views_before_an_opaque_call_cost_nothing() -> None:
    m = Model()
    x = m.do("exp", m.tensor(2, 8, 64))
    heads = m.do("permute", m.do("reshape", x, shape=(2, 8, 4, 16)), dims=(0, 2, 1, 3))
    assert len(m.group(m.call(heads))) == 1


@pytest.mark.parametrize("op, attributes", [
    ("slice", {"dim": -2, "start": 2, "stop": 5, "step": 1}), ("reshape", {"shape": (4, 4, 8, 16)}),
    ("permute", {"dims": (1, 0, 2)}),
])  # fmt: skip
def test_a_view_of_a_copy_is_an_alias(op: str, attributes: dict[str, Any]) -> None:
    m = Model()
    heads = m.do("permute", m.do("exp", m.tensor(4, 8, 4, 16)), dims=(0, 2, 1, 3))
    copied = m.do("reshape", heads, shape=(4, 32, 16))
    regions = m.group(m.call(copied), m.call(m.do(op, copied, **attributes)))
    assert [len(region.results) for region in regions] == [1]


def test_only_a_softmax_between_matmuls_makes_an_attention() -> None:
    for missing in ("max", "exp"):
        model = Model()
        q, k, v = model.tensor(2, 18, 8), model.tensor(2, 19, 8), model.tensor(2, 19, 10)
        scores = model.do("contraction", q, k, spec="abz,acz->abc")
        shifted = scores if missing == "max" else model.do("sub", scores, model.do("max", scores, dims=(-1,)))
        weights = model.do("tanh" if missing == "exp" else "exp", shifted)
        model.group(model.do("contraction", weights, v, spec="abz,azc->abc"))
        assert not any(r.subject == "attention" for r in model.context.remarks), missing


SEQUENCE = 64 * sympy.Symbol("s0", integer=True, positive=True)
GPU = {"default": 0, "reduce-overhead": 0, "max-autotune": 1, "max-autotune-no-cudagraphs": 1, "autotune": 1}


def on_gpu(mode: str, rows: Size, depth: int, op: str = "") -> tuple[list[Node], list[Remark]]:
    """Return the kernels of a large-M matmul and its epilogue on a GPU, and the remarks about the matmul."""
    m = Model()
    shapes = (rows, depth), (1024, depth)
    x, w = (m.add_input(TensorType(BF16, shape, contiguous_strides(shape))) for shape in shapes)
    out = m.do("contraction", x, w, spec="az,bz->ab")
    bias = m.add_input(TensorType(BF16, (1024,), (1,)))
    m.set_outputs([m.do(op, out, bias) if op == "add" else m.do(op, out) if op else out])
    config = Config(autotune=True) if mode == "autotune" else Config(mode=mode)
    context = context_of("triton", config, CHIPS["a100"])
    Group().apply(m, context)
    verify_graph(m)
    found = [n for n in m.nodes if n.has(Trait.REGION) and any(i.has(Trait.CONTRACTION) for i in n.body.nodes)]
    return found, [r for r in context.remarks.of("analysis") if r.subject == "contraction"]


@pytest.mark.parametrize("mode", GPU)
def test_a_mode_or_its_option_enables_large_m_gemms_on_a_gpu(mode: str) -> None:
    """Where they are predicted to save time, as with an epilogue."""
    found, remarks = on_gpu(mode, 64, 1024, "sigmoid")
    assert len(found) == GPU[mode] and not remarks


@pytest.mark.parametrize(
    ("rows", "depth", "op", "why"),
    [
        (64, 1024, "", "a vendor call computes as much"),
        (64, 1024, "add", "a vendor call computes as much"),  # it adds a bias
        (4096, 4096, "sigmoid", ""),
        (SEQUENCE, 4096, "sigmoid", "of the vendor's speed"),  # never timed, as its size is symbolic
        (SEQUENCE, 256, "sigmoid", ""),
    ],
)
def test_matmuls_that_save_nothing_on_a_gpu_are_vendor_calls_with_a_remark(
    rows: Size, depth: int, op: str, why: str
) -> None:
    """Kernels that will be timed are predicted at the vendor's speed, others at an assumed share of it."""
    found, remarks = on_gpu("max-autotune", rows, depth, op)
    assert len(found) == (0 if why else 1)
    assert [why in r.reason for r in remarks] == ([True] if why else [])


@pytest.mark.parametrize(("length", "kernels"), [(2000, 1), (1 << 16, 2)])
def test_overwriting_a_number_leaves_no_long_loop_to_one_thread(length: int, kernels: int) -> None:
    m = Model()
    x, place = m.tensor(length), m.tensor()
    written = m.do("write", place, m.do("neg", place))
    regions = m.group(m.do("mul", x, written))
    assert len(regions) == kernels


def packed_weight(x: Tensor, q: Tensor) -> Tensor:
    weight = torch.stack([q & 15, q >> 4], -1).reshape(64, 128).to(x.dtype) - 8
    q.add_(1)
    return F.linear(x + q.float().mean().to(x.dtype), weight)


def scores(x: Tensor, q: Tensor) -> Tensor:
    weights = torch.softmax(x[None] @ q[None].to(x.dtype).repeat(1, 1, 2).mT, -1)
    q.add_(1)
    return weights @ (x[None, :1] + q[None].to(x.dtype).repeat(1, 1, 2))


@pytest.mark.parametrize("model", [packed_weight, scores])
def test_a_write_between_two_nodes_keeps_them_in_two_kernels(model: Callable[..., Tensor]) -> None:
    """What is read before the write is needed after it: one kernel would have to run both before and after."""
    torch.manual_seed(0)
    x, q = torch.randn(20, 128).bfloat16(), torch.randint(0, 200, (64, 64), dtype=torch.uint8)
    ours, changed = q.clone(), q.clone()
    torch._dynamo.reset()
    found = torch.compile(model, backend=backend_for(profile(f32=100.0, bf16=1.0)))(x, ours)
    torch.testing.assert_close(found, model(x, changed), atol=0.05, rtol=0.05)
    assert torch.equal(ours, changed)
