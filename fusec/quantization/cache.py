"""Key-value caches of 8 or 4 bits, for models of ``transformers``."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from fusec.errors import OptionError
from fusec.quantization.formats import Format, Parts, format_named


def quantized_cache(config: Any, capacity: int | None = None, format: str = "int8-row") -> Any:
    """Return a ``transformers`` cache of quantized keys and values, for ``generate(past_key_values=…)``.

    Scales have the dtype of the keys: in bfloat16, ``int8-row`` takes ``head_dim + 2`` bytes for each key and value,
    ``int4-g32`` ``head_dim / 2`` and 3 for each group. Eager dequantizes all of it at each step; compiled kernels do it
    within attention, and quantize where keys and values are made.

    Args:
        config: the configuration of the model.
        capacity: the tokens that a static cache holds; by default the cache grows. Layers with a sliding window hold
            that window. Layers without keys, such as those of linear attention, are left as they are.
        format: ``int8-row``, with a scale for each token and head; ``int8-gN``, with one for each N elements of a head;
            ``int4-row`` and ``int4-gN``, with zero points.

    Returns:
        A ``StaticCache`` or ``DynamicCache``.

    Raises:
        OptionError: where caches have no such format. The first update raises it where groups do not fill a head.
    """
    stored = format_named(format)
    if stored.activations or not stored.name.startswith("int"):
        raise OptionError(f"caches have no format {format}", fix="choose int8-row, int8-gN, int4-row or int4-gN")
    cache: Any = DynamicCache(config=config) if capacity is None else StaticCache(config=config, max_cache_len=capacity)
    plain = (DynamicLayer, StaticLayer)
    cache.layers = [QuantizedLayer(layer, stored) if isinstance(layer, plain) else layer for layer in cache.layers]
    return cache


class QuantizedLayer(CacheLayerMixin):  # type: ignore[misc]
    """The cache of one layer: a layer of ``transformers`` for the codes, and one for each of their scales."""

    supports_early_init = False

    def __init__(self, layer: Any, format: Format) -> None:
        """Create an empty cache in a format from an empty layer, which is static or grows."""
        self.format, self.parts = format, [layer, *(copy.deepcopy(layer) for _ in format.cover(torch.zeros(1, 1, 1)))]
        self.is_compileable, self.is_sliding = layer.is_compileable, layer.is_sliding
        self.is_croppable = layer.is_croppable

    @property
    def is_initialized(self) -> bool:
        """True after the first update."""
        return bool(self.parts[0].is_initialized)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales; 0 before the first update."""
        return sum(x.nbytes for layer in self.parts if layer.is_initialized for x in (layer.keys, layer.values))

    def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
        """Allocate memory for keys and values like these."""
        new = zip(self._quantized(keys).values(), self._quantized(values).values(), strict=True)
        for layer, (key, value) in zip(self.parts, new, strict=True):
            layer.lazy_initialization(key, value)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Quantize and store [batch, heads, tokens, head_dim]; return what attention reads, in their dtype."""
        new = self._quantized(keys), self._quantized(values)
        stored: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        for layer, name in zip(self.parts, new[0], strict=True):
            stored[0][name], stored[1][name] = layer.update(*(parts[name] for parts in new))
        first, second = (self.format.unpack(parts, keys.dtype) for parts in stored)
        return first, second

    def _quantized(self, rows: Tensor) -> Parts:
        """Return the parts of rows [*, head_dim]: the codes, then the scales."""
        groups = rows.unflatten(-1, (self.format.groups(rows.shape[-1]), -1))
        scales = self.format.cover(groups)
        return self.format.pack(self.format.encode(groups, scales).flatten(-2), scales)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the keys that the next update returns."""
        length, offset = self.parts[0].get_mask_sizes(query_length)
        return length, offset

    def get_seq_length(self) -> Any:
        """Return the number of stored tokens: an int, or a 0-d tensor."""
        return self.parts[0].get_seq_length()

    def get_max_length(self) -> int:
        """Return the capacity; -1 where there is none."""
        return int(self.parts[0].get_max_length())

    def reset(self) -> None:
        """Forget all tokens."""
        self._both("reset")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of the batch in this order, int64 [batch]."""
        self._both("reorder_cache", beam_idx)

    def crop(self, max_length: int) -> None:
        """Keep only the first tokens."""
        self._both("crop", max_length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        self._both("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch, int64."""
        self._both("batch_select_indices", indices)

    def offload(self) -> None:
        """Move the cache to the CPU."""
        self._both("offload")

    def prefetch(self) -> None:
        """Move it back."""
        self._both("prefetch")

    def _both(self, method: str, *arguments: Any) -> None:
        for layer in self.parts:
            getattr(layer, method)(*arguments)
