"""Matrix products of few rows as Triton kernels: right at every edge, within their buffers, on the matrix unit."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.analysis.machine import chip as machine
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.kernel import DotTiles, Kernel, Loop, walk
from fusec.codegen.triton import TritonTarget
from fusec.codegen.triton.check import check_region
from fusec.codegen.triton.compile import compile_for
from fusec.codegen.triton.kernel import TritonKernel
from fusec.codegen.triton.legality import FEW_ROWS_OF_HALVES
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.schedules import configs
from fusec.codegen.triton.schedules.operands import power_of_two
from fusec.codegen.triton.tiles import spans, tile_axes
from fusec.config import Config
from fusec.frontend import trace
from tests.codegen.triton_regions import kernel_regions, regions_of, regions_with_products
from tests.combinations import named, rotating
from tests.contexts import plan_of

ROWS = [(1, 1), (3, 1), (2, 5), (1, 16), (2, 13), (1, FEW_ROWS_OF_HALVES)]
"""Batch and length: one row, fewer than a block of them, such as lie apart, a block; more than the least one, and all
that are generated."""


def plain(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def transposed_weight(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(torch.addmm(bias, x.reshape(-1, x.shape[-1]), w)).reshape(*x.shape[:-1], -1)


def layer_norm(x: Tensor, scale: Tensor, offset: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, (x.shape[-1],), scale, offset), w, bias)


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    wide = x.float()
    return scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def gated(x: Tensor, residual: Tensor, scale: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    hidden = x + residual
    normed = rms_norm(hidden, scale)
    return F.silu(F.linear(normed, gate)) * F.linear(normed, up), hidden


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def projections(
    x: Tensor, scale: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    normed = rms_norm(x, scale)
    queries, keys, values = (F.linear(normed, w).unflatten(-1, (-1, 6)) for w in (q, k, v))
    return rotated(queries, cos, sin), rotated(keys, cos, sin), values


def square(x: Tensor, scale: Tensor, offset: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """What is summed, what is stored beside and the columns have one length."""
    normed = F.layer_norm(x, (x.shape[-1],), scale, offset)
    return F.linear(normed, q), F.silu(F.linear(normed, k)), normed


def from_heads(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return torch.mm(x.transpose(1, 2).reshape(-1, w.shape[1]), w.t()).reshape(residual.shape) + residual


def shapes(function: Callable[..., Any], batch: int, length: int) -> tuple[tuple[int, ...], ...]:
    x = (batch, length)
    return {
        plain: ((*x, 40), (37, 40)),
        transposed_weight: ((*x, 23), (23, 70), (70,)),
        layer_norm: ((*x, 600), (600,), (600,), (5, 600), (5,)),
        gated: ((*x, 150), (*x, 150), (150,), (33, 150), (33, 150)),
        projections: ((*x, 24), (24,), (24, 24), (12, 24), (12, 24), (batch, length, 1, 6), (batch, length, 1, 6)),
        square: ((*x, 64), (64,), (64,), (64, 64), (64, 64)),
        from_heads: ((batch, 3, length, 20), (50, 60), (*x, 50)),
    }[function]


def sample(function: Callable[..., Any], batch: int, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape).to(dtype) for shape in shapes(function, batch, length))


FUNCTIONS = [plain, transposed_weight, layer_norm, gated, projections, square, from_heads]


@pytest.mark.parametrize(("function", "rows"), rotating(FUNCTIONS, ROWS), ids=named)
def test_every_edge(function: Callable[..., Any], rows: tuple[int, int]) -> None:
    dtype = torch.float32 if rows in ROWS[::3] else torch.bfloat16
    regions = regions_of(function, sample(function, *rows, dtype))
    kinds = []
    for region in regions:
        outcome = check_region(region, chips=())
        assert outcome.ok, outcome
        kinds.append(outcome.kernel.kind)
    assert "contraction" in kinds


@pytest.mark.parametrize(
    ("small_m", "dtype", "most"),
    [(16, torch.bfloat16, FEW_ROWS_OF_HALVES), (8, torch.bfloat16, 16), (16, torch.float32, 16), (0, torch.float16, 0)],
    ids=str,
)
def test_more_rows_are_the_librarys(small_m: int, dtype: torch.dtype, most: int) -> None:
    for rows in (max(1, most), most + 1):
        graph = trace(plain, sample(plain, 1, rows, dtype), symbolic=False)
        assert bool(kernel_regions(graph, Config(small_m=small_m))) == (rows <= most), rows


@pytest.mark.parametrize(("function", "splits"), rotating(FUNCTIONS, (1, 2)), ids=named)
def test_every_edge_with_the_weight_as_the_first_operand(function: Callable[..., Any], splits: int) -> None:
    """Tiles are the other way around from their loads to their stores."""
    for region in regions_of(function, sample(function, 2, 5, torch.bfloat16)):
        plain = TritonTarget().schedule(plan_of(region), "kernel")
        if plain.kind == "contraction":
            outcome = check_region(region, chips=(), config=replace(plain.config, splits=splits, transposed=True))
            assert outcome.ok and first_operands(outcome.kernel) == {"columns"}, outcome
            assert first_operands(plain) == {"rows"}


def first_operands(kernel: Kernel) -> set[str]:
    """What the first operand of each product of tiles has beside what is summed."""
    found, axes = set(), tile_axes(kernel)
    rows = next(s.axis for s in walk(kernel.body) if isinstance(s, Loop) and s.kind == "tile")
    for dot in (s for s in walk(kernel.body) if isinstance(s, DotTiles)):
        first, _ = sorted(spans(kernel)[dot.acc], key=axes.index)
        found.add("rows" if first == rows else "columns")
    return found


@pytest.mark.parametrize(("chip", "unit"), [("sm_90", "wgmma"), ("sm_100", "tcgen05")])
def test_units_that_read_shared_memory_take_the_weight_first(chip: str, unit: str) -> None:
    """They take no fewer than 64 rows, which the weight has and the activations have not."""
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((8, 4096), (28672, 4096))]
    (region,) = regions_of(plain, inputs)
    default, *others = configs(plan_of(region), machine(chip))
    assert default.transposed and replace(default, transposed=False) in others
    for config, expected in ((default, True), (replace(default, transposed=False), False)):
        report = compile_for(TritonTarget().schedule(plan_of(region), "k", machine(chip), config), chip)
        assert report.ok and any(name.startswith(unit) for name in report.matrix_instructions) == expected, report


@pytest.mark.parametrize(
    ("dtype", "rows"), rotating((torch.float32, torch.float16, torch.float64), ((1, 1), (2, 5))), ids=str
)
def test_other_types(rows: tuple[int, int], dtype: torch.dtype) -> None:
    for function in (plain, layer_norm):
        (region,) = regions_of(function, sample(function, *rows, dtype))
        outcome = check_region(region, chips=())
        # The reference is no more exact than f64, so that a few roundings are all there is to see.
        assert outcome.comparison.ratio < (8 if dtype == torch.float64 else 1) and not outcome.unproven, outcome


@pytest.mark.parametrize(("function", "sections"), [(plain, 1), (layer_norm, 1), (gated, 1), (projections, 3)])
def test_a_program_loops_over_blocks_only_where_it_has_sections(function: Callable[..., Any], sections: int) -> None:
    (region,) = regions_of(function, sample(function, 1, 5, torch.float32))
    kernel = TritonTarget().schedule(plan_of(region), "k")
    kinds = [s.kind for s in walk(kernel.body) if isinstance(s, Loop) and s.axis == "block"]
    assert kinds == (["grid"] if sections == 1 else sections * ["serial"])


def test_blocks_are_no_larger_than_they_must_be() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 64, 65)] == [1, 1, 2, 4, 4, 8, 64, 128]


@pytest.mark.parametrize("rows", [1, 4])
def test_what_lies_beyond_the_end_does_not_count(rows: int) -> None:
    x, w = torch.randn(rows, 40), torch.randn(20, 40)
    (region,) = regions_of(lambda x, w: F.linear(1 / x, w), (x, w))
    outcome = check_region(region, chips=(), inputs=[x, w])
    assert outcome.ok, outcome


def test_infinities_and_nan_reach_what_they_reach() -> None:
    x, w = torch.randn(3, 40), torch.randn(20, 40)
    x[0, 3], x[1, 5], w[7, 39], w[2, 0] = torch.inf, torch.nan, -torch.inf, torch.nan
    (region,) = regions_of(plain, (x, w))
    outcome = check_region(region, chips=(), inputs=[x, w])
    assert outcome.ok, outcome


@pytest.mark.parametrize("rows", [2, 20])
def test_the_interpreter_loses_nothing_within_a_product_of_tiles(rows: int) -> None:
    """One term after the other, float32 would come to 0: beside 2**24 there is no room for a quarter."""
    x, w = torch.full((rows, 16), 0.5), torch.full((20, 16), 0.5)
    x[:, 0], x[:, -1], w[:, (0, -1)] = 4096, -4096, 4096
    (region,) = regions_with_products(F.linear, (x, w))
    out = torch.empty(rows, 20)
    TritonKernel(TritonTarget().schedule(plan_of(region), "k"))([x, w, out])
    assert (out == 14 / 4).all()


def kernel_of(function: Callable[..., Any], *inputs: Tensor) -> Kernel:
    (region,) = regions_of(function, inputs)
    return TritonTarget().schedule(plan_of(region), "kernel")


def test_several_rows_go_to_the_matrix_unit_and_one_does_not() -> None:
    for rows, expected in ((1, False), (2, True)):
        kernel = kernel_of(plain, torch.randn(rows, 64), torch.randn(64, 64))
        assert any(isinstance(s, DotTiles) for s in walk(kernel.body)) == expected
        assert ("tl.dot" in print_kernel(kernel)) == expected


def test_weights_that_share_an_operand_share_a_launch() -> None:
    """Its programs come to blocks of one weight after the other, each block to one program."""
    kernel = kernel_of(gated_twice, torch.randn(2, 64), torch.randn(64), torch.randn(96, 64), torch.randn(160, 64))
    text = print_kernel(kernel)
    assert "for block in range(program, 6, 16)" in text or "for block in range(program, 10, 16)" in text
    assert len(re.findall(r"tl\.dot", text)) == 2


def gated_twice(x: Tensor, scale: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    normed = rms_norm(x, scale)
    return F.linear(normed, first), F.silu(F.linear(normed, second))


def test_offsets_of_large_weights_have_64_bits() -> None:
    meta = torch.empty(2**17, 2**15, dtype=torch.bfloat16, device="meta")
    kernel = kernel_of(plain, torch.empty(2, 2**15, dtype=torch.bfloat16, device="meta"), meta)
    assert ".to(tl.int64)" in print_kernel(kernel)
    assert not unproven_accesses(kernel)


LARGE = {
    "gated": (gated, (2048,), (2048,), (2048,), (5632, 2048), (5632, 2048)),
    "projections": (projections, (2048,), (2048,), (2304, 2048), (384, 2048), (384, 2048), (1, 6), (1, 6)),
}


@pytest.mark.parametrize("chip", [pytest.param("sm_80", marks=pytest.mark.thorough), "sm_90", "gfx942"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", LARGE)
def test_large_ones_compile_to_what_a_chip_should_run(name: str, rows: int, chip: str) -> None:
    function, *sizes = LARGE[name]
    inputs = [
        torch.empty((1, rows, *s) if i == 0 or (name == "gated" and i == 1) or s == (1, 6) else s, dtype=torch.bfloat16)
        for i, s in enumerate(sizes)
    ]
    for region in regions_of(function, tuple(inputs)):
        report = compile_for(TritonTarget().schedule(plan_of(region), name, machine(chip)), chip)
        assert report.ok, report
        assert bool(report.matrix_instructions) == (rows > 1)
