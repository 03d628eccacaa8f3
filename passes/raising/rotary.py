"""Rotary position embedding: halves swapped, or neighbours rotated in pairs."""

from typing import Annotated

import torch
from torch import Tensor

from fusec.rewriting.fusion import Dims, fusion

Heads = Annotated[Tensor, Dims("*batch 2*half")]
Angles = Annotated[Tensor, Dims("*angles 2*half")]
HalfAngles = Annotated[Tensor, Dims("*angles half")]


@fusion
def rotary_embedding(x: Heads, cos: Angles, sin: Angles) -> Tensor:
    """Each element and its partner half a row away, rotated by an angle of its position."""
    low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-high, low), -1) * sin


@fusion
def rotary_embedding_halves(x: Heads, cos: HalfAngles, sin: HalfAngles) -> Tensor:
    """The same with one angle for each pair, computed half by half."""
    low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


@rotary_embedding_halves.spelling
def low_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The products of the second half in the other order."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, low * sin + high * cos), -1)


@fusion
def rotary_embedding_pairs(x: Heads, cos: HalfAngles, sin: HalfAngles) -> Tensor:
    """Neighbouring elements rotated in pairs; first members first in the result."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)
