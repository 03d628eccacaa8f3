"""Long rows whose parts have programs of their own: right at every edge, in either direction, on every chip."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.analysis.machine import chip as machine
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.triton import TritonTarget
from fusec.codegen.triton.check import check_region
from fusec.codegen.triton.compile import CHIPS, compile_for
from fusec.codegen.triton.grids import grids
from fusec.codegen.triton.schedules import configs
from fusec.codegen.triton.signature import launches
from tests.codegen.triton_regions import regions_of
from tests.contexts import plan_of

LANES = 1024


def everything(x: Tensor) -> Tensor:
    return (x * x).mean() + 1


def rows(x: Tensor) -> tuple[Tensor, ...]:
    return x.flatten(1).sum(-1) * 2, x.flatten(1).amax(-1)


def columns(x: Tensor) -> tuple[Tensor, ...]:
    return x.flatten(0, -2).sum(0) * 2, x.flatten(0, -2).amin(0) + 1


def middle(x: Tensor) -> Tensor:
    return x.sum(1).exp()


def around(x: Tensor) -> Tensor:
    return x.sum((0, 2)) * 2


def count(x: Tensor) -> Tensor:
    return (x > 0.5).sum(0) + 1


def bounded(x: Tensor) -> Tensor:
    """What T5 does to float16: a truth about everything decides what each becomes."""
    return x.clamp(max=torch.where(torch.isinf(x).any(), 1.0, 2.0))


def truths(x: Tensor) -> tuple[Tensor, ...]:
    return (x > 0.5).any(1), (x > -2).all(1)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def softmax_of_columns(x: Tensor) -> Tensor:
    return x.softmax(0)


def normalised(x: Tensor) -> tuple[Tensor, ...]:
    """Both as long as the rows, and a number of each."""
    mean = x.mean((1, 2), keepdim=True)
    deviation = ((x - mean) ** 2).mean((1, 2), keepdim=True).sqrt()
    return (x - mean) / (deviation + 1e-3), mean, deviation


GRIDS = {
    everything: 2, rows: 2, columns: 2, middle: 2, around: 2, count: 2, bounded: 2, truths: 2, softmax: 3,
    softmax_of_columns: 3, normalised: 4,
}  # fmt: skip
"""How many each takes: one for each level of reductions, and for results of each length."""


_EVEN = pytest.param((2, 24, 16), marks=pytest.mark.thorough)
_COLUMNS = pytest.param(softmax_of_columns, marks=pytest.mark.thorough)  # takes as long as all others together


def name_of(function: Any) -> str:
    return str(function.__name__)


@pytest.mark.parametrize(
    "config", [KernelConfig(1, LANES, 64, 3), KernelConfig(4, LANES, 32, 8), KernelConfig(64, LANES, 16, 5)], ids=str
)
@pytest.mark.parametrize("shape", [(3, 37, 5), _EVEN, (1, 1, 33), (5, 2, 1)], ids=str)
@pytest.mark.parametrize("function", [f for f in GRIDS if f is not softmax_of_columns] + [_COLUMNS], ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.thorough)], ids=str)
def test_every_edge(function: Any, shape: tuple[int, ...], config: KernelConfig, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype)
    x.view(-1)[-1] = torch.inf if function is bounded else 0.3
    for region in regions_of(function, [x]):
        if any(node.op.name in ("sum", "max", "min") for node in region.body):
            outcome = check_region(region, chips=(), config=config)
            assert outcome.ok and len(grids(outcome.kernel)) == GRIDS[function], outcome


def test_what_is_not_a_number_or_nowhere_stays_so() -> None:
    x = torch.rand(4, 40)
    x[0, 3], x[1, 39], x[2] = torch.nan, torch.inf, -torch.inf
    for function in (lambda x: (x.amax(-1), x.sum(-1)), softmax):
        for region in regions_of(function, [x]):
            assert check_region(region, chips=(), inputs=[x], config=KernelConfig(1, LANES, 4, 4)).ok


LARGE: dict[str, Any] = {
    "everything": (everything, (4096, 4096)), "rows": (rows, (4, 2048, 1024)), "columns": (columns, (32, 128, 768)),
    "tall": (columns, (65536, 64)), "middle": (middle, (4, 8192, 64)),
    "around": (around, (64, 16, 16384)), "huge": (rows, (2, 1 << 16, 1 << 15)),
    "bounded": (bounded, (4, 512, 768)), "alike": (softmax, (8, 1, 1 << 19)), "pictures": (normalised, (2, 128, 4096)),
}  # fmt: skip
FIRST = ("everything", "columns", "alike")


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.thorough) for n in LARGE])
def test_large_ones_keep_a_gpu_busy(name: str) -> None:
    function, shape = LARGE[name]
    for region in regions_of(function, [torch.empty(shape, device="meta")]):
        for chip in CHIPS:
            kernel = TritonTarget().schedule(plan_of(region), name, machine(chip))
            first, *_, last = grids(kernel)
            assert launches(first) >= machine(chip).threads
            assert function is not softmax or launches(last) == launches(first)
            assert compile_for(kernel, chip).ok


def test_what_has_rows_enough_or_is_soon_done_stays_one_grid() -> None:
    few = ((everything, (1000,)), (softmax, (1, 16384)), (softmax, (4096, 4096)))
    for function, shape in ((rows, (8192, 1, 1024)), (columns, (64, 65536)), *few):
        for region in regions_of(function, [torch.empty(shape, device="meta")]):
            default, *others = configs(plan_of(region), machine("h100"))
            assert default.splits == 1 and all(other.splits == 1 for other in others)
