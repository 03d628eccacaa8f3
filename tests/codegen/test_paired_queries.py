"""Queries, keys, weights and values of bfloat16 are multiplied in pairs, by instructions or as emulated.

Nothing is rounded that the model does not round.
"""

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
from fusec.ir.types import BF16
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


def wide(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """With weights and values in float32."""
    return attend(query.float(), key.float(), value.float())


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
        (attend, dense, torch.bfloat16, ("query", "weights")),
        (attend, dense, torch.float16, ()),
        (scaled, dense, torch.bfloat16, ("weights",)),
        (wide, dense, torch.bfloat16, ()),
        (unpacked, packed, torch.bfloat16, ("query",)),
    ],
    ids=["dense", "float16", "scaled keys", "wide", "packed"],
)
def test_operands(
    function: Callable[..., Tensor], cache: Any, dtype: torch.dtype, in_pairs: tuple[str, ...], heads: int
) -> None:
    inputs = torch.randn(1, heads, 1, HEAD).to(dtype), *cache(dtype)
    found = compile_graph(trace(function, inputs, symbolic=False), replace(Config(), strict=True))
    (kernel,) = found.program.kernels.values()
    halves = tuple(b.name.rstrip("0123456789") for b in kernel.buffers if b.role == "scratch" and b.dtype == BF16)
    pays = function is not unpacked or heads > 2  # a tile of keys is rounded to pairs for several queries only
    assert halves == (in_pairs if pays else ())
    exact = function(*(x.double() if x.is_floating_point() else x for x in inputs))
    comparison = compare_outputs([function(*inputs)], found.program(list(inputs)), [exact], dtype)
    assert comparison.passed, comparison
