"""Bytes are computed in 32 bits only where that makes no difference."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "and": lambda x, y: (x & y).float(),
    "or, shifted": lambda x, y: ((x | y) >> 3).float(),
    "xor of a mask": lambda x, y: ((x ^ y) & 15).int(),
    "shifts by any number": lambda x, y: (x >> (y & 15)).long(),
    "upper bits": lambda x, y: ((x & -16) >> 4).bfloat16(),
    "a sum wraps around": lambda x, y: (x + y).float(),
    "a sum wraps around before it is masked": lambda x, y: (((x + y) >> 1) & 31).float(),
    "a product wraps around": lambda x, y: ((x * y) >> 2).float(),
    "bits leave on the left": lambda x, y: ((x << 3) >> 3).float(),
    "stays a byte as well": lambda x, y: (x & 15).float() + ((x & 15) * y).float(),
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_pair_of_bytes(function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    every = torch.arange(256).to(dtype)
    x, y = every.repeat_interleave(256), every.repeat(256)
    found = compile_graph(trace(function, (x, y), symbolic=False), replace(Config(), strict=True)).program([x, y])[0]
    assert torch.equal(found, function(x, y))


@pytest.mark.parametrize("most", [255, 1023])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_to_half_types_round_what_these_cannot_hold(dtype: torch.dtype, most: int) -> None:
    """Integers up to 256 are exact in all of them, and are not rounded."""
    x = torch.arange(4096, dtype=torch.int32)

    def function(x: Tensor) -> Tensor:
        return (x & most).to(dtype).float() - most

    (found,) = compile_graph(trace(function, [x], symbolic=False), replace(Config(), strict=True)).program([x])
    assert torch.equal(found, function(x))
