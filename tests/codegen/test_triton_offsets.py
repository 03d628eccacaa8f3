"""Triton kernels on more elements than 32 bits can number: every offset has 64 bits, and none leaves its buffer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.triton import TritonTarget
from fusec.codegen.triton.grids import grids
from fusec.codegen.triton.interpreter import InterpretedKernel
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.signature import wide
from tests.codegen.triton_regions import regions_of
from tests.contexts import plan_of


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def kernel_of(function: Callable[..., Any], *inputs: Tensor) -> Kernel:
    (region,) = regions_of(function, inputs)
    return TritonTarget().schedule(plan_of(region), "kernel")


def cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


LOGITS = (8, 4096, 128256)
LARGE = {
    "softmax of logits": (lambda x: torch.softmax(x.float() * 2, -1), meta(*LOGITS)),
    "their loss": (lambda x: x.float().logsumexp(-1), meta(*LOGITS)),
    "a cast of them": (lambda x: x.float() * 2, meta(*LOGITS)),
    "sums over a batch": (lambda x: x.float().mean(0), meta(2**17, 2**15)),
    "few queries on a cache": (cached, meta(64, 32, 1, 128), meta(64, 8, 32768, 128), meta(64, 8, 32768, 128)),
    "many queries": (cached, *(meta(8, 32, 65536, 128) for _ in range(3))),
    "a product with few rows": (F.linear, meta(8, 65536), meta(65536, 65536)),
}


@pytest.mark.parametrize("name", LARGE)
def test_offsets_have_64_bits_where_sizes_ask_for_it(name: str) -> None:
    function, *inputs = LARGE[name]
    kernel = kernel_of(function, *inputs)
    text = print_kernel(next(grid for grid in grids(kernel) if wide(grid)))
    assert wide(kernel) and not unproven_accesses(kernel)
    programs = [line for line in text.splitlines() if "tl.program_id" in line]
    lanes = [line for line in text.splitlines() if "tl.arange" in line]
    assert programs and all(".to(tl.int64)" in line for line in (*programs, *lanes))


@pytest.mark.parametrize("rows", [1, 3])
def test_what_lies_beyond_32_bits_is_found(rows: int) -> None:
    """Rows a gigabyte apart, of which only the pages of their few elements are there."""
    apart = 2**30
    memory = torch.empty(apart * 2 + 64, dtype=torch.int8)
    x = memory.as_strided((3, 40), (apart, 1))
    x.copy_(torch.arange(120).view(3, 40) - 60)
    x = x if rows == 3 else memory.as_strided((1, 40), (apart, 1), 0)
    kernel = kernel_of(lambda x: x.float() * 2, x)
    out = torch.empty(rows, 40)
    InterpretedKernel(kernel)([x, out])
    assert wide(kernel) == (rows == 3)
    assert torch.equal(out, x.float() * 2)
