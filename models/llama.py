"""Llama: RMS norm, rotary embedding, grouped key and value heads, SwiGLU."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusec.models.cache import StaticCache, causal_mask
from fusec.models.checkpoint import load_weights, read_safetensors


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model."""

    vocabulary: int = 512
    hidden: int = 128
    intermediate: int = 352
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head: int = 32
    eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    """Factor by which Llama 3.1 lengthens the long wavelengths of a model trained on ``rope_context`` tokens."""
    rope_context: int = 8192
    tied: bool = False


PRESETS = {
    "tiny": LlamaConfig(),
    "1b": LlamaConfig(128256, 2048, 8192, 16, 32, 8, 64, rope_theta=500000.0, rope_factor=32.0, tied=True),
    "8b": LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, rope_theta=500000.0, rope_factor=8.0),
}
"""tiny: for tests; 1b: Llama 3.2 1B; 8b: Llama 3.1 8B."""


def rotary_angles(positions: Tensor, config: LlamaConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency, ``[batch, 1, sequence, head]``; computed in float32."""
    exponent = torch.arange(0, config.head, 2, device=positions.device).float() / config.head
    frequency = 1.0 / config.rope_theta**exponent
    if config.rope_factor != 1.0:
        turns = config.rope_context * frequency / (2 * math.pi)
        keep = ((turns - 1.0) / (4.0 - 1.0)).clamp(0, 1)  # waves with at most 1 turn in the context are stretched
        frequency = frequency * (keep + (1 - keep) / config.rope_factor)
    angle = positions[:, None, :, None].float() * frequency
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: the two halves of a head are the two axes of its planes."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Attention(nn.Module):
    """Causal self-attention with fewer key and value heads than query heads."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head = layer, config.head
        self.grouped = config.heads != config.kv_heads
        self.q_proj = nn.Linear(config.hidden, config.heads * config.head, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * config.head, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * config.head, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head, config.hidden, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, mask: Tensor | None, cache: StaticCache | None
    ) -> Tensor:
        """Attend from every token of x to those before it; ``mask`` of None means no padding and no cache."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if cache is not None:
            key, value = cache.update(self.layer, slots, key, value)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=self.grouped
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate, up, down."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, mask: Tensor | None, cache: StaticCache | None
    ) -> Tensor:
        """Attention and MLP, each on a norm of the residual stream and added to it."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, slots, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A decoder with a language-model head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight

    @classmethod
    def from_safetensors(cls, path: str | Path, config: LlamaConfig) -> "Llama":
        """The model with the weights of a file or folder under their published names."""
        model = cls(config)
        load_weights(model, read_safetensors(path), [("model.", "")])
        return model

    def new_cache(self, batch: int, capacity: int) -> StaticCache:
        """An empty cache."""
        c = self.config
        return StaticCache.empty(c.layers, batch, c.kv_heads, capacity, c.head, self.embed_tokens.weight)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        cache: StaticCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token, ``[batch, sequence, vocabulary]``.

        Args:
            tokens: ids, ``[batch, sequence]``.
            mask: 1 for a real token, ``[batch, sequence]``, or ``[batch, capacity]`` with a cache.
            cache: the tokens so far, to which these are added.
            positions: for the rotary embedding; by default the position in the sequence.
        """
        count = tokens.shape[1]
        slots = torch.arange(count, device=tokens.device) if cache is None else cache.slots(count)
        allowed = None
        if cache is not None or mask is not None:
            allowed = causal_mask(slots, count if cache is None else cache.capacity, mask)
        x = self.embed_tokens(tokens)
        cos, sin = rotary_angles(slots[None] if positions is None else positions, self.config, x.dtype)
        for block in self.layers:
            x = block(x, cos, sin, slots, allowed, cache)
        if cache is not None:
            cache.advance(count)
        return self.lm_head(self.norm(x))
