"""The transformers models that fusec is checked and measured on, in any size, with weights that hide nothing."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusec.models.inputs import Padding, padded_mask, sample_images, sample_tokens
from fusec.models.weights import redraw

os.environ.setdefault("HF_HUB_OFFLINE", "1")
VOCABULARY = 512
WINDOW = 8
"""Sliding windows are shorter than the inputs, so that they matter."""

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """How large a model is built."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def intermediate(self) -> int:
        """Width of a gated MLP."""
        return self.hidden * 11 // 4


@dataclass(frozen=True)
class Family:
    """A model family: the class in transformers, its configuration for given sizes, and what its inputs are."""

    name: str
    model: str
    config: str
    options: Callable[[Sizes], dict[str, Any]]
    inputs: str = "tokens"
    """A key of ``INPUTS``."""
    routed: bool = False
    """Whether a router chooses experts."""
    mixing: str = ""
    """What takes the place of attention, where that is more than products, convolutions and arithmetic."""

    @property
    def exempt(self) -> str:
        """Why what is promised of dense transformers, attention and an MLP in every layer, does not cover it."""
        return "a router chooses experts" if self.routed else self.mixing and f"{self.mixing} takes attention's place"

    def build(self, sizes: Sizes | None = None, attention: str = "sdpa", seed: int = 0) -> nn.Module:
        """The model in float32, in evaluation mode, every parameter redrawn."""
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(seed)
        kind = getattr(transformers, self.model)
        if attention == "sdpa" and not kind._supports_sdpa:
            attention = "eager"
        config = getattr(transformers, self.config)(attn_implementation=attention, **self.options(sizes or Sizes()))
        config.use_cache = False
        return redraw(kind(config).eval(), seed)

    def sample(self, batch: int, length: int, padding: Padding, seed: int = 0) -> Inputs:
        """Inputs by argument name; without padding no mask is given."""
        return {name: made for part in INPUTS[self.inputs] for name, made in part(batch, length, padding, seed).items()}


def _tokens(batch: int, length: int, padding: Padding, seed: int) -> Inputs:
    inputs = {"input_ids": sample_tokens(VOCABULARY, batch, length, seed)}
    return inputs if padding == "none" else inputs | {"attention_mask": padded_mask(batch, length, padding, seed)}


def _decoder_tokens(batch: int, length: int, padding: Padding, seed: int) -> Inputs:
    return {"decoder_input_ids": sample_tokens(VOCABULARY, batch, max(1, length // 2), seed + 1)}


def _images(batch: int, length: int, padding: Padding, seed: int) -> Inputs:
    return {"pixel_values": sample_images(batch, 3, 32, seed)}


def _waves(batch: int, length: int, padding: Padding, seed: int) -> Inputs:
    samples = 20 * length + 25
    inputs = {"input_values": sample_images(batch, 1, 1, seed, samples).flatten(1)}
    return inputs if padding == "none" else inputs | {"attention_mask": padded_mask(batch, samples, "right", seed)}


def _spectrogram(batch: int, length: int, padding: Padding, seed: int) -> Inputs:
    return {"input_features": sample_images(batch, 1, 32, seed, 64).flatten(1, 2)}


INPUTS: dict[str, tuple[Callable[[int, int, Padding, int], Inputs], ...]] = {
    "tokens": (_tokens,),
    "tokens to tokens": (_tokens, _decoder_tokens),
    "images": (_images,),
    "tokens and images": (_tokens, _images),
    "speech": (_waves,),
    "spectrogram to tokens": (_spectrogram, _decoder_tokens),
}
"""What the inputs of a model may be."""


def _decoder(sizes: Sizes, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads // 2,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        **more,
    }


def _encoder(sizes: Sizes, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": sizes.hidden,
        "intermediate_size": 4 * sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "pad_token_id": 0,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **more,
    }


def _gemma3(sizes: Sizes) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    return _decoder(
        sizes,
        head_dim=sizes.head,
        query_pre_attn_scalar=sizes.head,
        sliding_window=WINDOW,
        layer_types=[kinds[layer % 2] for layer in range(sizes.layers)],
    )


def _deepseek(sizes: Sizes) -> dict[str, Any]:
    return _decoder(
        sizes,
        num_key_value_heads=sizes.heads,
        moe_intermediate_size=sizes.hidden // 2,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=sizes.hidden // 2,
        kv_lora_rank=sizes.hidden // 4,
        qk_rope_head_dim=sizes.head // 2,
        qk_nope_head_dim=sizes.head,
        v_head_dim=sizes.head,
    )


def _gpt2(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "n_embd": sizes.hidden,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _opt(sizes: Sizes) -> dict[str, Any]:
    return _encoder(sizes, ffn_dim=4 * sizes.hidden, word_embed_proj_dim=sizes.hidden, dropout=0.0)


def _t5(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "d_model": sizes.hidden,
        "d_kv": sizes.head,
        "d_ff": sizes.intermediate,
        "num_layers": sizes.layers,
        "num_heads": sizes.heads,
        "dropout_rate": 0.0,
    }


def _vit(sizes: Sizes) -> dict[str, Any]:
    options = _encoder(sizes, image_size=32, patch_size=8)
    return {name: value for name, value in options.items() if name not in ("vocab_size", "pad_token_id")}


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", "LlamaForCausalLM", "LlamaConfig", _decoder),
        Family("mistral", "MistralForCausalLM", "MistralConfig", lambda s: _decoder(s, sliding_window=WINDOW)),
        Family("qwen2", "Qwen2ForCausalLM", "Qwen2Config", _decoder),
        Family("qwen3", "Qwen3ForCausalLM", "Qwen3Config", lambda s: _decoder(s, head_dim=s.head)),
        Family("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", _gemma3),
        Family("phi3", "Phi3ForCausalLM", "Phi3Config", lambda s: _decoder(s, resid_pdrop=0.0)),
        Family("gpt2", "GPT2LMHeadModel", "GPT2Config", _gpt2),
        Family("opt", "OPTForCausalLM", "OPTConfig", _opt),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            "MixtralConfig",
            lambda s: _decoder(s, intermediate_size=s.hidden, num_local_experts=4),
            routed=True,
        ),
        Family("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", _deepseek, routed=True),
        Family("bert", "BertModel", "BertConfig", _encoder),
        Family("roberta", "RobertaModel", "RobertaConfig", _encoder),
        Family("t5", "T5ForConditionalGeneration", "T5Config", _t5, inputs="tokens to tokens"),
        Family("vit", "ViTModel", "ViTConfig", _vit, inputs="images"),
    )
}


def chosen(names: str, known: Mapping[str, Family] = FAMILIES) -> list[Family]:
    """The families named, separated by commas; all when empty.

    Raises:
        SystemExit: for an unknown name.
    """
    wanted = [name for name in names.split(",") if name] or list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"unknown model {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in wanted]
