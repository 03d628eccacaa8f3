"""Random weights for tests: a fresh model's are so small or trivial that a lost bias, scale or mask is not noticed."""

import zlib

import torch
from torch import Tensor, nn

OFFSET_NORMS = ("Gemma", "Nemotron")
"""Families whose norms multiply by 1 + weight."""
UNSCALED_ATTENTION = ("T5Attention", "MT5Attention", "GPTNeoSelfAttention")
"""Attention whose scores are not divided by √head: its q includes that scale, or every softmax would saturate."""
QUERY_OR_KEY = ("q_proj", "k_proj", "q_b_proj", "query", "key", "q", "k")
PACKED = ("c_attn", "qkv_proj")
"""Projections to query, key and value at once."""


@torch.no_grad()
def redraw(model: nn.Module, seed: int = 0) -> nn.Module:
    """Redraw every parameter, by its name, its shape and the type of its module; return the model.

    Matrices preserve variance (1/√fan_in; those of query and key are doubled, so that attention is sharp), embeddings
    have a standard deviation of 1, norm scales are 1 + 0.2·randn, biases 0.2·randn. The draw of a parameter depends
    on the seed, its name and the kind of its device alone.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = [*module.named_parameters(recurse=False)]
        own += [(n, b) for n, b in module.named_buffers(recurse=False) if n.endswith("bias") and b.is_floating_point()]
        for name, parameter in own:
            if id(parameter) in seen:  # tied
                continue
            seen.add(id(parameter))
            full = f"{path}.{name}"
            draw = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}:{full}".encode()))
            noise = torch.randn(parameter.shape, generator=draw, device=parameter.device)
            parameter.copy_(_scaled(noise, name, path, module, model))
    return model


def _scaled(noise: Tensor, name: str, path: str, module: nn.Module, model: nn.Module) -> Tensor:
    kind = type(module).__name__
    if name.endswith("bias"):
        return 0.2 * noise
    if "Norm" in kind:
        return 0.2 * noise + (0.0 if kind.startswith(OFFSET_NORMS) else 1.0)
    if isinstance(module, nn.Embedding) or "embedding" in name or name.endswith("token"):
        return noise
    if noise.ndim < 2:
        return 1.0 + 0.2 * noise
    return _matrix(noise, path, module, model)


def _matrix(noise: Tensor, path: str, module: nn.Module, model: nn.Module) -> Tensor:
    outputs_last = type(module).__name__ == "Conv1D"  # transformers' GPT-2 stores [in, out]
    filters = noise.ndim == 4 or isinstance(module, nn.Conv1d)
    fan_in = noise.shape[0] if outputs_last else noise[0].numel() if filters else noise.shape[-1]
    weight = noise / fan_in**0.5
    leaf = path.rsplit(".", 1)[-1]
    if leaf in QUERY_OR_KEY:
        weight *= 2
    if leaf in PACKED:
        # With grouped heads the keys end earlier; the values, as many as the keys, are always the last.
        weight.narrow(1 if outputs_last else 0, 0, _query_and_key_rows(path, weight, outputs_last, model)).mul_(2)
    attention = model.get_submodule(path.rpartition(".")[0])
    if leaf in ("q", "q_proj") and type(attention).__name__ in UNSCALED_ATTENTION:
        weight /= _head(attention) ** 0.5
    return weight


def _head(attention: nn.Module) -> float:
    names = ("head", "head_dim", "key_value_proj_dim")
    return float(next(getattr(attention, name) for name in names if hasattr(attention, name)))


def _query_and_key_rows(path: str, weight: Tensor, outputs_last: bool, model: nn.Module) -> int:
    inputs, outputs = weight.shape if outputs_last else weight.shape[::-1]
    values = (outputs - inputs) // 2  # holds where the queries are as wide as the model
    return outputs - values
