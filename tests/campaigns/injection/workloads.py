"""The models that are compiled while a function raises, and under which configuration."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusec.config import Config
from fusec.pass_cache import SUFFIX
from tests.campaigns.injection.planting import Place

FILES = ("artifacts", "cache", "ownership", "pruning", "scratch")
"""Stages that read and write files."""


class Model(nn.Module):
    """A layer of a decoder with a cache, and some operations around it."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.register_buffer("cache", torch.zeros(1, 2, 7, 4), persistent=False)

    def forward(self, tokens: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        """Return several outputs that take kernels, a write in place, a call of ATen, and views."""
        x = self.table(tokens)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        if not torch.is_grad_enabled():
            self.cache.index_copy_(2, at, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(y)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        z = F.gelu(self.conv(x.mT).mT) + torch.cat([x[:, 1:], x[:, :1]], 1).cumsum(1)
        w = torch.where(z > 0, z, z.sin()).softmax(-1)
        transformed: Tensor = torch.fft.rfft(x)
        return w, w.amax(-1).clamp(min=0.1), transformed.abs(), self.cache * 2


def pointwise(tokens: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    """Return what takes one small kernel."""
    return ((tokens * 0.5).exp() + at.sum(),)


@dataclass(frozen=True)
class Workload:
    """A function to compile, and how."""

    name: str
    function: Callable[[], Callable[..., tuple[Tensor, ...]]]
    config: Config = field(default_factory=Config)
    trains: bool = False
    dynamic: bool = False
    cached: tuple[str, ...] = (".so", ".traces")
    """Kinds of entries that the cache holds before the compile."""
    error: type[Exception] = RuntimeError
    """What functions raise."""
    stages: tuple[str, ...] = ()
    """Those whose functions raise; all where empty."""

    def takes(self, place: Place) -> bool:
        """Return whether a function is one that raises."""
        return not self.stages or place.stage in self.stages

    def results(self, backend: Any = None) -> tuple[Tensor, ...]:
        """Run it, and return outputs and gradients: eager where no backend compiles it."""
        torch.manual_seed(0)
        model = self.function()
        called = torch.compile(model, backend=backend, dynamic=self.dynamic) if backend else model
        with torch.set_grad_enabled(self.trains):
            outputs = called(torch.arange(7).remainder(5)[None], torch.arange(7))
        if not self.trains:
            return outputs
        sum(y.sum() for y in outputs).backward()  # type: ignore[union-attr]
        return *outputs, *(p.grad for p in model.parameters())  # type: ignore[attr-defined]


WORKLOADS = (
    Workload("inference", Model),
    Workload("training", Model, trains=True),
    Workload("dynamic", Model, dynamic=True),
    Workload("freeze", Model, Config(freeze=True)),
    Workload("verify", Model, Config(verify=True, record=True)),
    Workload("recalled", Model, cached=(".so", ".traces", SUFFIX)),
    Workload("triton", lambda: pointwise, Config(target="triton"), cached=(".traces",)),
    Workload("built", lambda: pointwise, cached=()),
    Workload("files", lambda: pointwise, cached=(".traces",), error=OSError, stages=FILES),
)
