"""Tensors to run programs on: ordinary and special numbers, in every layout that a type promises."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusec.ir.graph import Graph
from fusec.ir.types import ScalarType, TensorType, evaluate_sizes
from fusec.reference.dtypes import torch_dtype

KINDS = ("normal", "small integers", "normal", "special", "large", "tiny", "positive", "zeros")
_SUMS = ("sum", "prod", "contraction", "convolution")
_SPECIAL = (0.0, -0.0, torch.inf, -torch.inf, torch.nan)


def arguments(graph: Graph, draws: Sequence[int]) -> list[Any]:
    """What a graph is called with; the numbers decide the symbol, the seed and the kind of each input."""
    rows, *kinds = draws
    symbols = {"s0": (5, 1, 2, 37)[rows % 4]}
    summed = any(node.op.name in _SUMS for node in graph)
    generator, given = torch.Generator().manual_seed(sum(draws)), list[Any]()
    for value, kind in zip(graph.inputs, [*kinds, *[0] * len(graph.inputs)], strict=False):
        if isinstance(value.type, ScalarType):
            given.append(symbols["s0"])
            continue
        assert isinstance(value.type, TensorType)
        shape, strides = (evaluate_sizes(sizes, symbols) for sizes in (value.type.shape, value.type.strides))
        dtype = torch_dtype(value.type.dtype)
        given.append(laid_out(numbers(shape, dtype, KINDS[kind % len(KINDS)], generator, summed), strides))
    return given


def laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    """The numbers with other strides, each with memory of its own or repeated."""
    room = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) if x.numel() else 0
    shape, memory = x.shape, torch.zeros(room, dtype=x.dtype)
    for d, stride in enumerate(strides):
        x = x.narrow(d, 0, min(1, x.shape[d])) if stride == 0 else x
    memory.as_strided(x.shape, tuple(strides)).copy_(x)
    return memory.as_strided(shape, tuple(strides))


def numbers(
    shape: Sequence[int], dtype: torch.dtype, kind: str, generator: torch.Generator, summed: bool = True
) -> Tensor:
    """Numbers of a kind that suit an element type, and sums of products: whether these overflow depends on order."""
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < (0.0 if kind == "zeros" else 0.5)
    if not dtype.is_floating_point:
        return _integers(shape, dtype, kind, generator)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "zeros":
        x = x * 0.0
    elif kind == "small integers":
        x = x.mul(2).round()
    elif kind == "positive":
        x = x.abs() + 0.1
    elif kind in ("large", "tiny"):
        limits = torch.finfo(dtype)
        x = x * (min(limits.max, 1e30) ** 0.5 if kind == "large" else limits.tiny)
    elif kind == "special" and x.numel():
        chosen = torch.randint(0, 2 * len(_SPECIAL), shape, generator=generator)
        limits = torch.finfo(dtype)
        for i, number in enumerate((*_SPECIAL, limits.max**0.5 / 64 if summed else limits.max, limits.tiny / 4)):
            x[chosen == i] = number
    return x.to(dtype)


def _integers(shape: Sequence[int], dtype: torch.dtype, kind: str, generator: torch.Generator) -> Tensor:
    limits = torch.iinfo(dtype)
    least, most = (0, 1) if kind == "zeros" else (max(limits.min, -6), 7)
    x = torch.randint(least, most, shape, generator=generator)
    if kind in ("special", "large", "tiny"):
        chosen = torch.randint(0, 6, shape, generator=generator)
        x = torch.where(chosen == 0, limits.min, torch.where(chosen == 1, limits.max, x))
    return x.to(dtype)
