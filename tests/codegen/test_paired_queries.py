"""Queries of bfloat16 are multiplied with keys in pairs, by instructions or as emulated, where nothing is rounded."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.codegen import target_named
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.types import BF16, F32
from fusec.quantization.formats import format_named
from fusec.reference.contract import compare_outputs
from tests.codegen.instructions import emulate_pairs

KEYS, HEAD = 300, 64
pytestmark = pytest.mark.skipif(target_named("cpp").lanes != 16, reason="pairs fill registers of 16 lanes")


@pytest.fixture(autouse=True)
def instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_pairs(monkeypatch)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def scaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Over keys times a number, by which the kernel multiplies queries, without rounding them."""
    return attend(query, key * 0.3, value)


def unpacked(query: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    cache = format_named("int8-g32").unpack({"codes": codes, "scale": scale}, query.dtype)
    return attend(query, cache, cache)


def packed(dtype: torch.dtype) -> tuple[Tensor, ...]:
    format, x = format_named("int8-g32"), torch.randn(1, 2, KEYS, 2, 32).to(dtype)
    scales = format.cover(x)
    parts = format.pack(format.encode(x, scales).flatten(-2), scales)
    return parts["codes"], parts["scale"]


def dense(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(1, 2, KEYS, HEAD).to(dtype), torch.randn(1, 2, KEYS, HEAD).to(dtype)


@pytest.mark.parametrize("heads", [2, 8], ids="{} heads".format)
@pytest.mark.parametrize(
    ("function", "cache", "dtype", "in_pairs"),
    [
        (attend, dense, torch.bfloat16, True),
        (attend, dense, torch.float16, False),
        (scaled, dense, torch.bfloat16, False),
        (unpacked, packed, torch.bfloat16, True),
    ],
    ids=["dense", "float16", "scaled keys", "packed"],
)
def test_queries(function: Callable[..., Tensor], cache: Any, dtype: torch.dtype, in_pairs: bool, heads: int) -> None:
    inputs = torch.randn(1, heads, 1, HEAD).to(dtype), *cache(dtype)
    found = compile_graph(trace(function, inputs, symbolic=False), replace(Config(), strict=True))
    (kernel,) = found.program.kernels.values()
    queries = next(buffer for buffer in kernel.buffers if buffer.name.startswith("query"))
    pays = function is not unpacked or heads > 2  # a tile of keys is rounded to pairs for several queries only
    assert queries.dtype == (BF16 if in_pairs and pays else F32)
    exact = function(*(x.double() if x.is_floating_point() else x for x in inputs))
    comparison = compare_outputs([function(*inputs)], found.program(list(inputs)), [exact], dtype)
    assert comparison.passed, comparison
