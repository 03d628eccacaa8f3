"""Other spellings of whole meanings: activations, norms, softmax, attention."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.campaigns.respelling import synonym
from tests.campaigns.synonyms.arithmetic import HALF


@synonym("silu")
def silu_as_product(x: Tensor, inplace: bool = False) -> Tensor:
    """x·σ(x)."""
    return x * torch.sigmoid(x)


@synonym("silu")
def silu_as_quotient(x: Tensor, inplace: bool = False) -> Tensor:
    """x/(1 + exp(-x))."""
    return x / (1 + torch.exp(-x))


@synonym("gelu")
def gelu_by_error_function(x: Tensor, approximate: str = "none") -> Any:
    """x·Φ(x), with Φ by the error function."""
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))) if approximate == "none" else NotImplemented


@synonym("gelu")
def gelu_half_last(x: Tensor, approximate: str = "none") -> Any:
    """The same, halved at the end, by the inverse of √2."""
    return x * (1.0 + torch.erf(x * 0.7071067811865476)) * 0.5 if approximate == "none" else NotImplemented


@synonym("gelu")
def gelu_by_cube(x: Tensor, approximate: str = "none") -> Any:
    """Gelu's tanh form, by a power."""
    if approximate != "tanh":
        return NotImplemented
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@synonym("gelu")
def gelu_factored(x: Tensor, approximate: str = "none") -> Any:
    """Gelu's tanh form, its polynomial factored."""
    if approximate != "tanh":
        return NotImplemented
    return x * 0.5 * (1.0 + torch.tanh(x * 0.7978845608028654 * (1.0 + 0.044715 * x * x)))


@synonym("softmax")
def softmax_by_exponentials(x: Tensor, dim: int, **options: Any) -> Any:
    """exp(x - max)/Σ, spelled out."""
    if _dtype(options) not in (None, x.dtype):
        return NotImplemented
    e = torch.exp(x - x.amax(dim, keepdim=True))
    return e / e.sum(dim, keepdim=True)


@synonym("softmax")
def softmax_by_logarithm(x: Tensor, dim: int, **options: Any) -> Any:
    """exp(log softmax), in float32 where x is of a half type: rounded, a logarithm is no longer exact enough."""
    dtype = _dtype(options) or x.dtype
    wide = torch.float32 if dtype in HALF else dtype
    return torch.exp(F.log_softmax(x, dim, dtype=wide)).to(dtype)


@synonym("softmax")
def softmax_wide(x: Tensor, dim: int, **options: Any) -> Any:
    """In float32, rounded at the end."""
    if _dtype(options) is not None or x.dtype not in HALF:
        return NotImplemented
    return F.softmax(x, dim, dtype=torch.float32).to(x.dtype)


@synonym("softmax")
def softmax_by_method(x: Tensor, dim: int, **options: Any) -> Any:
    """Softmax as a method of the tensor, of another view of the scores."""
    return x.unsqueeze(0).softmax(dim, dtype=_dtype(options)).squeeze(0) if dim < 0 else NotImplemented


def _dtype(options: Any) -> torch.dtype | None:
    return options.get("dtype")


@synonym("rms_norm")
def rms_norm_by_formula(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    """x/√(mean of squares + ε), in float32, then the weight."""
    if eps is None:
        return NotImplemented
    wide = x.float() if x.dtype != torch.float64 else x
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else weight * y


@synonym("rms_norm")
def rms_norm_scaled_wide(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    """The same, the weight in float32 too, by a division."""
    if eps is None or weight is None:
        return NotImplemented
    wide, scale = (t.float() if t.dtype != torch.float64 else t for t in (x, weight))
    return (wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


@synonym("rms_norm")
def rms_norm_weighted_apart(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    """The norm without a weight, then the weight."""
    return NotImplemented if weight is None else F.rms_norm(x, shape, None, eps) * weight


@synonym("layer_norm")
def layer_norm_by_formula(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """(x - mean)/√(variance + ε), then weight and bias."""
    wide = x.float() if x.dtype != torch.float64 else x
    centred = wide - wide.mean(-1, keepdim=True)
    y = (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@synonym("layer_norm")
def layer_norm_by_division(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """The same with a division by the deviation."""
    wide = x.float() if x.dtype != torch.float64 else x
    mean = wide.mean(-1, keepdim=True)
    y = (wide - mean) / torch.sqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    y = y.to(x.dtype) if weight is None else y.to(x.dtype) * weight
    return y if bias is None else y + bias


@synonym("layer_norm")
def layer_norm_weighted_apart(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """The norm without weight and bias, then those."""
    return NotImplemented if weight is None else F.layer_norm(x, shape, None, None, eps) * weight + bias


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float]:
    """What a call of attention computes with: one head of keys and values each, the mask, the scale."""
    if enable_gqa and key.shape[1] != query.shape[1]:
        key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    return query, key, value, attn_mask, 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


@synonym("scaled_dot_product_attention")
def attention_spelled_out(*given: Any, **options: Any) -> Tensor:
    """softmax(Q·Kᵀ·s + M)·V."""
    query, key, value, mask, scale = _attention(*given, **options)
    weights = F.softmax(_masked(query @ key.transpose(-2, -1) * scale, mask), dim=-1)
    return weights @ value


@synonym("scaled_dot_product_attention")
def attention_divided(*given: Any, **options: Any) -> Tensor:
    """softmax(Q·Kᵀ/√d + M)·V."""
    query, key, value, mask, scale = _attention(*given, **options)
    weights = F.softmax(_masked(query @ key.transpose(-2, -1) / (1 / scale), mask), dim=-1)
    return weights @ value


@synonym("scaled_dot_product_attention")
def attention_with_scaled_query(*given: Any, **options: Any) -> Tensor:
    """softmax((s·Q)·Kᵀ + M)·V."""
    query, key, value, mask, scale = _attention(*given, **options)
    return F.softmax(_masked((query * scale) @ key.mT, mask), dim=-1) @ value


@synonym("scaled_dot_product_attention")
def attention_with_scaled_key(*given: Any, **options: Any) -> Tensor:
    """softmax(Q·(s·K)ᵀ + M)·V."""
    query, key, value, mask, scale = _attention(*given, **options)
    return F.softmax(_masked(query @ (key * scale).mT, mask), dim=-1) @ value


@synonym("scaled_dot_product_attention")
def attention_with_both_scaled(*given: Any, **options: Any) -> Tensor:
    """softmax((√s·Q)·(√s·K)ᵀ + M)·V."""
    query, key, value, mask, scale = _attention(*given, **options)
    root = math.sqrt(scale)
    return F.softmax(_masked((query * root) @ (key * root).mT, mask), dim=-1) @ value


@synonym("scaled_dot_product_attention")
def attention_in_letters(*given: Any, **options: Any) -> Tensor:
    """Both products as sums over letters."""
    query, key, value, mask, scale = _attention(*given, **options)
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * scale
    return torch.einsum("bhqk,bhkd->bhqd", F.softmax(_masked(scores, mask), dim=-1), value)


@synonym("scaled_dot_product_attention")
def attention_with_bias(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **options: Any) -> Any:
    """A mask of truth values is a bias of 0 and -∞."""
    if attn_mask is None or attn_mask.dtype != torch.bool:
        return NotImplemented
    bias = torch.zeros(attn_mask.shape, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, **options)


@synonym("scaled_dot_product_attention")
def attention_with_chosen_scores(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, scale: Any = None, **options: Any
) -> Any:
    """Scores are chosen by the mask, or are the lowest number there is."""
    if attn_mask is None or attn_mask.dtype != torch.bool:
        return NotImplemented
    query, key, value, mask, scale = _attention(query, key, value, attn_mask, scale=scale, **options)
    scores = query @ key.mT * scale
    return F.softmax(torch.where(mask, scores, torch.finfo(scores.dtype).min), -1) @ value  # type: ignore[arg-type]


@synonym("scaled_dot_product_attention")
def attention_with_causal_mask(*given: Any, is_causal: bool = False, **options: Any) -> Any:
    """What comes later is masked: written as a mask."""
    if not is_causal:
        return NotImplemented
    rows, columns = (torch.arange(part.shape[-2]) for part in given[:2])
    return F.scaled_dot_product_attention(*given, **(options | {"attn_mask": rows[:, None] >= columns}))


@synonym("scaled_dot_product_attention")
def attention_with_repeated_heads(*given: Any, enable_gqa: bool = False, **options: Any) -> Any:
    """Shared keys and values, repeated for every head."""
    query, key, value, *rest = given
    if not enable_gqa:
        return NotImplemented
    key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value))
    return F.scaled_dot_product_attention(query, key, value, *rest, **options)


@synonym("scaled_dot_product_attention")
def attention_of_scaled_operand(*given: Any, scale: Any = None, **options: Any) -> Any:
    """The scale may come before the call."""
    query, *rest = given
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return F.scaled_dot_product_attention(query * factor, *rest, **(options | {"scale": 1.0}))
