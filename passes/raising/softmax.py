"""Softmax, plain, scaled and masked."""

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.rewriting.fusion import Dims, fusion

Rows = Annotated[Tensor, Dims("*batch cols")]
Mask = Annotated[Tensor, Dims("*mask cols")]
Kept = Annotated[Tensor, Dims("*mask cols", dtype="bool")]


@fusion
def softmax(x: Rows) -> Tensor:
    """Exponentials of each row, divided by their sum."""
    return F.softmax(x, dim=-1)


@softmax.spelling
def upcast(x: Tensor) -> Tensor:
    """In f32, rounded at the end."""
    return F.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)


@softmax.spelling
def by_hand(x: Tensor) -> Tensor:
    """Shifted by the maximum, by hand."""
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


@fusion
def scaled_masked_softmax(x: Rows, mask: Mask, scale: float) -> Tensor:
    """Softmax of scaled scores with an additive mask."""
    return softmax(x * scale + mask)


@scaled_masked_softmax.spelling
def masked_upcast(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The softmax in f32, rounded at the end."""
    return upcast(x * scale + mask)


@fusion
def divided_masked_softmax(x: Rows, mask: Mask, divisor: float) -> Tensor:
    """Softmax of divided scores with an additive mask."""
    return softmax(x / divisor + mask)


@fusion
def masked_softmax(x: Rows, mask: Mask) -> Tensor:
    """Softmax of scores with an additive mask."""
    return softmax(x + mask)


@fusion
def filled_softmax(x: Rows, mask: Kept, fill: float) -> Tensor:
    """Softmax of scores that are replaced by a number where the mask is set."""
    return softmax(x.masked_fill(mask, fill))


@fusion
def chosen_softmax(x: Rows, mask: Kept, fill: float) -> Tensor:
    """Softmax of scores that are replaced by a number where the mask is not set."""
    return softmax(torch.where(mask, x, fill))


@fusion
def scaled_softmax(x: Rows, scale: float) -> Tensor:
    """Softmax of scaled scores."""
    return softmax(x * scale)


@fusion
def divided_softmax(x: Rows, divisor: float) -> Tensor:
    """Softmax of divided scores."""
    return softmax(x / divisor)
