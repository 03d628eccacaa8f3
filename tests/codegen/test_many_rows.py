"""Products of many rows: one kernel each with its epilogue, taken in blocks, for any number of rows and columns."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.codegen import target_named
from fusec.codegen.cpp.compiler import find_compiler
from fusec.codegen.cpp.legality import SHARE_FOR_SOME_ROWS
from fusec.codegen.cpp.schedules.blocks import even_blocks
from fusec.codegen.cpp.target import CppTarget
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.kernel import PARTS, Dot, Loop, walk
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.dynamo import backend_for, compiled_graphs
from fusec.frontend import trace
from fusec.ir.graph import Graph
from fusec.ir.types import F32, TensorType, symbol
from fusec.reference.contract import compare_outputs
from tests.combinations import rotating
from tests.machines import profile

BF16_PRODUCTS = target_named("cpp").many_bf16_products
"""Whether this machine multiplies pairs of bfloat16."""
Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]


def rotated(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries with their rotary embedding."""
    q = F.linear(x, w).view(x.shape[0], -1, 4, 16).transpose(1, 2)
    return q * cos + torch.cat((-q[..., 8:], q[..., :8]), -1) * sin


CASES: dict[str, Case] = {
    "a product": (F.linear, ((40, 24), (56, 24))),
    "rows and columns that fill no block": (F.linear, ((17, 37), (5, 37))),
    "more than one block of each": (F.linear, ((757, 260), (131, 260))),
    "wide blocks of columns": (F.linear, ((40, 24), (520, 24))),
    "an epilogue": (lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, ((40, 32), (70, 32), (70,), (40, 70))),
    "rows in two dims": (lambda x, w, r: F.linear(x, w) * r, ((3, 50, 32), (70, 32), (3, 50, 70))),
    "two products": (lambda x, a, b: F.silu(F.linear(x, a)) * F.linear(x, b), ((40, 32), (70, 32), (70, 32))),
    "heads": (lambda x, w: F.linear(x, w).view(3, -1, 4, 16).transpose(1, 2).contiguous(), ((3, 40, 24), (64, 24))),
    "wide heads": (
        lambda x, w: torch.relu(F.linear(x, w).view(3, -1, 2, 80).transpose(1, 2)), ((3, 40, 24), (160, 24))
    ),
    "a rotary embedding": (rotated, ((3, 40, 24), (64, 24), (40, 16), (40, 16))),
    "rows that lie apart": (lambda x, w: F.linear(x.transpose(0, 1)[::2], w) + 1, ((3, 80, 24), (56, 24))),
    "rows an odd number of elements apart": (lambda x, w: F.linear(x[:, 1:], w), ((40, 25), (56, 24))),
    "heads side by side before": (
        lambda x, w: F.linear(torch.tanh(x).transpose(1, 2).reshape(3, -1, 64), w), ((3, 4, 40, 16), (56, 64))
    ),
    "columns before, which eager leaves so": (lambda x, w: F.linear(torch.tanh(x.mT), w), ((3, 24, 40), (56, 24))),
}  # fmt: skip


AFTER_A_KERNEL = ("heads side by side before", "columns before, which eager leaves so")
PLAIN: Case = (F.linear, ((40, 24), (56, 24)))


@pytest.fixture
def quick() -> Config:
    """Options of a machine on which generated products are quick, whichever this one is."""
    return profile(f32=100.0, bf16=100.0, f16=100.0)


def run(case: Case, config: Config, dtype: torch.dtype = torch.float32, symbolic: bool = False) -> list[str]:
    """Compile, compare, and tell what it runs as."""
    function, shapes = case
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    compiled = compile_graph(trace(function, inputs, symbolic=symbolic), config)
    expected, truth = function(*inputs), function(*(x.double() for x in inputs))
    comparison = compare_outputs([expected], compiled.program(list(inputs)), [truth])
    assert comparison.passed, comparison
    return [step.kind for step in compiled.program.steps]


@pytest.mark.parametrize(
    ("name", "dtype"), rotating(list(CASES), (torch.float32, torch.bfloat16, torch.float16)), ids=str
)
def test_they_are_kernels_with_their_epilogue(name: str, dtype: torch.dtype, quick: Config) -> None:
    case = CASES[name]
    steps = run(case, quick, dtype)
    assert steps == ["kernel"] * (2 if case in (CASES[name] for name in AFTER_A_KERNEL) else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "blocks"), [
    ("rows and columns that fill no block", 1), ("more than one block of each", 1), ("two products", 2),
    ("wide heads", 1), ("a rotary embedding", 1), ("rows an odd number of elements apart", 1),
])  # fmt: skip
def test_frozen_weights_lie_in_blocks(name: str, blocks: int, dtype: torch.dtype, quick: Config) -> None:
    """To the same bits; weights of bfloat16 only where sums come in pairs."""
    function, shapes = CASES[name]
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    plain, graph = (trace(function, inputs, symbolic=False) for _ in range(2))
    for value in graph.inputs[1 : 1 + blocks]:
        value.frozen = True
    found = compile_graph(graph, quick).program
    pairs = dtype == torch.float32 or (all(n % 2 == 0 for n in (shapes[0][-1], shapes[1][-1])) and BF16_PRODUCTS)
    assert len(found.folded.values) == (blocks if pairs else 0)
    for a, b in zip(found(list(inputs)), compile_graph(plain, quick).program(list(inputs)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("speed", [100.0, 80.0])
def test_the_number_of_rows_may_be_unknown(speed: float) -> None:
    def layer(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, b)) + r

    def inputs(batch: int, length: int) -> list[Tensor]:
        return [torch.randn(s) for s in ((batch, length, 32), (70, 32), (70,), (batch, length, 70))]

    first = inputs(3, 40)
    for x in (first[0], first[3]):
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
    compiled, before = torch.compile(layer, backend=backend_for(profile(f32=speed))), len(compiled_graphs())
    with torch.no_grad():
        for given in (first, inputs(2, 17), inputs(2, 2), inputs(5, 400)):
            torch.testing.assert_close(compiled(*given), layer(*given))
    (only,) = compiled_graphs()[before:]
    assert [step.kind for step in only.program.steps] == ["kernel"]


def masked(x: Tensor, w: Tensor, r: Tensor, mask: Tensor, places: Tensor) -> Tensor:
    """An epilogue that reads something for each row, for each sequence, for each place in one, and where it stands."""
    there = torch.arange(x.shape[1], device=x.device)[:, None] * 0.125
    return torch.where(mask[:, None, None] > 0, F.linear(x, w) + r, places) + there


def in_heads(x: Tensor, w: Tensor, r: Tensor, mask: Tensor, places: Tensor) -> Tensor:
    """The result lies otherwise than its rows."""
    heads = F.linear(x, w).view(x.shape[0], x.shape[1], 5, 14).transpose(1, 2)
    return (heads * mask[:, None, None, None] + places[:, None, :14].transpose(0, 1)).contiguous()


SPREAD: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "dense": (lambda x: x, 1),
    "rows apart": (lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]], 1),
    "sequences apart": (lambda x: torch.stack((x, x), 1)[:, 1], 2),
    "one sequence for all": (lambda x: x[:1].expand(x.shape), 2),
}
"""How what is multiplied lies, and over how many ranges its rows run."""


@pytest.mark.parametrize(("spread", "layer"), rotating(list(SPREAD.values()), (masked, in_heads)))
def test_rows_of_all_sequences_are_one_range(
    layer: Callable[..., Tensor], spread: tuple[Callable[[Tensor], Tensor], int], quick: Config
) -> None:
    """Where they lie evenly, however many and long; one program serves them all, and stays inside of what it reads."""

    def inputs(batch: int, length: int) -> list[Tensor]:
        shapes = (batch, length, 32), (70, 32), (batch, length, 70), (batch,), (length, 70)
        x, *others = (torch.randn(shape) for shape in shapes)
        return [spread[0](x), *others]

    torch._dynamo.reset()
    first = inputs(3, 40)
    for x, dims in zip(first, ((0, 1), (), (0, 1), (0,), (0,)), strict=True):
        for dim in dims:
            torch._dynamo.mark_dynamic(x, dim)
    compiled = torch.compile(layer, backend=backend_for(quick))
    with torch.no_grad():
        for given in (first, inputs(2, 17), inputs(7, 2), inputs(5, 101), inputs(2, 400)):
            torch.testing.assert_close(compiled(*given), layer(*given))
    (only,) = compiled_graphs()
    (kernel,) = only.program.kernels.values()
    assert kernel.kind == "contraction" and not unproven_accesses(kernel)
    assert len(ranges_around_the_product(kernel.body)) == spread[1]


def test_a_single_row_of_many_sequences(quick: Config) -> None:
    """And the other way round; Dynamo has programs of their own for lengths of 1, so sizes are given here."""
    sizes = {name: symbol(name) for name in "bn"}
    graph = Graph()
    x, r = (graph.add_input(TensorType(F32, (*sizes.values(), k), (sizes["n"] * k, k, 1))) for k in (32, 48))
    weight = graph.add_input(TensorType(F32, (48, 32), (32, 1)))
    mask = graph.add_input(TensorType(F32, (sizes["b"], 1, 48), (48, 48, 1)))
    product = graph.add_node("contraction", (x, weight), {"spec": "abz,cz->abc"}).result
    graph.set_outputs([graph.add_node("add", (graph.add_node("mul", (product, r)).result, mask)).result])
    found = compile_graph(graph, quick)
    for batch, length in ((1, 1), (1, 7), (7, 1), (200, 1), (3, 5), (1, 200), (2, 193)):
        a, b, w, m = (torch.randn(s) for s in ((batch, length, 32), (batch, length, 48), (48, 32), (batch, 1, 48)))
        torch.testing.assert_close(found.program([a, b, w, m])[0], F.linear(a, w) * b + m)


def ranges_around_the_product(body: tuple[Any, ...]) -> list[str]:
    """Loops over ranges that only a call knows, the parts of the threads aside."""
    for loop in body:
        if isinstance(loop, Loop) and any(isinstance(s, Dot) for s in walk(loop.body)):
            unknown = not isinstance(loop.stop, int) and loop.stop != PARTS
            return [loop.axis] * unknown + ranges_around_the_product(loop.body)
    return []


BY_INPUT: dict[str, Case] = {
    "an epilogue": (lambda x, w, b: torch.relu(x @ w + b), ((40, 24), (24, 150), (150,))),
    "more than one block of each": (torch.matmul, ((757, 260), (260, 131))),
    "wide heads": (lambda x, w: torch.relu((x @ w).view(3, -1, 2, 80).transpose(1, 2)), ((3, 40, 24), (24, 160))),
}


@pytest.mark.parametrize("case", BY_INPUT.values(), ids=BY_INPUT)
def test_a_weight_by_input(case: Case, quick: Config) -> None:
    assert run(case, quick) == ["kernel"]
    assert run(case, quick, torch.bfloat16) != ["kernel"]  # pairs along what is summed do not lie side by side


@pytest.mark.parametrize(
    "case", [(F.linear, ((40, 4096), (56, 4096))), (torch.matmul, ((40, 4096), (4096, 56)))], ids=["linear", "by input"]
)
def test_a_long_sum_is_as_exact_as_the_librarys(case: Case, quick: Config) -> None:
    """A sum of sums: errors of a single one over so many would be several times as large."""
    assert run(case, quick) == ["kernel"]


@pytest.mark.parametrize("name", ["a product", "rows that lie apart", "rows an odd number of elements apart"])
def test_rows_are_read_where_they_lie(name: str, quick: Config) -> None:
    function, shapes = CASES[name]
    graph = trace(function, [torch.randn(shape) for shape in shapes], symbolic=False)
    ((kernel,),) = [compile_graph(graph, quick).program.kernels.values()]
    assert not any(b.role == "scratch" and b.name.startswith("left") for b in kernel.buffers)


@pytest.mark.parametrize(("depth", "rows"), [(300, [384, 373]), (768, [258, 258, 241]), (4096, [192, 192, 192, 181])])
def test_blocks_are_as_large_as_stays_in_the_cache(
    depth: int, rows: list[int], quick: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and their sums: few and even ones, each for all columns, of which a weight by input has four registers."""
    monkeypatch.setattr(CppTarget, "has_amx", False)  # whose processors have larger caches
    for function, weight, wide in (
        (F.linear, (131, depth), 16), (torch.matmul, (depth, 131), 4 * target_named("cpp").lanes)
    ):  # fmt: skip
        graph = trace(function, [torch.randn(757, depth), torch.randn(weight)], symbolic=False)
        ((kernel,),) = [compile_graph(graph, quick).program.kernels.values()]
        (product,) = [b for b in kernel.buffers if b.role == "scratch"]
        loops = [s for s in walk(kernel.body) if isinstance(s, Loop) and s.axis in ("rows", "block")]
        blocks = {s.axis: s.stop for s in loops}
        assert list(blocks.items()) == [("rows", len(rows)), ("block", -(-131 // wide))]
        assert product.numel == rows[0] * wide


def test_blocks_of_rows_are_even() -> None:
    """As few as can be, and full groups of rows in all but the last."""
    for n in range(1, 1000):
        size = even_blocks(n, 192, 6)
        count = -(-n // size)
        assert count == -(-n // 192) and size <= 192 and (count == 1 or size % 6 == 0) and size * count - n < 6 * count


def test_the_profile_decides() -> None:
    assert run(PLAIN, profile(f32=95.0)) == ["kernel"]
    assert run(PLAIN, profile(f32=50.0)) == ["vendor"]
    assert run(PLAIN, profile()) == ["vendor"]


@pytest.mark.parametrize(("rows", "step"), [(256, "kernel"), (257, "vendor")])
def test_a_library_that_is_a_little_quicker_keeps_the_largest(rows: int, step: str) -> None:
    assert run((F.linear, ((rows, 24), (56, 24))), profile(f32=80.0)) == [step]


def test_a_norm_before_it_stays_a_kernel_of_its_own(quick: Config) -> None:
    """Every block of columns would compute it again."""
    case: Case = (lambda x, w: F.linear(F.rms_norm(x, (24,)), w), ((40, 24), (56, 24)))
    assert run(case, quick) == ["kernel", "kernel"]


def test_a_row_does_not_touch_another(quick: Config) -> None:
    x, w = torch.randn(40, 24), torch.randn(70, 24)
    x[5], x[6, 3], w[69, 1] = float("nan"), float("inf"), float("-inf")
    compiled = compile_graph(trace(F.linear, [x, w]), quick)
    (found,) = compiled.program([x, w])
    torch.testing.assert_close(found, F.linear(x, w), equal_nan=True)


def test_small_m_may_be_larger(quick: Config) -> None:
    """A prologue is then part of a product of more rows, which every thread computes for itself."""
    case: Case = (lambda x, w: F.linear(F.rms_norm(x, (24,)), w), ((40, 24), (56, 24)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert run(case, replace(quick, small_m=64), dtype) == ["kernel"]


def test_sequences_are_taken_for_longer_than_batches(quick: Config) -> None:
    graph, (batch, length) = Graph(), (symbol("b"), symbol("n"))
    x = graph.add_input(TensorType(F32, (batch, length, 32), (length * 32, 32, 1)))
    weight = graph.add_input(TensorType(F32, (48, 32), (32, 1)))
    graph.set_outputs([graph.add_node("contraction", (x, weight), {"spec": "abz,cz->abc"}).result])
    found = compile_graph(graph, quick)
    (dot,) = (s for k in found.program.kernels.values() for s in walk(k.body) if isinstance(s, Dot))
    assert dot.left.row_stride == 32  # from one row to the next of the same sequence
    a, b = torch.randn(4, 20, 32), torch.randn(48, 32)
    torch.testing.assert_close(found.program([a, b])[0], F.linear(a, b))


@pytest.mark.parametrize(
    ("macros", "generated"),
    [
        ("AVX2 AVX512F", {"f32", "bf16", "f16", "i8"}),  # nobody multiplies half types as they are
        ("AVX2 AVX512F AVX512BF16", {"f32", "bf16", "f16", "i8"}),
        ("AVX2 AVX512F AVX512BF16 __clang__", {"f32", "f16"}),
        ("AVX2 AVX512F AVX512BF16 AMX_TILE AMX_BF16 AMX_INT8 AVX512FP16", {"f32", "bf16", "i8"}),
        ("AVX2 AVX512F AVX512BF16 AVX512FP16", {"f32", "bf16", "i8"}),  # AMX may be hidden: what is left is slow
        ("AVX2", {"bf16", "f16", "i8"}),
        ("AVX2 AVXNECONVERT", {"i8"}),
        ("SSE2", set()),
    ],
)
def test_where_nobody_has_measured_the_library_keeps_what_it_is_better_at(
    macros: str, generated: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = "\n".join(f"#define {m if m.startswith('__') else f'__{m}__'} 1" for m in macros.split())
    compiler = replace(find_compiler(), identity=identity)
    monkeypatch.setattr("fusec.codegen.cpp.target.find_compiler", lambda: compiler)
    machine = target_named("cpp").machine(Config(cache_dir=str(tmp_path)))
    assert {unit.split()[1] for unit in machine.peaks if unit.startswith("product")} == generated


@pytest.mark.parametrize(("name", "all_rows"), [("Intel(R) Xeon(R) Processor", False), ("AMD EPYC", True)])
def test_intel_s_library_keeps_the_largest(
    name: str, all_rows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = replace(find_compiler(), identity="#define __AVX2__ 1\n#define __AVX512F__ 1")
    monkeypatch.setattr("fusec.codegen.cpp.target.find_compiler", lambda: compiler)
    monkeypatch.setattr("fusec.codegen.cpp.target.cpu_name", lambda: name)
    machine = target_named("cpp").machine(Config(cache_dir=str(tmp_path)))
    assert machine.multiplies("f32") == all_rows and machine.multiplies("f32", SHARE_FOR_SOME_ROWS)
    assert machine.multiplies("bf16")
