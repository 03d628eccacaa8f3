"""Weights from safetensors files, so that a model needs no other package to be loaded."""

import json
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file, or of a folder that holds one or several, mapped into memory rather than read."""
    path = Path(path)
    if path.is_file():
        return _read_file(path)
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return _read_file(path / "model.safetensors")
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {name: tensor for shard in shards for name, tensor in _read_file(path / shard).items()}


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


def _read_file(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        header_length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_length))
        # A private mapping: pages are loaded on access, and a write would stay in this process.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header.pop("__metadata__", None)
    return {name: _view(content, entry, 8 + header_length) for name, entry in header.items()}


def _view(content: mmap.mmap, entry: Mapping[str, Any], start: int) -> Tensor:
    dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8, count=end - begin, offset=start + begin).view(dtype).view(shape)
