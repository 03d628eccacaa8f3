"""Epilogues of a matmul on the same tile: bias, activation, residual."""

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.rewriting.fusion import Dims, fusion

Inner = Annotated[Tensor, Dims("*batch inner")]
Weight = Annotated[Tensor, Dims("cols inner")]
InputMajor = Annotated[Tensor, Dims("inner cols")]
Row = Annotated[Tensor, Dims("cols")]
Rows = Annotated[Tensor, Dims("*batch cols")]


@fusion
def linear_gelu(x: Inner, weight: Weight, bias: Row | None) -> Tensor:
    """A projection, its bias, and gelu."""
    return F.gelu(F.linear(x, weight, bias))


@fusion
def linear_gelu_tanh(x: Inner, weight: Weight, bias: Row | None) -> Tensor:
    """A projection, its bias, and gelu by its tanh form."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


@fusion
def linear_relu(x: Inner, weight: Weight, bias: Row | None) -> Tensor:
    """A projection, its bias, and what is positive of it."""
    return F.relu(F.linear(x, weight, bias))


@fusion
def linear_tanh(x: Inner, weight: Weight, bias: Row | None) -> Tensor:
    """A projection, its bias, and tanh: the pooler of an encoder."""
    return torch.tanh(F.linear(x, weight, bias))


@fusion
def bias_residual(x: Rows, bias: Row, residual: Rows) -> Tensor:
    """The bias of a projection, then the residual stream."""
    return x + bias + residual


@fusion
def linear_gelu_tanh_input_major(x: Inner, weight: InputMajor, bias: Row | None) -> Tensor:
    """A projection whose weight is stored input by output, its bias, and gelu by its tanh form."""
    return F.gelu(F.linear(x, weight.t(), bias), approximate="tanh")
