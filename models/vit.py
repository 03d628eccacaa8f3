"""ViT: an encoder over the patches of an image, normed before each sublayer."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusec.models.checkpoint import load_weights, read_safetensors


@dataclass(frozen=True)
class ViTConfig:
    """The sizes of a model."""

    image: int = 32
    patch: int = 8
    channels: int = 3
    hidden: int = 128
    intermediate: int = 512
    layers: int = 2
    heads: int = 4
    eps: float = 1e-12


PRESETS = {"tiny": ViTConfig(), "base": ViTConfig(224, 16, 3, 768, 3072, 12, 12)}
"""tiny: for tests; base: ViT-B/16."""

PUBLISHED = [
    ("vit.", ""),
    ("encoder.layer.", "layers."),
    ("attention.attention.query", "attention.q_proj"),
    ("attention.attention.key", "attention.k_proj"),
    ("attention.attention.value", "attention.v_proj"),
    ("attention.output.dense", "attention.o_proj"),
    ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
    ("embeddings.patch_embeddings.projection", "patches"),
    ("embeddings.", ""),
]
"""Published parameter names and those of this model, replaced in this order."""


class Attention(nn.Module):
    """Self-attention among all patches."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = nn.Linear(config.hidden, config.hidden)
        self.k_proj = nn.Linear(config.hidden, config.hidden)
        self.v_proj = nn.Linear(config.hidden, config.hidden)
        self.o_proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from every patch to every patch."""
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two projections with a gelu between."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden, config.intermediate)
        self.fc2 = nn.Linear(config.intermediate, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Up, gelu, down."""
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.layernorm_before = nn.LayerNorm(config.hidden, eps=config.eps)
        self.attention = Attention(config)
        self.layernorm_after = nn.LayerNorm(config.hidden, eps=config.eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP, each on a norm of the residual stream and added to it."""
        x = x + self.attention(self.layernorm_before(x))
        return x + self.mlp(self.layernorm_after(x))


class ViT(nn.Module):
    """The encoder; returns the states of the class token and of every patch."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        count = (config.image // config.patch) ** 2
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden))
        self.position_embeddings = nn.Parameter(torch.zeros(1, count + 1, config.hidden))
        self.patches = nn.Conv2d(config.channels, config.hidden, config.patch, config.patch)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.layernorm = nn.LayerNorm(config.hidden, eps=config.eps)

    @classmethod
    def from_safetensors(cls, path: str | Path, config: ViTConfig) -> "ViT":
        """The model with the weights of a file or folder under their published names."""
        model = cls(config)
        load_weights(model, read_safetensors(path), PUBLISHED)
        return model

    def forward(self, images: Tensor) -> Tensor:
        """States ``[batch, 1 + patches, hidden]`` of images ``[batch, channels, image, image]``."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(images), -1, -1), patches), 1) + self.position_embeddings
        for block in self.layers:
            x = block(x)
        return self.layernorm(x)
