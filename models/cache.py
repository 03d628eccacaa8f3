"""The static key-value cache of the decoders: allocated once and written in place, so that its shape is constant."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class StaticCache:
    """Keys and values of every layer, ``[batch, heads, capacity, head]``."""

    keys: list[Tensor]
    values: list[Tensor]
    length: Tensor
    """Number of written slots: a 0-d int64 tensor, so that a compiled model need not be compiled again."""

    @classmethod
    def empty(cls, layers: int, batch: int, heads: int, capacity: int, head: int, like: Tensor) -> "StaticCache":
        """A cache of zeros, of the dtype and on the device of a tensor of the model."""

        def zeros() -> list[Tensor]:
            return [like.new_zeros(batch, heads, capacity, head) for _ in range(layers)]

        return cls(zeros(), zeros(), torch.zeros((), dtype=torch.int64, device=like.device))

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return self.keys[0].shape[2]

    def slots(self, count: int) -> Tensor:
        """The next free slots: ``[count]``."""
        return self.length + torch.arange(count, device=self.length.device)

    def update(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens; return those of the whole cache."""
        self.keys[layer].index_copy_(2, slots, key)
        self.values[layer].index_copy_(2, slots, value)
        return self.keys[layer], self.values[layer]

    def advance(self, count: int) -> None:
        """Count the tokens just written."""
        self.length.add_(count)


def causal_mask(slots: Tensor, keys: int, padding: Tensor | None) -> Tensor:
    """Return which keys each query may attend to, ``[batch or 1, 1, queries, keys]``: none after it, and no padding.

    Args:
        slots: position of each query among the keys.
        keys: number of keys.
        padding: ``[batch, keys]``, 1 or True for a real token.
    """
    allowed = torch.arange(keys, device=slots.device) <= slots[:, None]
    allowed = allowed[None, None]
    return allowed if padding is None else allowed & padding.bool()[:, None, None]
