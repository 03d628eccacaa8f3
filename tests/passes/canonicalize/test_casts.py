"""Casts: which types hold every number of another."""

import pytest
import torch

from fusec.ir.types import BOOL, DTYPES, DType
from fusec.passes.canonicalize.casts import holds_all
from fusec.reference.dtypes import torch_dtype


def numbers(dtype: DType) -> torch.Tensor:
    """All finite numbers of a type of up to 16 bits; of larger ones, those that a narrower type cannot hold too."""
    kind = torch_dtype(dtype)
    if dtype.bytes <= 2 and dtype != BOOL:
        patterns = torch.arange(256 ** min(dtype.bytes, 2), dtype=torch.int32)
        found = patterns.to({1: torch.uint8, 2: torch.uint16}[dtype.bytes]).view(kind)
        return found[found.isfinite()]
    if dtype == BOOL:
        return torch.tensor([False, True])
    if dtype.is_float:
        limits = torch.finfo(kind)
        return torch.tensor([limits.max, limits.min, limits.tiny, limits.eps, 1 + limits.eps, 1 / 3], dtype=kind)
    limits = torch.iinfo(kind)
    return torch.tensor([limits.max, limits.min, -1, 2**24 + 1, limits.max // 2 + 2], dtype=kind)


@pytest.mark.parametrize("narrow", DTYPES.values(), ids=str)
def test_a_wider_type_is_one_that_holds_every_number(narrow: DType) -> None:
    x = numbers(narrow)
    for wide in DTYPES.values():
        there = x.to(torch_dtype(wide))
        kept = torch.equal(there.to(x.dtype), x) and bool((there.double() == x.double()).all())
        assert holds_all(wide, narrow) == kept, f"{narrow} in {wide}"
