"""Programs against the interpreter: kernels, vendor calls, views, writes, layouts, aliasing, and what falls back."""

import gc
import itertools
import random
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fusec.analysis.machine import Machine
from fusec.codegen import target_named
from fusec.codegen.program import kernels
from fusec.codegen.program.program import Program, build_program
from fusec.codegen.tile.kernel import Kernel
from fusec.config import Config
from fusec.errors import BuildError, FusecError, ScheduleError
from fusec.ir.graph import Graph, Value
from fusec.ir.types import BF16, F32, I64, DType, ScalarType, TensorType, contiguous_strides, evaluate_size, symbol
from fusec.loops.plan import Plan
from fusec.passes.grouping import Group
from fusec.pipeline import Context
from fusec.reference.contract import compare_outputs
from fusec.reference.dtypes import torch_dtype
from fusec.reference.interpreter import evaluate
from fusec.verify.samples import float_inputs
from tests.campaigns.fuzz.graphs import random_graph
from tests.contexts import context_of
from tests.machines import cpu

S = symbol("s0")


class NoKernels:
    """A target that covers nothing."""

    name, shares_code = "cpp", False

    def schedule(self, plan: Plan, name: str = "kernel", machine: Machine | None = None) -> Kernel:
        raise ScheduleError("this target has no schedules")

    def print(self, kernel: Kernel) -> str:
        return ""

    def build(self, kernels: Sequence[Kernel], config: Config) -> list[Any]:
        return []


def compiled(
    graph: Graph, target: Any = None, machine: Machine | None = None, **options: Any
) -> tuple[Program, Context]:
    context = context_of(config=Config.from_options(options=options), machine=machine)
    graph.erase_dead()
    Group().apply(graph, context)
    return build_program(graph, target or target_named("cpp"), context), context


def tensor(graph: Graph, *shape: Any, dtype: DType = F32, strides: tuple[Any, ...] | None = None) -> Value:
    return graph.add_input(TensorType(dtype, shape, strides or contiguous_strides(shape)))


def kinds(program: Program) -> list[str]:
    return [step.kind for step in program.steps]


def test_kernels_vendor_calls_and_views_together() -> None:
    graph = Graph("mlp")
    x, w, bias = tensor(graph, S, 40, 32), tensor(graph, 64, 32), tensor(graph, 64)
    h = graph.add_node("contraction", [x, w], {"spec": "abz,cz->abc"}).result
    h = graph.add_node("tanh", [graph.add_node("add", [h, bias]).result]).result
    graph.set_outputs([graph.add_node("reshape", [h], {"shape": (S * 40, 64)}).result])
    program, context = compiled(graph, machine=cpu())
    assert kinds(program) == ["vendor", "kernel"]
    assert context.remarks.of("failure") == []
    (name,) = program.kernels
    assert f"int64_t {name}(" in program.texts[name]
    for s in (1, 3):
        values = [torch.randn(s, 40, 32), torch.randn(64, 32), torch.randn(64)]
        args = list(values)
        (found,) = program(args)
        assert args == []
        expected = torch.tanh(torch.nn.functional.linear(*values)).reshape(s * 40, 64)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "a", "b"),
    [
        ("az,zb->ab", (20, 30), (30, 40)), ("za,zb->ab", (30, 20), (30, 40)), ("az,bz->ba", (20, 30), (40, 30)),
        ("abz,zc->abc", (2, 20, 30), (30, 40)), ("abz,abzc->abc", (2, 20, 30), (2, 20, 30, 40)),
        ("abcz,abdz->abcd", (2, 3, 20, 8), (2, 3, 24, 8)), ("abzc,abdz->abcd", (2, 3, 20, 18), (2, 3, 24, 20)),
        ("acbz,adbz->abcd", (2, 20, 3, 8), (2, 24, 3, 8)), ("abz,cdz->abcd", (4, 5, 20), (3, 7, 20)),
        ("azy,zyb->ab", (20, 6, 5), (6, 5, 17)), ("ayz,zyb->ab", (20, 6, 5), (5, 6, 17)),
        ("ab,ab->ab", (20, 4), (20, 4)), ("az,b->ab", (20, 6), (7,)), ("abz,bcz->acb", (20, 3, 6), (3, 18, 6)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_contractions_of_every_form(spec: str, a: tuple[int, ...], b: tuple[int, ...], dtype: DType) -> None:
    graph = Graph()
    left, right = tensor(graph, *a, dtype=dtype), tensor(graph, *b, dtype=dtype)
    graph.set_outputs([graph.add_node("contraction", [left, right], {"spec": spec}).result])
    program = build_program(graph, NoKernels(), Context())
    assert kinds(program)[-1] == "vendor"
    x, y = torch.randn(a).to(torch_dtype(dtype)), torch.randn(b).to(torch_dtype(dtype))
    (found,) = program([x, y])
    expected = torch.einsum(spec, x.double(), y.double())
    assert found.is_contiguous()
    tolerance = 1e-5 if dtype == F32 else 2e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * 20)


@pytest.mark.parametrize(
    ("spec", "a", "b"), [("zab,zab->ab", (3, 3, 0), (3, 3, 0)), ("abz,wzy->bayw", (3, 0, 4), (3, 4, 5))]
)
def test_a_contraction_without_results_is_no_call(spec: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    graph = Graph()
    graph.set_outputs([graph.add_node("contraction", [tensor(graph, *a), tensor(graph, *b)], {"spec": spec}).result])
    (found,) = build_program(graph, NoKernels(), Context())([torch.randn(a), torch.randn(b)])
    assert found.shape == torch.einsum(spec, torch.randn(a), torch.randn(b)).shape


@pytest.mark.parametrize(
    ("spec", "a", "b"), [("az,zb->ab", (20, 30), (30, 40)), ("abz,azc->abc", (4, 20, 30), (4, 30, 40))]
)
def test_matrices_that_lie_whole_are_handed_over_as_they_are(spec: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    graph = Graph()
    graph.set_outputs([graph.add_node("contraction", [tensor(graph, *a), tensor(graph, *b)], {"spec": spec}).result])
    program = build_program(graph, NoKernels(), Context())
    assert "(t_0, t_1, out=t_2)" in program.source and "as_strided" not in program.source


@pytest.mark.parametrize(("spec", "shape"), [("zya,zya->a", (64, 64, 1)), ("zya,zya->", (64, 64, 1))])
def test_a_product_of_one_row_is_as_exact_as_eager(spec: str, shape: tuple[int, ...]) -> None:
    graph = Graph()
    graph.set_outputs([graph.add_node("contraction", [tensor(graph, *shape)] * 2, {"spec": spec}).result])
    program = build_program(graph, NoKernels(), Context())
    torch.manual_seed(0)
    draws = [torch.randn(shape) for _ in range(8)]
    eager = [torch.einsum(spec, x, x).squeeze() for x in draws]
    exact = [torch.einsum(spec, x.double(), x.double()).squeeze() for x in draws]
    compiled = [program([x])[0].squeeze() for x in draws]
    assert compare_outputs(torch.stack(eager), torch.stack(compiled), torch.stack(exact)).passed


def test_outputs_have_the_promised_strides() -> None:
    graph = Graph()
    x = tensor(graph, 4, 6)
    y = graph.add_node("exp", [x]).result
    turned = graph.add_node("permute", [y], {"dims": (1, 0)}).result
    graph.set_outputs([y, turned], [TensorType(F32, (4, 6), (1, 4)), TensorType(F32, (6, 4), (4, 1))])
    program, _ = compiled(graph)
    data = torch.randn(4, 6)
    first, second = program([data])
    assert first.stride() == (1, 4) and second.stride() == (4, 1)
    torch.testing.assert_close(first, data.exp())
    torch.testing.assert_close(second, data.exp().t())


def test_an_input_with_other_strides_is_copied() -> None:
    graph = Graph()
    graph.set_outputs([graph.add_node("exp", [tensor(graph, 4, 6)]).result])
    program, _ = compiled(graph)
    data = torch.randn(6, 4).t()
    torch.testing.assert_close(program([data])[0], data.exp())


def test_strides_of_dims_of_length_1_make_no_difference() -> None:
    graph = Graph()
    cache, x = tensor(graph, 1, 6), tensor(graph, S, 6)
    graph.add_node("write", [cache, graph.add_node("exp", [cache]).result])
    graph.set_outputs([graph.add_node("neg", [x]).result])
    program, _ = compiled(graph)
    data, row = torch.randn(7, 6)[:1], torch.randn(6)
    expected = data.exp()
    torch.testing.assert_close(
        program([data.as_strided((1, 6), (99, 1)), row.as_strided((1, 6), (0, 1))])[0], -row[None]
    )
    torch.testing.assert_close(data, expected)
    with pytest.raises(FusecError, match="is written to has strides"):
        program([torch.randn(1, 12)[:, ::2], row[None]])


def test_a_region_that_writes_runs_without_a_kernel_too() -> None:
    graph = Graph("counter")
    count, x = tensor(graph, dtype=I64), tensor(graph, 4)
    same = graph.add_node("cast", [count], {"dtype": I64}).result
    more = graph.add_node("add", [same, graph.constant(1, I64)]).result
    graph.add_node("write", [count, more])
    graph.set_outputs([same, more, graph.add_node("exp", [x]).result])
    for target in (NoKernels(), None):
        program, _ = compiled(graph.copy(), target)
        assert {"interpreted" if target else "kernel"} == set(kinds(program))
        number, version = torch.tensor(7), 0
        for step in range(3):
            old, new, _ = program([number, torch.zeros(4)])
            assert (int(old), int(new), int(number)) == (7 + step, 8 + step, 8 + step)
            assert number._version > version, "autograd would not see the change"
            version = number._version
            new.zero_()


@pytest.mark.parametrize(("function", "steps"), [("exp", ["kernel", "kernel"]), (None, ["write", "kernel"])])
def test_writes_change_the_input_and_copies_do_not_miss_them(function: str | None, steps: list[str]) -> None:
    graph = Graph("cache")
    cache, rows, index = tensor(graph, 1, 8, 4), tensor(graph, 1, 2, 4), tensor(graph, 2, dtype=I64)
    new = graph.add_node(function, [rows]).result if function else rows
    written = graph.add_node("write", [cache, new, index], {"dim": -2}).result
    graph.set_outputs([graph.add_node("add", [written, written]).result])
    program, _ = compiled(graph)
    assert kinds(program) == steps
    data, update, at = torch.zeros(1, 8, 4), torch.randn(1, 2, 4), torch.tensor([3, 5])
    pointer = data.data_ptr()
    (found,) = program([data, update, at])
    assert data.data_ptr() == pointer
    torch.testing.assert_close(data[:, [3, 5]], update.exp() if function else update)
    torch.testing.assert_close(found, data + data)


def test_what_a_kernel_reads_first_is_not_taken_for_what_it_writes() -> None:
    graph = Graph()
    x, cache = tensor(graph, 4, 6), tensor(graph, 4, 6)
    written = graph.add_node("write", [cache, graph.add_node("exp", [x]).result]).result
    graph.add_node("write", [written, graph.add_node("sin", [written]).result])
    graph.set_outputs([x])
    program, _ = compiled(graph)
    given, data = torch.randn(4, 6), torch.zeros(4, 6)
    expected = given.exp().sin()
    (found,) = program([given, data])
    assert found.data_ptr() != given.data_ptr()
    torch.testing.assert_close(data, expected)


def test_outputs_never_share_memory_with_inputs_constants_or_each_other() -> None:
    graph = Graph()
    x = tensor(graph, 4, 6)
    flat = graph.add_node("reshape", [x], {"shape": (24,)}).result
    number = graph.constant(3.0, F32)
    y = graph.add_node("exp", [x]).result
    graph.set_outputs([flat, number, y, y])
    program, _ = compiled(graph)
    for _ in range(2):
        data = torch.randn(4, 6)
        outputs = program([data])
        torch.testing.assert_close(outputs[0], data.reshape(24))
        assert outputs[1] == 3.0
        for output in outputs:
            output.zero_()
        assert data.abs().sum() > 0
    assert len({o.data_ptr() for o in outputs}) == 4


def test_a_view_that_has_to_be_copied_is_a_kernel() -> None:
    graph = Graph()
    part = graph.add_node("slice", [tensor(graph, 8, 16)], {"dim": -1, "start": 1, "stop": 3, "step": 1}).result
    graph.set_outputs([graph.add_node("reshape", [part], {"shape": (16,)}).result])
    program, context = compiled(graph)
    assert kinds(program) == ["kernel"] and not context.remarks.of("failure")
    x = torch.randn(8, 16)
    assert torch.equal(program([x])[0], x[:, 1:3].reshape(-1))


def test_opaque_calls_with_lists_tuples_and_numbers() -> None:
    graph = Graph()
    count = graph.add_input(ScalarType("int", S))
    x = tensor(graph, S, 6)
    attributes: dict[str, Any] = {
        "target": "aten.split_with_sizes.default", "args": (("%", 0), ("list", (2, 4)), -1), "kwargs": (),
        "operand_types": (x.type,),
    }  # fmt: skip
    types = [TensorType(F32, (S, n), (6, 1)) for n in (2, 4)]
    parts = graph.add_node("opaque", [x], attributes, types=types).results
    attributes = {
        "target": "aten.new_full.default", "args": (("%", 0), ("list", (S + 1,)), float("inf")),
        "kwargs": (("dtype", ("torch", "float64")), ("device", ("device", "cpu"))), "operand_types": (None,),
    }  # fmt: skip
    full = graph.add_node("opaque", [x], attributes, types=[TensorType(F32, (S + 1,), (1,))]).result
    graph.set_outputs([graph.add_node("exp", [parts[1]]).result, full, count])
    program, _ = compiled(graph)
    data = torch.randn(5, 6)
    first, second, third = program([5, data])
    torch.testing.assert_close(first, data[:, 2:].exp())
    assert second.shape == (6,) and second.dtype == torch.float64 and second.isinf().all()
    assert third == 5


def test_opaque_operands_get_the_layout_that_eager_had() -> None:
    graph = Graph()
    x = tensor(graph, 4, 6)
    y = graph.add_node("exp", [x]).result
    attributes = {"target": "aten.clone.default", "args": (("%", 0),), "kwargs": (),
                  "operand_types": (TensorType(F32, (4, 6), (1, 4)),)}  # fmt: skip
    graph.set_outputs([graph.add_node("opaque", [y], attributes, types=[TensorType(F32, (4, 6), (1, 4))]).result])
    program, _ = compiled(graph)
    (found,) = program([torch.randn(4, 6)])
    assert found.stride() == (1, 4) and "copy" in kinds(program)


def test_memory_is_freed_at_the_last_use() -> None:
    graph = Graph()
    x = tensor(graph, 8, 8)
    attributes = {"target": "aten.alias.default", "args": (("%", 0),), "kwargs": (), "operand_types": (None,)}
    seen: list[Any] = []
    y = graph.add_node("exp", [x]).result
    z = graph.add_node("opaque", [y], {**attributes, "target": "aten.clone.default"}, types=[y.type]).result
    graph.set_outputs([graph.add_node("tanh", [z]).result])
    program, _ = compiled(graph)
    lines = program.source.splitlines()
    assert any(line.strip().startswith("del ") for line in lines)
    data = torch.randn(8, 8)
    seen.append(weakref.ref(data))
    args = [data]
    del data
    program(args)
    gc.collect()
    assert seen[0]() is None


def test_without_a_schedule_a_region_runs_through_aten() -> None:
    graph = Graph()
    graph.set_outputs([graph.add_node("exp", [tensor(graph, 4)]).result])
    program, context = compiled(graph, NoKernels())
    assert kinds(program) == ["interpreted"]
    (remark,) = context.remarks.of("failure")
    assert "no schedules" in remark.reason
    data = torch.randn(4)
    torch.testing.assert_close(program([data])[0], data.exp())


def test_without_a_compiler_models_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels._warn_once.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler-here")
    data = torch.randn(4)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        graph = Graph()
        graph.set_outputs([graph.add_node("exp", [tensor(graph, 4)]).result])
        program, _ = compiled(graph)
    torch.testing.assert_close(program([data])[0], data.exp())
    with pytest.raises(BuildError):
        graph = Graph()
        graph.set_outputs([graph.add_node("exp", [tensor(graph, 4)]).result])
        compiled(graph, strict=True)


def test_equal_regions_are_one_kernel() -> None:
    graph = Graph()
    x = tensor(graph, 4, 6)
    attributes = {"target": "aten.clone.default", "args": (("%", 0),), "kwargs": (), "operand_types": (None,)}
    for _ in range(3):
        y = graph.add_node("tanh", [graph.add_node("exp", [x]).result]).result
        x = graph.add_node("opaque", [y], attributes, types=[y.type]).result
    graph.set_outputs([x])
    program, _ = compiled(graph)
    assert kinds(program) == ["kernel", "opaque"] * 3 and len(program.kernels) == 1


def test_threads_may_call_one_program() -> None:
    graph = Graph()
    x = tensor(graph, S, 64)
    total = graph.add_node("sum", [x], {"dims": (-1,)}).result
    graph.set_outputs([graph.add_node("sub", [x, total]).result])
    program, _ = compiled(graph)
    failures: list[int] = []

    def work(seed: int) -> None:
        data = torch.randn(seed + 3, 64)
        for _ in range(50):
            (found,) = program([data])
            if not torch.allclose(found, data - data.sum(-1, keepdim=True), atol=1e-4):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_parameters_that_require_gradients_are_data() -> None:
    graph = Graph()
    x, w = tensor(graph, 20, 32), tensor(graph, 32, 32)
    graph.set_outputs([graph.add_node("contraction", [x, w], {"spec": "az,zb->ab"}).result])
    program = build_program(graph, NoKernels(), Context())
    weight = torch.nn.Parameter(torch.randn(32, 32))
    data = torch.randn(20, 32)
    (found,) = program([data, weight])
    assert not found.requires_grad
    torch.testing.assert_close(found, (data @ weight).detach())


def check_random(seed: int, target: Any, rows: int) -> None:
    graph = random_graph(random.Random(seed), 14, effects=True)
    symbols = {"s0": rows}
    inputs: list[Any] = []
    for value, x in zip(graph.inputs, float_inputs(graph, symbols, "normal", seed), strict=True):
        if isinstance(value.type, TensorType):
            strides = [evaluate_size(n, symbols) for n in value.type.strides]
            x = torch.empty_strided(x.shape, strides, dtype=torch_dtype(value.dtype)).copy_(x)
        inputs.append(x)

    def fresh() -> list[Any]:
        return [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]

    eager, exact = evaluate(graph, fresh()), evaluate(graph, fresh(), dtype=torch.float64)
    program, _ = compiled(graph, target)
    for found, near, wide in zip(program(fresh()), eager, exact, strict=True):
        assert (found.dtype, found.shape) == (near.dtype, near.shape)
        if not found.dtype.is_floating_point:
            assert torch.equal(found, near), f"seed {seed}"
            continue
        tolerance = 1e-4 if found.dtype == torch.float32 else 3e-2
        close = [torch.isclose(found.double(), x.double(), tolerance, tolerance, equal_nan=True) for x in (near, wide)]
        assert (close[0] | close[1]).all(), f"seed {seed}"


@pytest.mark.parametrize("seed", range(0, 120, 10))
def test_random_graphs_without_kernels(seed: int) -> None:
    for s in range(seed, seed + 10):
        check_random(s, NoKernels(), 5)


@pytest.mark.parametrize("seed", range(300, 312))
def test_random_graphs_with_kernels(seed: int) -> None:
    check_random(seed, None, 37)


def test_a_profiler_sees_each_kernel_by_name() -> None:
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.RMSNorm(64), torch.nn.Softmax(0), torch.nn.Linear(64, 8)).eval()
    compiled, x = torch.compile(model, backend="fusec"), torch.randn(100, 64)
    with torch.no_grad():
        expected = compiled(x)
        for _ in range(2):
            with torch.profiler.profile() as profile:
                assert torch.equal(compiled(x), expected)
            names = {event.key for event in profile.key_averages()}
            assert {"fusec::rms_norm"} <= {name.partition("_softmax")[0] for name in names}, names
        assert sum(name.startswith("fusec::") for name in names) >= 2
        assert torch.equal(compiled(x), expected)


def test_a_step_that_raises_ends_its_event() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, i: x.exp()[i] + 1, backend="fusec")
    x, wrong = torch.randn(4), torch.tensor([9])
    with torch.no_grad(), torch.profiler.profile() as profile:
        with pytest.raises(IndexError):
            compiled(x, wrong)
        compiled(x, torch.tensor([3]))
    events = [event.time_range for event in profile.events() if event.name.startswith("fusec::")]
    assert len(events) >= 2 and all(one.end <= other.start for one, other in itertools.pairwise(events))
