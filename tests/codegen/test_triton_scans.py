"""Scans on GPUs: kernels compiled ahead of time for chips without spills, within their buffers, right in each form."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.codegen.triton.check import check_region
from tests.codegen.triton_regions import every_chip, regions_of

pytest.importorskip("triton")


def wide(n: int, dtype: torch.dtype = torch.float32, rows: int = 2) -> Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(0)).to(dtype)


SCANS: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "a whole row": (lambda x: x.cumsum(-1), wide(4096)),
    "tiles of a row": (lambda x: x.cumsum(-1), wide(20_000)),
    "a vocabulary": (lambda x: x.softmax(-1).cumsum(-1), wide(50_257, torch.bfloat16)),
    "the elements above a share": (lambda x: (x.softmax(-1).cumsum(-1) < 0.5).sum(-1), wide(4096)),
    "two scans": (lambda x: x.softmax(-1).cumsum(-1) * x.cumprod(-1), wide(4096)),
    "integers": (lambda x: (x > 0).cumsum(-1), wide(8000)),
    "columns": (lambda x: x.cumsum(0), wide(3000, rows=50)),
    "columns and their sums": (lambda x: x.cumsum(0) / x.exp().sum(0), wide(300, torch.float16, rows=90)),
}


@every_chip
@pytest.mark.parametrize("name", SCANS)
def test_scans_compile_without_spills(name: str, chip: str) -> None:
    function, x = SCANS[name]
    (region,) = regions_of(function, [x])
    outcome = check_region(region, chips=(chip,), inputs=[x])
    assert outcome.ok, outcome
