"""Norms that absorb the preceding residual add: the sum stays in registers, and is a second result."""

from typing import Annotated

from torch import Tensor
from torch.nn import functional as F

from fusec.passes.raising.norms import offset_rms_norm
from fusec.rewriting.fusion import Dims, fusion

Rows = Annotated[Tensor, Dims("*batch cols")]
Row = Annotated[Tensor, Dims("cols")]


@fusion
def add_rms_norm(x: Rows, residual: Rows, weight: Row | None, eps: float) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then scale each row by its reciprocal root mean square."""
    h = x + residual
    return F.rms_norm(h, (h.shape[-1],), weight, eps), h


@fusion
def add_offset_rms_norm(x: Rows, residual: Rows, weight: Row, eps: float) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then normalise with a weight stored as its distance from one."""
    h = x + residual
    return offset_rms_norm(h, weight, eps), h


@fusion
def add_layer_norm(x: Rows, residual: Rows, weight: Row | None, bias: Row | None, eps: float) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then shift and scale each row to mean 0 and variance 1."""
    h = x + residual
    return F.layer_norm(h, (h.shape[-1],), weight, bias, eps), h
