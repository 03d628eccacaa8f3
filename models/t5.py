"""T5: encoder and decoder with relative positions as a bias on the attention scores, which are not scaled."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusec.models.cache import StaticCache, causal_mask
from fusec.models.checkpoint import load_weights, read_safetensors


@dataclass(frozen=True)
class T5Config:
    """The sizes of a model."""

    vocabulary: int = 512
    hidden: int = 128
    intermediate: int = 256
    layers: int = 2
    heads: int = 4
    head: int = 32
    buckets: int = 32
    distance: int = 128
    """From this distance on, all positions share a bucket."""
    eps: float = 1e-6
    gated: bool = False
    """Version 1.1 and Flan: a GEGLU, and a head of its own; else a relu, and a head tied to the embedding."""


PRESETS = {
    "tiny": T5Config(),
    "tiny-gated": T5Config(gated=True),
    "small": T5Config(32128, 512, 2048, 6, 8, 64),
}
"""tiny and tiny-gated: for tests; small: the published T5 of 60 million parameters."""

PUBLISHED = [
    ("block.", "layers."),
    ("layer.0.SelfAttention.", "attention."),
    ("layer.0.layer_norm", "attention_norm"),
    ("layer.1.EncDecAttention.", "cross_attention."),
    ("layer.1.DenseReluDense.", "mlp."),
    ("layer.2.DenseReluDense.", "mlp."),
    ("layer.2.layer_norm", "mlp_norm"),
]
"""Published parameter names and those of this model, in order; ``layer.1.layer_norm`` depends on the side."""


def position_bucket(offset: Tensor, buckets: int, distance: int, both_sides: bool) -> Tensor:
    """The bucket of key position minus query position: exact when near, logarithmic when far."""
    if both_sides:
        buckets //= 2
        first = (offset > 0).long() * buckets
        offset = offset.abs()
    else:
        first = torch.zeros_like(offset)
        offset = (-offset).clamp_min(0)
    exact = buckets // 2
    far = torch.log(offset.float() / exact) / math.log(distance / exact) * (buckets - exact)
    far = (exact + far.long()).clamp_max(buckets - 1)
    return first + torch.where(offset < exact, offset, far)


class T5Attention(nn.Module):
    """Attention without a scale; the positions come as a bias."""

    def __init__(self, config: T5Config, biased: bool = False) -> None:
        super().__init__()
        inner = config.heads * config.head
        self.head = config.head
        self.q = nn.Linear(config.hidden, inner, bias=False)
        self.k = nn.Linear(config.hidden, inner, bias=False)
        self.v = nn.Linear(config.hidden, inner, bias=False)
        self.o = nn.Linear(inner, config.hidden, bias=False)
        if biased:
            self.relative_attention_bias = nn.Embedding(config.buckets, config.heads)

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Both ``[batch, heads, sequence, head]``."""
        return self._heads(self.k(states)), self._heads(self.v(states))

    def forward(self, x: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Attend from x to keys; ``bias`` is added to the scores, with −inf where a key is masked."""
        query = self._heads(self.q(x))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
        return self.o(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head).transpose(1, 2)


class MLP(nn.Module):
    """A relu between two projections, or GEGLU."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.gated = config.gated
        if config.gated:
            self.wi_0 = nn.Linear(config.hidden, config.intermediate, bias=False)
            self.wi_1 = nn.Linear(config.hidden, config.intermediate, bias=False)
        else:
            self.wi = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.wo = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Up, activation, down."""
        if self.gated:
            return self.wo(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x))
        return self.wo(F.relu(self.wi(x)))


class Block(nn.Module):
    """One layer of the encoder, or of the decoder with its attention to the encoder's states."""

    def __init__(self, config: T5Config, layer: int, decoder: bool) -> None:
        super().__init__()
        self.layer = layer
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.attention = T5Attention(config, biased=layer == 0)
        if decoder:
            self.cross_attention_norm = nn.RMSNorm(config.hidden, eps=config.eps)
            self.cross_attention = T5Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        bias: Tensor,
        crossing: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        slots: Tensor | None = None,
        cache: StaticCache | None = None,
    ) -> Tensor:
        """Self-attention, attention to the encoder where ``crossing`` has its keys and values, and MLP."""
        normed = self.attention_norm(x)
        key, value = self.attention.keys_and_values(normed)
        if cache is not None and slots is not None:
            key, value = cache.update(self.layer, slots, key, value)
        x = x + self.attention(normed, key, value, bias)
        if crossing is not None:
            x = x + self.cross_attention(self.cross_attention_norm(x), *crossing, mask)
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    """The layers of one side; they share the first one's position bias."""

    def __init__(self, config: T5Config, decoder: bool) -> None:
        super().__init__()
        self.config, self.decoder = config, decoder
        self.layers = nn.ModuleList(Block(config, layer, decoder) for layer in range(config.layers))
        self.final_layer_norm = nn.RMSNorm(config.hidden, eps=config.eps)

    @property
    def blocks(self) -> list[Block]:
        """The layers, typed."""
        return [block for block in self.layers if isinstance(block, Block)]

    def bias(self, queries: Tensor, keys: int, mask: Tensor | None) -> Tensor:
        """Position bias ``[batch or 1, heads, queries, keys]``, −inf where ``mask`` is false."""
        offset = torch.arange(keys, device=queries.device)[None] - queries[:, None]
        bucket = position_bucket(offset, self.config.buckets, self.config.distance, not self.decoder)
        bias = self.blocks[0].attention.relative_attention_bias(bucket).permute(2, 0, 1)[None]
        return bias if mask is None else bias.masked_fill(~mask, -torch.inf)


class T5(nn.Module):
    """Encoder, decoder and language-model head."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.shared = nn.Embedding(config.vocabulary, config.hidden)
        self.encoder = Stack(config, decoder=False)
        self.decoder = Stack(config, decoder=True)
        if config.gated:
            self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    @classmethod
    def from_safetensors(cls, path: str | Path, config: T5Config) -> "T5":
        """The model with the weights of a file or folder under their published names."""
        model = cls(config)
        norm_of_side = {"encoder": "mlp_norm", "decoder": "cross_attention_norm"}
        tensors = {
            name.replace("layer.1.layer_norm", norm_of_side.get(name.split(".")[0], "")): tensor
            for name, tensor in read_safetensors(path).items()
        }
        tensors.setdefault("lm_head.weight", tensors["shared.weight"])  # where the head is tied it is not saved
        load_weights(model, tensors, PUBLISHED)
        return model

    def encode(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """The encoder's states, ``[batch, sequence, hidden]``."""
        count = tokens.shape[1]
        allowed = None if mask is None else mask.bool()[:, None, None]
        bias = self.encoder.bias(torch.arange(count, device=tokens.device), count, allowed)
        x = self.shared(tokens)
        for block in self.encoder.blocks:
            x = block(x, bias)
        return self.encoder.final_layer_norm(x)

    def crossing(self, states: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the encoder's states for each decoder layer; the same at every step."""
        return [block.cross_attention.keys_and_values(states) for block in self.decoder.blocks]

    def new_cache(self, batch: int, capacity: int) -> StaticCache:
        """An empty cache for the decoder's self-attention."""
        c = self.config
        return StaticCache.empty(c.layers, batch, c.heads, capacity, c.head, self.shared.weight)

    def decode(
        self,
        tokens: Tensor,
        crossing: list[tuple[Tensor, Tensor]],
        mask: Tensor | None = None,
        cache: StaticCache | None = None,
    ) -> Tensor:
        """Return logits of the next token, from the result of ``crossing`` on the encoder's states and their mask."""
        count = tokens.shape[1]
        slots = torch.arange(count, device=tokens.device) if cache is None else cache.slots(count)
        keys = count if cache is None else cache.capacity
        bias = self.decoder.bias(slots, keys, causal_mask(slots, keys, None))
        allowed = None if mask is None else mask.bool()[:, None, None]
        x = self.shared(tokens)
        for block in self.decoder.blocks:
            x = block(x, bias, crossing[block.layer], allowed, slots, cache)
        if cache is not None:
            cache.advance(count)
        x = self.decoder.final_layer_norm(x)
        if self.config.gated:
            return self.lm_head(x)
        return F.linear(x * self.config.hidden**-0.5, self.shared.weight)

    def forward(self, tokens: Tensor, decoder_tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits ``[batch, decoder sequence, vocabulary]``; ``mask`` is 1 for a real token of the encoder."""
        return self.decode(decoder_tokens, self.crossing(self.encode(tokens, mask)), mask)
