"""Products whose sums are cut into parts: right at every edge and with everything around them, and deterministic."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.analysis.machine import chip as machine
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.triton import TritonTarget
from fusec.codegen.triton.check import check_region
from fusec.codegen.triton.compile import compile_for
from fusec.codegen.triton.grids import grids
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.schedules import configs
from fusec.ir.graph import Node
from tests.codegen.test_triton_contractions import FUNCTIONS, LARGE, ROWS, plain, sample
from tests.codegen.triton_regions import every_chip, regions_of, regions_with_products
from tests.combinations import named, rotating
from tests.contexts import plan_of


def split(region: Node, parts: int, depth: int = 16) -> KernelConfig:
    """The default in so many parts, of blocks so small that there are several."""
    default = configs(plan_of(region), machine(""))[0]
    return replace(default, splits=parts, depth=min(depth, default.depth))


def residual(x: Tensor, w: Tensor, bias: Tensor, before: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, bias)) + before


def shared_residual(x: Tensor, scale: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """What follows the product needs what comes before it, a norm included."""
    normed = F.rms_norm(x, (x.shape[-1],), scale)
    return F.linear(normed, w) + x[..., : w.shape[0]], normed


@pytest.mark.parametrize(("function", "parts"), rotating(FUNCTIONS, (2, 3, 8)), ids=named)
def test_every_edge(function: Callable[..., Any], parts: int) -> None:
    """Parts that are not full, and with eight of them some that are empty."""
    rows = ROWS[parts % len(ROWS)]
    found = 0
    for region in regions_of(function, sample(function, *rows, torch.bfloat16 if parts == 3 else torch.float32)):
        if "contraction" in {n.op.name for n in region.body}:
            outcome = check_region(region, chips=(), config=split(region, parts))
            assert outcome.ok and len(grids(outcome.kernel)) == 2, outcome
            found += 1
    assert found


@pytest.mark.parametrize(("rows", "function"), rotating((1, 5, 40), (residual, shared_residual)), ids=named)
def test_what_follows_comes_once(function: Callable[..., Any], rows: int) -> None:
    shapes = {
        residual: ((rows, 70), (50, 70), (50,), (rows, 50)),
        shared_residual: ((min(rows, 16), 70), (70,), (50, 70)),
    }[function]
    torch.manual_seed(0)
    (region,) = regions_with_products(function, [torch.randn(shape) for shape in shapes])
    outcome = check_region(region, chips=(), config=split(region, 4, 32))
    assert outcome.ok and len(grids(outcome.kernel)) == 2, outcome


def test_stores_into_a_cache_come_once() -> None:
    def project(x: Tensor, w: Tensor, cache: Tensor) -> Tensor:
        return cache.copy_(F.linear(x, w) * 2)

    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in ((3, 70), (20, 70), (3, 20))]
    (region,) = regions_with_products(project, inputs)
    outcome = check_region(region, chips=(), inputs=inputs, config=split(region, 3))
    first, second = grids(outcome.kernel)
    assert outcome.ok and any(b.role == "update" for b in second.buffers), outcome
    assert not any(b.role == "update" for b in first.buffers)


def kernel_of(rows: int, columns: int, depth: int, chip: str, **changes: Any) -> Kernel:
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((rows, depth), (columns, depth))]
    (region,) = regions_of(plain, inputs)
    config = replace(configs(plan_of(region), machine(chip))[0], **changes)
    return TritonTarget().schedule(plan_of(region), "linear", machine(chip), config)


def test_the_text_has_a_function_for_each_grid() -> None:
    text = print_kernel(kernel_of(1, 4096, 14336, "h200", splits=2))
    assert "def linear_part1(" in text and "def linear(" in text
    assert "atomic" not in text and text.count("contraction(") == 1


def test_sums_are_cut_where_a_weight_comes_too_slowly_otherwise() -> None:
    """Where columns alone ask for too little at once, and the weight is large enough to pay for another launch."""
    assert kernel_of(1, 4096, 14336, "h200").config.splits > 1
    assert kernel_of(8, 4096, 14336, "h200").config.splits > 1
    assert kernel_of(1, 14336, 4096, "h200").config.splits == 1  # columns enough
    assert kernel_of(1, 4096, 14336, "a100").config.splits == 1  # slower memory, which asks for less
    assert kernel_of(1, 1024, 1024, "h200").config.splits == 1  # too small


@every_chip
@pytest.mark.parametrize(("name", "rows"), rotating([*LARGE, "down"], (8, 1)))
def test_large_ones_compile_to_what_a_chip_should_run(name: str, rows: int, chip: str) -> None:
    function, *sizes = LARGE[name] if name in LARGE else (residual, (14336,), (4096, 14336), (4096,), (4096,))
    rowed = {"gated": (0, 1), "projections": (0, 6, 7), "down": (0, 3)}[name]
    inputs = [torch.empty((1, rows, *s) if i in rowed and s != (1, 6) else (1, rows, *s) if s == (1, 6) else s,
                          dtype=torch.bfloat16, device="meta") for i, s in enumerate(sizes)]  # fmt: skip
    for region in regions_of(function, tuple(inputs)):
        config = replace(configs(plan_of(region), machine(chip))[0], splits=4)
        report = compile_for(TritonTarget().schedule(plan_of(region), name, machine(chip), config), chip)
        assert report.ok, report
        assert bool(report.matrix_instructions) == (rows > 1)
