"""A model with a rewrite of its user's that is false: docs/debugging.md finds it.

fusec bisect examples/wrong_rewrite.py
"""

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusec import rewrite
from fusec.rewriting.fusion import Dims

Rows = Annotated[Tensor, Dims("*batch cols")]


@rewrite
def squared_sine(x: Rows) -> Tensor:
    """The square of a sine."""
    return torch.sin(x) * torch.sin(x)


@squared_sine.to
def _(x: Rows) -> Tensor:
    return (1 - torch.cos(x)) / 2  # of twice the angle, it should be


class Block(nn.Module):
    """A norm, a projection and a periodic activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.RMSNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """The block's share of the residual stream, added to it."""
        h = self.up(self.norm(x))
        return x + F.silu(h) + torch.sin(h) * torch.sin(h)


def model() -> Block:
    """The block, with the same weights each time."""
    torch.manual_seed(0)
    return Block().eval()


def inputs() -> Tensor:
    """Eight rows."""
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
