"""Scans, sorts and scatters on GPUs: kernels that chips hold without spills, and remarks for what has no kernel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.codegen.triton.check import check_region
from fusec.debug.reasons import code_of_text
from fusec.dynamo import compiled_graphs
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


def nucleus(x: Tensor) -> tuple[Tensor, Tensor]:
    values, order = torch.sort(x / 0.7, descending=True)
    return values.softmax(-1).cumsum(-1), order


SORTS: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "a sorted row": (lambda x: torch.sort(x, stable=True, descending=True)[:], wide(2048)),
    "a part of a tile, of integers": (lambda x: torch.argsort((9 * x).int(), stable=True), wide(1000)),
    "the first, whose sum is 1": (lambda x: torch.topk(x.softmax(-1), 10).values.softmax(-1), wide(300, torch.float16)),
    "shares of the largest": (nucleus, wide(2000)),
}
SCATTERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rows are added": lambda x, i: torch.ones(30, 3000).index_add(0, i[:, 0], x * x),
    "the largest": lambda x, i: torch.ones(30, 3000).scatter_reduce(0, i.expand(20, 3000), x, "amax"),
    "replaced": lambda x, i: torch.ones(30, 3000).scatter(0, i.expand(20, 3000), x + 1),
}


@every_chip
@pytest.mark.parametrize("name", [*SCANS, *SORTS])
def test_scans_and_sorts_compile_without_spills(name: str, chip: str) -> None:
    function, x = (SCANS | SORTS)[name]
    (region,) = regions_of(function, [x])
    outcome = check_region(region, chips=(chip,), inputs=[x])
    assert outcome.ok, outcome


@every_chip
@pytest.mark.parametrize("name", SCATTERS)
def test_scatters_compile_without_spills(name: str, chip: str) -> None:
    places = torch.randint(0, 30, (20, 1), generator=torch.Generator().manual_seed(1))
    inputs = [wide(3000, rows=20), places]
    (region,) = regions_of(SCATTERS[name], inputs)
    outcome = check_region(region, chips=(chip,))
    assert outcome.ok, outcome


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a long row": (lambda x, i: x.view(-1).sort().values, "rows of 4900 elements, and a tile holds 2 to 2048"),
    "64 bits": (lambda x, i: x.double().sort().values, "keys of a tile have 32 bits"),
    "along the last dim": (lambda x, i: x.scatter(-1, i, x), "no dim is contiguous"),
    "sums along the last dim": (lambda x, i: x.scatter_add(-1, i, x), "no dim is contiguous"),
    "of many rows": (lambda x, i: torch.zeros(9, 70).index_add(0, i[0] % 9, x.mT), "70 elements in order"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_kernel_is_a_call_with_a_reason(name: str) -> None:
    function, reason = REFUSED[name]
    x, places = wide(70, rows=70), torch.randint(0, 70, (70, 70), generator=torch.Generator().manual_seed(2))
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="fusec", options={"target": "triton", "strict": True})
    assert torch.equal(compiled(x, places), function(x, places))
    (found,) = (r for r in compiled_graphs()[-1].remarks if "is in no kernel" in r.message)
    assert found.kind == "missed" and reason in found.reason and code_of_text(found.reason) != "other"
