"""Random inputs with the statistics of recorded ones, so that a reproducer needs no data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Recorded: TypeAlias = "Tensor | int | float | bool"
_MOST = 1 << 53
"""The largest integer that is drawn; statistics are in float64."""


@dataclass(frozen=True)
class SyntheticTensor:
    """The type of a tensor, and the statistics of its finite elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    low: float
    high: float
    mean: float = 0.0
    std: float = 0.0
    special: tuple[tuple[str, float], ...] = ()
    """Shares of ``nan``, ``inf`` and ``-inf``."""
    ordered: bool = False
    """True for integers that count up from ``low``, as positions do."""

    def draw(self, generator: torch.Generator) -> Tensor:
        """Return the tensor: floats are normal, cut off at the ends; integers and booleans are uniform."""
        dtype = getattr(torch, self.dtype)
        x = self._elements(generator, dtype)
        needed = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)) if x.numel() else 0
        out = torch.zeros(needed, dtype=dtype).as_strided(self.shape, self.stride)
        fixed = [0 if step == 0 else slice(None) for step in self.stride]  # an expanded dim has one element
        out[tuple(fixed)] = x[tuple(fixed)]
        return out

    def _elements(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        if self.ordered:
            return (torch.arange(math.prod(self.shape)) + int(self.low)).reshape(self.shape).to(dtype)
        if dtype is torch.bool:
            return torch.rand(self.shape, generator=generator) < self.mean
        if not dtype.is_floating_point:
            low, high = max(int(self.low), -_MOST), min(int(self.high), _MOST)
            return torch.randint(low, high + 1, self.shape, generator=generator).to(dtype)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64) * self.std + self.mean
        x = x.clamp(self.low, self.high)
        for name, share in self.special:
            x[torch.rand(self.shape, generator=generator) < share] = float(name)
        return x.to(dtype)


def describe(inputs: Sequence[Recorded]) -> list[Any]:
    """Return a description of each tensor; numbers are kept. Empty where there is a complex tensor."""
    if any(isinstance(x, Tensor) and x.is_complex() for x in inputs):
        return []
    return [_like(x) if isinstance(x, Tensor) else x for x in inputs]


def draw(described: Sequence[Any], seed: int = 0) -> list[Any]:
    """Return tensors for descriptions."""
    generator = torch.Generator().manual_seed(seed)
    return [x.draw(generator) if isinstance(x, SyntheticTensor) else x for x in described]


def _like(x: Tensor) -> SyntheticTensor:
    type = (tuple(x.shape), tuple(x.stride()), str(x.dtype).removeprefix("torch."))
    values = x.detach().cpu().double().flatten()
    finite = values[values.isfinite()]
    if not finite.numel():
        finite = torch.zeros(1, dtype=torch.float64)
    low, high = (float(bound) for bound in finite.aminmax())
    special = ((name, float((values == float(name)).double().mean())) for name in ("inf", "-inf"))
    shares = [*special, ("nan", float(values.isnan().double().mean()))] if values.numel() else []
    counts = torch.arange(len(values), dtype=torch.float64) + low
    return SyntheticTensor(
        *type, low, high, float(finite.mean()), float(finite.std(correction=0)),
        tuple((name, share) for name, share in shares if share > 0),
        not x.is_floating_point() and x.dtype is not torch.bool and len(values) > 1 and bool((values == counts).all()),
    )  # fmt: skip
