"""Matrix products of many rows as Triton kernels: right at every edge, within their buffers, pipelined on each chip."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.analysis.machine import chip as machine
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.kernel import Kernel, Loop, walk
from fusec.codegen.triton import TritonTarget
from fusec.codegen.triton.check import check_region
from fusec.codegen.triton.compile import compile_for
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.signature import launches
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.graph import Graph
from fusec.ir.types import BF16, TensorType, symbol
from fusec.reference.contract import compare_outputs
from tests.codegen.triton_regions import every_chip, kernel_regions, regions_with_products
from tests.contexts import plan_of

Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def rotated(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries with their rotary embedding."""
    q = F.linear(x, w).view(x.shape[0], x.shape[1], -1, cos.shape[-1]).transpose(1, 2)
    first, second = q.chunk(2, -1)
    return q * cos + torch.cat((-second, first), -1) * sin


def epilogue(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, bias)) + residual


def from_heads(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return torch.mm(x.transpose(1, 2).reshape(-1, w.shape[1]), w.t()).reshape(residual.shape) + residual


CASES: dict[str, Case] = {
    "one block of rows": (F.linear, ((17, 37), (5, 37))),
    "several": (F.linear, ((150, 70), (90, 70))),
    "more of them than a group": (F.linear, ((300, 40), (5, 40))),
    "full blocks": (F.linear, ((128, 64), (64, 64))),
    "an epilogue": (epilogue, ((40, 33), (70, 33), (70,), (40, 70))),
    "two products": (gated, ((40, 33), (70, 33), (70, 33))),
    "rows in two dims": (lambda x, w, r: F.linear(x, w) * r, ((3, 50, 32), (70, 32), (3, 50, 70))),
    "heads": (lambda x, w: F.linear(x, w).view(3, -1, 4, 16).transpose(1, 2).contiguous(), ((3, 40, 24), (64, 24))),
    "a rotary embedding": (rotated, ((3, 40, 24), (48, 24), (40, 12), (40, 12))),
    "rows that lie apart": (lambda x, w: F.linear(x.transpose(0, 1)[::2], w) + 1, ((3, 80, 24), (56, 24))),
    "rows by column": (lambda x, w: torch.relu(x.t() @ w), ((24, 40), (24, 50))),
    "a weight by input": (lambda x, w, b: torch.relu(x @ w + b), ((70, 23), (23, 50), (50,))),
    "a sum over heads": (from_heads, ((1, 3, 40, 20), (50, 60), (1, 40, 50))),
}  # fmt: skip


def sample(case: Case, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in case[1]]


IN_HALVES = ("an epilogue", "two products", "a weight by input")


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in CASES), *((name, torch.bfloat16) for name in IN_HALVES)]
)
def test_every_edge(name: str, dtype: torch.dtype) -> None:
    (region,) = regions_with_products(CASES[name][0], sample(CASES[name], dtype))
    outcome = check_region(region, chips=())
    assert outcome.ok and outcome.kernel.kind == "contraction", outcome


TRIES_MORE = Config(mode="max-autotune", machine="h200", target="triton", strict=True)


def test_the_number_of_rows_may_be_unknown() -> None:
    """Each batch has blocks of its own; there may be more of them than a group, and groups that are not full."""

    graph, (batch, length) = Graph(), (symbol("b"), symbol("n"))
    x = graph.add_input(TensorType(BF16, (batch, length, 24), (length * 24, 24, 1)))
    weight = graph.add_input(TensorType(BF16, (48, 24), (24, 1)))
    product = graph.add_node("contraction", (x, weight), {"spec": "abz,cz->abc"}).result
    gate = graph.add_node("sigmoid", (product,)).result
    graph.set_outputs([graph.add_node("mul", (product, gate)).result])
    compiled = compile_graph(graph, TRIES_MORE)
    (kernel,) = compiled.program.kernels.values()
    assert kernel.kind == "contraction" and not unproven_accesses(kernel)

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return F.silu(F.linear(x, w))

    for shape in ((2, 5), (3, 70), (1, 1300)):
        given = [torch.randn(size).to(torch.bfloat16) for size in ((*shape, 24), (48, 24))]
        truth = layer(*(x.double() for x in given))
        comparison = compare_outputs([layer(*given)], compiled.program(list(given)), [truth])
        assert comparison.passed, comparison


def test_what_is_computed_before_few_rows_may_be_computed_for_blocks_of_them() -> None:
    """Where ``small_m`` is larger than a block; two weights share it, and what it makes beside is stored once."""

    def layer(x: Tensor, scale: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        normed = F.rms_norm(x, (24,), scale)
        return F.linear(normed, w), F.silu(F.linear(normed, v)), normed

    for dtype in (torch.float32, torch.float64):
        inputs = [torch.randn(shape, dtype=dtype) for shape in ((150, 24), (24,), (56, 24), (40, 24))]
        config = Config(small_m=200)
        (region,) = kernel_regions(trace(layer, inputs, symbolic=False), config)
        outcome = check_region(region, chips=())
        # The reference is no more exact than f64, so that a few roundings are all there is to see.
        assert outcome.comparison.ratio < (8 if dtype == torch.float64 else 1) and not outcome.unproven, outcome


def kernel_of(case: Case, dtype: torch.dtype = torch.bfloat16, chip: str = "sm_80") -> Kernel:
    (region,) = regions_with_products(case[0], [torch.empty(s, dtype=dtype, device="meta") for s in case[1]])
    return TritonTarget().schedule(plan_of(region), "kernel", machine(chip))


def test_programs_in_a_row_share_rows_and_columns() -> None:
    """Eight blocks of rows in turn for each block of columns; the last group has four."""
    kernel = kernel_of((F.linear, ((1536, 4096), (4096, 4096))))
    loops = [(s.axis, s.stop) for s in walk(kernel.body) if isinstance(s, Loop) and s.kind == "grid"]
    assert loops == [("row_group", 2), ("block", 32), ("row_block", 8)]
    assert re.search(r"if v\d+:", print_kernel(kernel))  # four of the second group have nothing to do
    assert "if" not in print_kernel(kernel_of((F.linear, ((4096, 4096), (4096, 4096)))))


def test_products_of_one_operand_load_it_once() -> None:
    text = print_kernel(kernel_of((gated, ((512, 256), (512, 256), (512, 256)))))
    assert len(re.findall(r"tl\.load", text)) == 3 and len(re.findall(r"tl\.dot", text)) == 2
    assert "tl.trans" not in text


@pytest.mark.parametrize(("rows", "columns"), [(64, 4096), (128, 1024), (200, 4096), (512, 4096), (4096, 14336)])
def test_small_products_are_cut_into_enough_programs(rows: int, columns: int) -> None:
    kernel = kernel_of((F.linear, ((rows, 4096), (columns, 4096))))
    assert launches(kernel) >= 64


def test_offsets_of_large_ones_have_64_bits() -> None:
    kernel = kernel_of((F.linear, ((2**17, 64), (2**15, 64))))
    assert ".to(tl.int64)" in print_kernel(kernel) and not unproven_accesses(kernel)


LARGE: dict[str, tuple[Case, torch.dtype]] = {
    "gated": ((gated, ((4096, 4096), (14336, 4096), (14336, 4096))), torch.bfloat16),
    "rotary": ((rotated, ((1, 512, 4096), (4096, 4096), (512, 128), (512, 128))), torch.float16),
    "rotary of a long prompt": ((rotated, ((1, 4096, 4096), (4096, 4096), (4096, 128), (4096, 128))), torch.bfloat16),
    "plain": ((F.linear, ((4096, 4096), (4096, 4096))), torch.float16),
    "by input": ((lambda x, w: torch.relu(x @ w), ((512, 14336), (14336, 4096))), torch.bfloat16),
    "gelu": ((lambda x, w, b: F.gelu(F.linear(x, w, b)), ((4096, 768), (3072, 768), (3072,))), torch.bfloat16),
}


@every_chip
@pytest.mark.parametrize("name", LARGE)
def test_large_ones_compile_to_what_a_chip_should_run(name: str, chip: str) -> None:
    report = compile_for(kernel_of(*LARGE[name], chip), chip)
    assert report.ok and report.matrix_instructions, report
    assert (report.asynchronous_copies > 0) == chip.startswith("sm"), report
