"""Matrix products in every layout: with few rows a kernel of ours, with many one too or a call of the vendor's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.codegen import target_named
from fusec.codegen.program.program import build_program
from fusec.codegen.tile.kernel import Dot, walk
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.parser import parse_graph
from fusec.passes.fold_bias import FoldBiasIntoGemm
from fusec.passes.grouping import Group
from fusec.reference.contract import compare_outputs
from fusec.reference.dtypes import torch_dtype
from fusec.reference.interpreter import evaluate
from tests.campaigns.fuzz.targets import triton
from tests.combinations import rotating
from tests.contexts import context_of
from tests.machines import cpu, profile

Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]

FEW: dict[str, Case] = {
    "a prologue that is a result": (
        lambda x, r, w: ((h := x + r), F.linear(torch.tanh(h), w)), ((3, 32), (3, 32), (48, 32))
    ),
    "a prologue with a sum that is a result": (
        lambda x, w: ((s := x.square().mean(-1, keepdim=True)), F.linear(x * torch.rsqrt(s + 1e-6), w)),
        ((4, 32), (40, 32)),
    ),
    "an epilogue that reads the norm": (
        lambda x, w, b: F.linear(n := F.layer_norm(x, (32,)), w, b) + n, ((2, 32), (32, 32), (32,))
    ),
    "a gate of the norm": (
        lambda x, w: F.linear(n := F.rms_norm(x, (32,)), w) * torch.sigmoid(n), ((2, 5, 32), (32, 32))
    ),
    "an epilogue that reads the sum of the row": (
        lambda x, w: F.linear(x * (s := x.square().sum(-1, keepdim=True)), w) / s, ((10, 32), (48, 32))
    ),
    "columns in two dims": (
        lambda x, w, a, b: F.linear(torch.tanh(x), w).view(3, 6, 16) * a + b.transpose(0, 1),
        ((3, 32), (96, 32), (6, 1), (16, 6)),
    ),
    "columns in two dims, turned": (
        lambda x, w: torch.sin(F.linear(x, w).view(3, 6, 16).transpose(1, 2)).contiguous(), ((3, 32), (96, 32))
    ),
    "summed over two dims with an epilogue": (
        lambda x, w, b: torch.relu(F.linear((2 * x).transpose(1, 2).reshape(3, 96), w, b)),
        ((3, 6, 16), (40, 96), (40,)),
    ),
    "three products of one row": (
        lambda x, w, v: F.silu(F.linear(y := torch.cos(x), w)) * F.linear(y, v) + F.linear(y, w),
        ((1, 64), (72, 64), (72, 64)),
    ),
    "a weight by input": (lambda x, w, b: torch.tanh(torch.sin(x) @ w + b), ((5, 24), (24, 56), (56,))),
    "spread over an image": (lambda x, w, h: torch.sigmoid(F.linear(x.sin(), w))[:, :, None, None] * h,
                             ((2, 16), (64, 16), (2, 64, 5, 6))),
    "rows in two dims": (lambda x, w: F.linear(x.sin(), w) + 1, ((2, 3, 24), (56, 24))),
}  # fmt: skip
MANY: dict[str, Case] = {
    "linear": (F.linear, ((40, 24), (56, 24))),
    "with a bias": (F.linear, ((40, 24), (56, 24), (56,))),
    "a bias and a weight by input": (lambda x, w, b: x @ w + b, ((40, 24), (24, 56), (56,))),
    "a bias and a square weight": (F.linear, ((40, 24), (24, 24), (24,))),
    "a bias and a square weight by input": (lambda x, w, b: x @ w + b, ((40, 24), (24, 24), (24,))),
    "a bias on rows in two dims": (F.linear, ((3, 20, 24), (56, 24), (56,))),
    "turned left": (lambda x, w: x.t() @ w, ((24, 40), (24, 56))),
    "turned twice": (lambda x, w: x.t() @ w.t(), ((24, 40), (56, 24))),
    "batched": (torch.bmm, ((3, 20, 24), (3, 24, 28))),
    "batched, turned": (lambda x, w: x.transpose(1, 2) @ w.transpose(1, 2), ((3, 24, 20), (3, 28, 24))),
    "batch in the middle": (lambda x, w: torch.einsum("ibk,bkj->bij", x, w), ((20, 3, 24), (3, 24, 28))),
    "batch in the middle of the result": (lambda x, w: torch.einsum("bik,bkj->ibj", x, w), ((3, 20, 24), (3, 24, 28))),
    "rows around columns": (lambda x, w: torch.einsum("ick,jk->ijc", x, w), ((20, 4, 24), (28, 24))),
    "summed over two dims": (lambda x, w: torch.einsum("ikl,jkl->ij", x, w), ((40, 4, 6), (28, 4, 6))),
    "summed over two turned dims": (lambda x, w: torch.einsum("ikl,jlk->ij", x, w), ((40, 4, 6), (28, 6, 4))),
    "two vectors": (lambda x, w, b: torch.dot(x, w) + b, ((24,), (24,), (1,))),
    "outer": (lambda x, w: torch.einsum("i,j->ij", x, w), ((40,), (28,))),
    "a sum on one side": (lambda x, w: torch.einsum("ikl,jk->ij", x, w), ((40, 6, 4), (28, 6))),
    "heads": (lambda x, w: F.linear(x, w).view(20, 4, 14).transpose(0, 1).contiguous(), ((20, 24), (56, 24))),
}


def sample(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


@pytest.fixture(params=["library", "generated"])
def machine(request: pytest.FixtureRequest) -> Config:
    """Options of a processor on which the library's products of many rows are quicker, and of one where ours are."""
    return profile(**({"f32": 100.0} if request.param == "generated" else {}))


def run(
    function: Callable[..., Any], inputs: list[Tensor], config: Config | None = None, symbolic: bool = False
) -> list[str]:
    """Compile, compare, and tell what it runs as."""
    config = replace(config or Config(), strict=not symbolic)
    compiled = compile_graph(trace(function, inputs, symbolic=symbolic), config)
    expected, reference = (function(*given) for given in (inputs, [x.double() for x in inputs]))
    wanted, truth = ([y] if isinstance(y, Tensor) else list(y) for y in (expected, reference))
    comparison = compare_outputs(wanted, compiled.program(list(inputs)), truth)
    assert comparison.passed, comparison
    return [step.kind for step in compiled.program.steps]


@pytest.mark.parametrize(("name", "dtype"), rotating(list(FEW), (torch.float32, torch.bfloat16)), ids=str)
def test_few_rows_are_one_kernel(name: str, dtype: torch.dtype) -> None:
    function, shapes = FEW[name]
    assert run(function, [x.to(dtype) for x in sample(shapes)]).count("vendor") == 0


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("name", ["columns in two dims", "columns in two dims, turned"])
def test_a_weight_is_read_row_after_row(name: str) -> None:
    """In whichever order its columns are stored: memory is slower where each row lies far from the one before."""
    function, shapes = FEW[name]
    compiled = compile_graph(trace(function, sample(shapes), symbolic=False), Config())
    dots = [s for kernel in compiled.program.kernels.values() for s in walk(kernel.body) if isinstance(s, Dot)]
    assert [dot.right.column_stride for dot in dots] == [32]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("case", MANY.values(), ids=MANY)
def test_many_rows(case: Case, symbolic: bool, machine: Config) -> None:
    function, shapes = case
    run(function, sample(shapes), machine, symbolic)


@pytest.mark.parametrize("case", MANY.values(), ids=MANY)
def test_operands_may_lie_in_any_order(case: Case, machine: Config) -> None:
    function, shapes = case
    turned = [x.mT.contiguous().mT if x.ndim > 1 else x.repeat_interleave(2)[::2] for x in sample(shapes)]
    run(function, turned, machine)
    run(function, [torch.cat((x, x), -1)[..., : x.shape[-1]] for x in sample(shapes)], machine)


def test_a_bias_goes_into_the_call() -> None:
    for name in (
        "with a bias", "a bias and a weight by input", "a bias and a square weight by input",
        "a bias on rows in two dims",
    ):  # fmt: skip
        function, shapes = MANY[name]
        assert run(function, sample(shapes), profile()) == ["vendor"], name


@pytest.mark.parametrize(
    "spec",
    [
        "az,az->az",
        "az,zb->az",
        "az,bz->az",
        "az,zz->az",
        "zz,bz->zb",
        "az,bb->ab",
        "az,ab->ab",
        "az,bz->bz",
        "az,bz->b",
    ],
)
def test_what_is_no_linear_layer_keeps_its_bias_apart(spec: str) -> None:
    """However alike the sizes are."""
    shape = [6 for _ in spec.partition("->")[2]]
    text = f"""graph g(%x: f32[6, 6], %w: f32[6, 6], %b: f32[6]) {{
      %p: f32{shape} = contraction(%x, %w) {{spec="{spec}"}}
      %y: f32{shape} = add(%p, %b)
      return %y
    }}"""
    assert biased(text, *sample(((6, 6), (6, 6), (6,)))) == ["vendor", "kernel"]


def test_a_number_for_each_row_is_no_bias() -> None:
    text = """graph g(%x: f32[40, 24], %w: f32[40, 24], %b: f32[40]) {
      %p: f32[40, 40] = contraction(%x, %w) {spec="az,bz->ab"}
      %c: f32[40, 1] = reshape(%b) {shape=(40, 1)}
      %y: f32[40, 40] = add(%p, %c)
      return %y
    }"""
    assert biased(text, *sample(((40, 24), (40, 24), (40,)))) == ["vendor", "kernel"]


def test_what_no_product_made_takes_no_bias() -> None:
    text = """graph g(%x: f32[6, 8], %b: f32[8]) {
      %p: f32[6, 8] = opaque(%x) {target="aten.cumsum.default", args=($0, 1)}
      %y: f32[6, 8] = add(%p, %b)
      return %y
    }"""
    assert biased(text, *sample(((6, 8), (8,)))) == ["opaque", "kernel"]


def biased(text: str, *inputs: Tensor) -> list[str]:
    """What a graph runs as whose biases went into calls of products, once it has been compared."""
    graph, context = parse_graph(text), context_of(config=Config(strict=True), machine=cpu())
    for step in (Group(), FoldBiasIntoGemm()):
        step.apply(graph, context)
    made = build_program(graph, target_named("cpp"), context)
    torch.testing.assert_close(made(list(inputs)), evaluate(parse_graph(text), inputs))
    return [step.kind for step in made.steps]


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize(("prologue", "copied"), [(lambda x: x, False), (torch.sin, True), (lambda x: x[:, 8:], False)])
def test_a_left_operand_that_lies_as_a_matrix_is_not_copied(prologue: Callable[[Tensor], Tensor], copied: bool) -> None:
    inputs = sample(((3, 40), (56, prologue(torch.empty(3, 40)).shape[1])))
    graph = trace(lambda x, w: torch.tanh(F.linear(prologue(x), w)), inputs, symbolic=False)
    ((kernel,),) = [compile_graph(graph, Config(strict=True)).program.kernels.values()]
    assert any(b.role == "scratch" and b.name.startswith("left") for b in kernel.buffers) == copied


@pytest.mark.parametrize(
    ("dtype", "right", "left"),
    rotating(("f32", "f16", "f64"), ((1, 0), (0, 1), (0, 0), (70, 1)), ((1, 0), (0, 1), (0, 0), (70, 1))),
    ids=str,
)
def test_triton_products_of_operands_that_repeat_elements(
    left: tuple[int, int], right: tuple[int, int], dtype: str
) -> None:
    graph = parse_graph(f"""graph g(%x: {dtype}[3, 70] @{left}, %w: {dtype}[5, 70] @{right}) {{
      %y: {dtype}[3, 5] = contraction(%x, %w) {{spec="az,bz->ab"}}
      return %y
    }}""")
    torch.manual_seed(0)
    memory = [torch.randn(5 * 70, dtype=torch_dtype(x.dtype)) for x in graph.inputs]
    given = [memory[0].as_strided((3, 70), left), memory[1].as_strided((5, 70), right)]
    tolerance = 1e-2 if dtype == "f16" else 1e-4
    torch.testing.assert_close(triton(graph).run(given), evaluate(graph, given), rtol=tolerance, atol=tolerance)
