"""Sample inputs: token ids with padding on either side, and images."""

from typing import Literal

import torch
from torch import Tensor

Padding = Literal["none", "left", "right"]


def padded_mask(batch: int, length: int, padding: Padding, seed: int = 0) -> Tensor:
    """A mask ``[batch, length]`` of int64, 1 for a real token; rows are padded by random amounts, the first by 0."""
    draw = torch.Generator().manual_seed(seed)
    real = torch.randint(max(1, length // 2), max(2, length), (batch, 1), generator=draw)
    real[0] = length
    if padding == "none":
        real[:] = length
    place = torch.arange(length).expand(batch, -1)
    return (place >= length - real if padding == "left" else place < real).long()


def sample_tokens(vocabulary: int, batch: int, length: int, seed: int = 0) -> Tensor:
    """Return random token ids ``[batch, length]`` without the first three, which are special tokens by custom."""
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def sample_images(batch: int, channels: int, size: int, seed: int = 0, width: int | None = None) -> Tensor:
    """Random images ``[batch, channels, size, width]``, by default square."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(batch, channels, size, size if width is None else width, generator=draw)
