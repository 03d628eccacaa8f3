"""Norms as model code writes them: root mean square and layer norm, with upcasts, offsets and without weights."""

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.rewriting.fusion import Dims, fusion

Rows = Annotated[Tensor, Dims("*batch cols")]
Row = Annotated[Tensor, Dims("cols")]


@fusion
def layer_norm(x: Rows, weight: Row | None, bias: Row | None, eps: float) -> Tensor:
    """Each row shifted to mean 0 and scaled to variance 1, then scaled and shifted per column."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@layer_norm.spelling
def by_hand(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Mean and variance by hand, in the dtype of the rows."""
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


@layer_norm.spelling
def by_hand_upcast(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Mean and variance by hand in f32, rounded before the scale."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    normed = normed if weight is None else weight * normed
    return normed if bias is None else normed + bias


@fusion
def rms_norm(x: Rows, weight: Row | None, eps: float) -> Tensor:
    """Each row divided by its root mean square, then scaled by a weight per column."""
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if weight is None else weight * normed


@rms_norm.spelling
def scaled_before_rounding(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The weight is applied in f32, and the result rounded once, as torch's own operation does."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


@rms_norm.spelling
def own_precision(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """No upcast: every step rounds to the type of the rows."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


@rms_norm.spelling
def divided_by_root(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """A division by the root instead of a product with its inverse."""
    wide = x.float()
    normed = (wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if weight is None else weight * normed


@rms_norm.spelling
def composite_operation(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The operation of torch itself."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


@fusion
def offset_rms_norm(x: Rows, weight: Row, eps: float) -> Tensor:
    """Root mean square norm whose weight is stored as its distance from one."""
    return scaled_before_rounding(x, 1.0 + weight.float(), eps)
