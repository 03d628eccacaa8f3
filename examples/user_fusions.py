"""Three fusions that fusec does not know, declared by their maths alone, and a model that gets kernels for them.

    python examples/user_fusions.py
    fusec explain examples/user_fusions.py     (``model`` and ``inputs`` are what it looks for)

Pattern, kernels and tests are derived from each declaration. The tests take one line in a test file
(``from fusec.testing import derived_tests``):

    test_my_fusions = derived_tests(user_fusions)
"""

from copy import deepcopy
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusec
from fusec import Dims, fusion
from fusec.reference.contract import compare_outputs

# Dims constrain shapes: *batch is any number of leading dims, and equal names are equal sizes.
Rows = Annotated[Tensor, Dims("*batch cols")]
Inner = Annotated[Tensor, Dims("*batch inner")]
Weight = Annotated[Tensor, Dims("cols inner")]
Row = Annotated[Tensor, Dims("cols")]


@fusion
def soft_cap(x: Rows, cap: float) -> Tensor:
    """Hold every element smoothly between -cap and cap; the cap is whatever number a model has there."""
    return cap * torch.tanh(x / cap)


@soft_cap.where
def cap_is_positive(cap: float) -> bool:
    """The cap is positive."""
    return cap > 0


@fusion
def direction_and_length(x: Rows, eps: float) -> tuple[Tensor, Tensor]:
    """Each row scaled to length one, and the length it had."""
    length = torch.sqrt(x.pow(2).sum(-1, keepdim=True) + eps)
    return x / length, length


@direction_and_length.spelling
def by_inverse_length(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """A product with the inverse of the length instead of a division."""
    square = x.pow(2).sum(-1, keepdim=True) + eps
    return x * torch.rsqrt(square), torch.sqrt(square)


@fusion
def scaled_branch(x: Inner, weight: Weight, bias: Row | None, scale: Row, residual: Rows) -> Tensor:
    """A projection that joins the residual stream, scaled per column."""
    return residual + scale * F.linear(x, weight, bias)


class Block(nn.Module):
    """Plain torch, which neither knows of the declarations nor writes the maths as they do."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The capped rows, and their lengths before."""
        square = (x * x).sum(dim=-1, keepdim=True) + 1e-6
        y = square.rsqrt() * x
        x = torch.addcmul(x, self.scale, self.project(y))
        return (x / 30.0).tanh() * 30.0, square.sqrt()


def model() -> Block:
    """The block, with the same weights each time."""
    torch.manual_seed(0)
    return Block().eval()


def inputs() -> Tensor:
    """Two batches of five rows."""
    return torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))


def main() -> None:
    """Compile the block, compare it with eager, and print how it was compiled."""
    block, x = model(), inputs()
    compiled = torch.compile(block, backend=fusec.backend)  # or "fusec", wherever it is installed
    with torch.no_grad():
        comparison = compare_outputs(block(x), compiled(x), deepcopy(block).double()(x.double()))
    assert comparison.passed, comparison

    explanation = fusec.explain(block, x)
    print(explanation)
    print("Fusions found:", ", ".join(f"{name} ×{count}" for name, count in explanation.regions.items()))
    print("Against eager:", comparison)


if __name__ == "__main__":
    main()
