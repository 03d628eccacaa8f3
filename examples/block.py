"""A transformer's MLP block as model code writes it, with a mistyped constant for ``fusec explain`` to find.

fusec explain examples/block.py
fusec view examples/block.py -o report.html
"""

import torch
from torch import Tensor, nn


class Norm(nn.Module):
    """Root mean square norm, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Each row over its root mean square, scaled per column."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """Norm, two projections with a GELU between them, residual."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's share of the residual stream, added to it."""
        h = self.up(self.norm(x))
        h = 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044 * h**3)))  # GELU has 0.044715 here
        return x + self.down(h)


def model() -> Block:
    """The block, with the same weights each time."""
    torch.manual_seed(0)
    return Block().eval()


def inputs() -> Tensor:
    """One sequence of eight tokens."""
    return torch.randn(1, 8, 256, generator=torch.Generator().manual_seed(1))
