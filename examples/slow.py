"""A program whose model is compiled more often than it should be: docs/debugging.md finds out why.

fusec trace examples/slow.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Model(nn.Module):
    """Attention to itself, with a line that Dynamo cannot trace and a sum that ATen computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """The model's result."""
        x = self.norm(x)
        print("attending to", len(x), "rows")
        return torch.logcumsumexp(self.out(F.scaled_dot_product_attention(x, x, x)), 0)


def main() -> None:
    """Call the compiled model on inputs of two lengths."""
    model = torch.compile(Model().eval(), backend="fusec")
    with torch.no_grad():
        for length in (8, 9):
            model(torch.randn(length, 64))


if __name__ == "__main__":
    main()
