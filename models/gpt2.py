"""GPT-2: layer norm, learned positions, one projection for query, key and value, gelu by tanh."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusec.models.cache import StaticCache, causal_mask
from fusec.models.checkpoint import load_weights, read_safetensors


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of a model."""

    vocabulary: int = 512
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    positions: int = 128
    eps: float = 1e-5


PRESETS = {"tiny": GPT2Config(), "small": GPT2Config(50257, 768, 12, 12, 1024)}
"""tiny: for tests; small: the published GPT-2 of 124 million parameters."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.layer, self.heads = layer, config.heads
        self.c_attn = nn.Linear(config.hidden, 3 * config.hidden)
        self.c_proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor, slots: Tensor, mask: Tensor | None, cache: StaticCache | None) -> Tensor:
        """Attend from every token of x to those before it; ``mask`` of None means no padding and no cache."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1)
        )
        if cache is not None:
            key, value = cache.update(self.layer, slots, key, value)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.c_proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two projections with a gelu between."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden, 4 * config.hidden)
        self.c_proj = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Up, gelu, down."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden, eps=config.eps)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.hidden, eps=config.eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, slots: Tensor, mask: Tensor | None, cache: StaticCache | None) -> Tensor:
        """Attention and MLP, each on a norm of the residual stream and added to it."""
        x = x + self.attn(self.ln_1(x), slots, mask, cache)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """A decoder whose language-model head is its token embedding."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocabulary, config.hidden)
        self.wpe = nn.Embedding(config.positions, config.hidden)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden, eps=config.eps)

    @classmethod
    def from_safetensors(cls, path: str | Path, config: GPT2Config) -> "GPT2":
        """The model with the weights of a file or folder under their published names."""
        model = cls(config)
        matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        load_weights(model, read_safetensors(path), [("transformer.", "")], transposed=matrices)
        return model

    def new_cache(self, batch: int, capacity: int) -> StaticCache:
        """An empty cache."""
        c = self.config
        return StaticCache.empty(c.layers, batch, c.heads, capacity, c.hidden // c.heads, self.wte.weight)

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
            positions: rows of the position embedding; by default the position in the sequence.
        """
        count = tokens.shape[1]
        slots = torch.arange(count, device=tokens.device) if cache is None else cache.slots(count)
        allowed = None
        if cache is not None or mask is not None:
            allowed = causal_mask(slots, count if cache is None else cache.capacity, mask)
        x = self.wte(tokens) + self.wpe(slots if positions is None else positions)
        for block in self.h:
            x = block(x, slots, allowed, cache)
        if cache is not None:
            cache.advance(count)
        return F.linear(self.ln_f(x), self.wte.weight)
