"""Attention for continuous batching of ``transformers`` whose paged cache is updated and read inside the graph."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusec.errors import OptionError

FEW = 64
"""Tokens up to which each reads only its own keys; above, blocks of queries share them, and a mask tells them apart."""


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store new keys and values in the cache's pages, and attend to those of each token's request.

    ``transformers`` breaks the graph at each layer where its own attention updates the cache. Register this one for
    continuous batching, and the model, the processors and the choice of the token are one graph::

        AttentionInterface.register("paged|eager", fusec.paged_attention)
        model.set_attn_implementation("eager")
        model.generate_batch(…, continuous_batching_config=ContinuousBatchingConfig(
            varlen_compile_config=CompileConfig(backend="fusec", mode=None)))

    Raises:
        OptionError: for attention with sinks or soft caps, and outside of continuous batching.
    """
    if cache is None or hasattr(module, "sinks") or kwargs.get("softcap") is not None:
        raise OptionError(
            "fusec.paged_attention computes plain attention in continuous batching",
            fix="set another attention implementation for this model",
        )
    allocator = cache.layer_to_allocator[module.layer_idx]
    read, write = (kwargs[name][allocator.index] for name in ("read_index", "write_index"))
    tokens, few = query.shape[2], allocator.layer_type == "full_attention" and query.shape[2] <= FEW
    seen, wanted = attention_mask, read
    if few and read.numel():
        seen, wanted = _own_keys(read, tokens, kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"][allocator.layer_type])
        query = query.transpose(0, 2)
    rows = (x.squeeze(0).transpose(0, 1) for x in (key, value))
    found = allocator.update(*rows, module.layer_idx, wanted.flatten(), write)
    key, value = (x.unflatten(0, (query.shape[0], -1)).transpose(1, 2) for x in found)
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True)
    return result.reshape(1, tokens, *query.shape[1::2]) if query.shape[2] == 1 else result.transpose(1, 2), None


def _own_keys(read: Tensor, tokens: int, starts: Tensor, key_starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of its keys each token sees, bool [tokens, 1, 1, keys], and their rows, int64 [tokens, keys].

    Args:
        read: rows of the keys of all requests, one request after another.
        tokens: how many there are; those behind the last request are padding.
        starts: the first token of each request, and the end of the last.
        key_starts: the same for keys.
    """
    token, place = torch.arange(tokens, device=read.device), torch.arange(read.shape[0], device=read.device)
    request = (token[:, None] >= starts[1:]).sum(-1).clamp(max=starts.shape[0] - 2)
    first = key_starts[request]
    count = key_starts[request + 1] - first - (starts[request + 1] - 1 - token)
    count = torch.where(token < starts[-1], count, 0)
    rows = read[(first[:, None] + place).clamp(max=read.shape[0] - 1)]
    return (place < count[:, None])[:, None, None], rows
