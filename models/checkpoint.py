"""Weights from safetensors files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file, or of a folder that holds one or several, mapped into memory rather than read."""
    path = Path(path)
    if path.is_file():
        return load_file(path)
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return load_file(path / "model.safetensors")
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {name: tensor for shard in shards for name, tensor in load_file(path / shard).items()}


def load_weights(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    renames: Sequence[tuple[str, str]] = (),
    transposed: Sequence[str] = (),
) -> None:
    """Copy tensors under their published names into a model.

    Args:
        model: where they go.
        tensors: by published name.
        renames: pairs (published, own), replaced in order; a prefix is dropped by renaming it to nothing.
        transposed: suffixes of own names whose matrices are published as [in, out].

    Raises:
        KeyError: when a parameter gets no tensor. Tensors without a parameter in the model (other heads, old
            buffers) are skipped.
    """
    missing = {name for name, _ in model.named_parameters()}  # a tied parameter is listed once
    places = model.state_dict()
    for published, tensor in tensors.items():
        name = published
        for old, new in renames:
            name = name.replace(old, new)
        if name not in places:
            continue
        places[name].copy_(tensor.t() if name.endswith(tuple(transposed)) else tensor)
        missing.discard(name)
    if missing:
        raise KeyError(f"the checkpoint lacks {', '.join(sorted(missing)[:5])} ({len(missing)} in all)")
