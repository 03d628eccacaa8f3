"""One more token: what a decoder is given whose static caches hold some already."""

from typing import Any

import torch

Inputs = dict[str, Any]


def one_more(module: Any, prompt: torch.Tensor, room: int, masked: bool = False) -> Inputs:
    """What a model is called with after a prompt, which it reads here; on torch's meta device nothing is computed.

    Args:
        module: a decoder, or an encoder with a decoder, which reads the prompt on both sides.
        prompt: tokens of some sequences.
        room: tokens that a cache has room for.
        masked: whether the masks are made before, as ``generate()`` does it; otherwise the place in a cache says
            what is hidden.
    """
    from transformers import EncoderDecoderCache, StaticCache

    cache: Any = StaticCache(config=module.config, max_cache_len=room)
    if not module.config.is_encoder_decoder:
        module(prompt, past_key_values=cache, use_cache=True)
        inputs = {"input_ids": prompt[:, -1:], "past_key_values": cache, "use_cache": True}
        return inputs | ({"attention_mask": _masks(module, cache, prompt)} if masked else {})
    both = EncoderDecoderCache(cache, StaticCache(config=module.config, max_cache_len=prompt.shape[1]))
    read = module(prompt, decoder_input_ids=prompt, past_key_values=both, use_cache=True)
    inputs = {
        "encoder_outputs": (read.encoder_last_hidden_state,),
        "decoder_input_ids": prompt[:, -1:],
        "past_key_values": both,
        "use_cache": True,
    }
    if masked:
        inputs |= {"decoder_attention_mask": _masks(module, cache, prompt), "attention_mask": torch.ones_like(prompt)}
    return inputs


def _masks(module: Any, cache: Any, prompt: torch.Tensor) -> Any:
    """What lies in a cache by then and a query may see; by kind of attention where a model has several."""
    kinds = getattr(module.config, "layer_types", None) or ["full_attention"] * len(cache.layers)
    batch, held = prompt.shape
    masks = {}
    for kind, layer in zip(kinds, cache.layers, strict=True):
        keys = torch.arange(layer.max_cache_len, device=prompt.device)
        masks[kind] = (keys <= held).expand(batch, 1, 1, -1).contiguous()
    return masks if len(masks) > 1 else next(iter(masks.values()))
