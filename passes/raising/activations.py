"""Activations as model code writes them."""

import math
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.rewriting.fusion import Dims, fusion

Rows = Annotated[Tensor, Dims("*batch cols")]


@fusion
def gelu(x: Rows) -> Tensor:
    """x·Φ(x), with Φ the normal distribution."""
    return F.gelu(x)


@gelu.spelling
def divided_by_root_two(x: Tensor) -> Tensor:
    """The error function of x over √2, half of x first."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@gelu.spelling
def times_inverse_root_two(x: Tensor) -> Tensor:
    """The error function of x times 1/√2, half of x first."""
    return x * 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))


@fusion
def gelu_tanh(x: Rows) -> Tensor:
    """Gelu by the tanh of a cubic polynomial."""
    return F.gelu(x, approximate="tanh")


@gelu_tanh.spelling
def with_power(x: Tensor) -> Tensor:
    """The cube as a power."""
    return gelu_tanh_scaled(x, math.sqrt(2.0 / math.pi))


@gelu_tanh.spelling
def factored(x: Tensor) -> Tensor:
    """The polynomial factored, its constant cut to ten digits."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


@fusion
def gelu_quick(x: Rows) -> Tensor:
    """Gelu by a logistic curve."""
    return x * torch.sigmoid(1.702 * x)


@fusion
def silu(x: Rows) -> Tensor:
    """x times its logistic curve."""
    return F.silu(x)


@silu.spelling
def times_sigmoid(x: Tensor) -> Tensor:
    """As a product."""
    return x * torch.sigmoid(x)


@silu.spelling
def over_exponential(x: Tensor) -> Tensor:
    """As a quotient."""
    return x / (1.0 + torch.exp(-x))


@fusion
def gelu_tanh_scaled(x: Rows, slope: float) -> Tensor:
    """Gelu by the tanh of a cubic polynomial, with √(2/π) as a number of its own."""
    return 0.5 * x * (1.0 + torch.tanh(slope * (x + 0.044715 * torch.pow(x, 3.0))))
