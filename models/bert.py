"""BERT: an encoder with a layer norm after each residual."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusec.models.checkpoint import load_weights, read_safetensors


@dataclass(frozen=True)
class BertConfig:
    """The sizes of a model."""

    vocabulary: int = 512
    hidden: int = 128
    intermediate: int = 512
    layers: int = 2
    heads: int = 4
    positions: int = 512
    segments: int = 2
    eps: float = 1e-12


PRESETS = {
    "tiny": BertConfig(),
    "minilm-l6": BertConfig(30522, 384, 1536, 6, 12),
    "base": BertConfig(30522, 768, 3072, 12, 12),
}
"""tiny: for tests; minilm-l6: all-MiniLM-L6-v2, a sentence encoder; base: BERT base."""

PUBLISHED = [
    ("bert.", ""),
    ("encoder.layer.", "layers."),
    ("attention.self.", ""),
    ("attention.output.LayerNorm", "attention_norm"),
    ("attention.output.dense", "attention_output"),
    ("intermediate.dense", "up"),
    ("output.dense", "down"),
    ("output.LayerNorm", "output_norm"),
    ("embeddings.LayerNorm", "embeddings.norm"),
    ("word_embeddings", "words"),
    ("position_embeddings", "positions"),
    ("token_type_embeddings", "segments"),
]
"""Published parameter names and those of this model, replaced in this order."""


class Embeddings(nn.Module):
    """Embeddings of words, positions and segments, added and normalized."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.positions, config.hidden)
        self.segments = nn.Embedding(config.segments, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.eps)

    def forward(self, tokens: Tensor, segments: Tensor | None) -> Tensor:
        """The embedding of every token."""
        segment = self.segments.weight[0] if segments is None else self.segments(segments)
        place = self.positions.weight[: tokens.shape[1]]
        return self.norm(self.words(tokens) + segment + place)


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)
        self.attention_output = nn.Linear(config.hidden, config.hidden)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.eps)
        self.up = nn.Linear(config.hidden, config.intermediate)
        self.down = nn.Linear(config.intermediate, config.hidden)
        self.output_norm = nn.LayerNorm(config.hidden, eps=config.eps)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attention and MLP; each result is added to its input and normed."""
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.attention_output(attended))
        return self.output_norm(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """The encoder; returns the states of the last layer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))

    @classmethod
    def from_safetensors(cls, path: str | Path, config: BertConfig) -> "Bert":
        """The model with the weights of a file or folder under their published names."""
        model = cls(config)
        load_weights(model, read_safetensors(path), PUBLISHED)
        return model

    def forward(self, tokens: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """States ``[batch, sequence, hidden]``.

        Args:
            tokens: ids, ``[batch, sequence]``.
            mask: 1 for a real token, ``[batch, sequence]``.
            segments: 0 or 1 for each token; by default 0.
        """
        allowed = None if mask is None else mask.bool()[:, None, None]
        x = self.embeddings(tokens, segments)
        for block in self.layers:
            x = block(x, allowed)
        return x


def sentence_embedding(states: Tensor, mask: Tensor) -> Tensor:
    """The mean over the real tokens, scaled to length 1."""
    weight = mask[..., None].to(states.dtype)
    mean = (states * weight).sum(1) / weight.sum(1).clamp_min(1e-9)
    return F.normalize(mean, dim=-1)


def encode(model: Bert, tokens: Tensor, mask: Tensor) -> Tensor:
    """Sentence embeddings, ``[batch, hidden]``, without gradients."""
    with torch.no_grad():
        return sentence_embedding(model(tokens, mask), mask)
