"""Linear layers with packed weights, in plain PyTorch and as libraries make them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusec.quantization.formats import NF4
from tests.packed import COLUMNS, DEPTH, FORMS, Packed, blocks, half, int8, nibbles, scales

BLOCK = 256
"""Elements of one block of the K formats of GGUF."""
SHAPE = 768, 96
"""Depth and columns of a library's layers."""
FP4 = (0.0, 0.0052, 0.6667, 1.0, 0.3333, 0.5, 0.1667, 0.25, -0.0, -0.0052, -0.6667, -1.0, -0.3333, -0.5, -0.1667, -0.25)


@dataclass(frozen=True)
class Layer:
    """A linear layer in one spelling."""

    name: str
    make: Callable[[torch.dtype], nn.Module]
    """Returns the layer, [*, depth] to [*, columns], for inputs of a dtype."""
    library: str = ""
    activations: bool = False
    """Its inputs are quantized too, so that it is no linear function of them."""


class Plain(nn.Module):
    """A layer whose weight is computed from buffers."""

    def __init__(self, weight: Callable[..., Tensor], parts: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.weight = weight
        for i, part in enumerate(parts):
            self.register_buffer(f"part{i}", part)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the dense weight."""
        return F.linear(x, self.weight(*self.buffers(), x.dtype))


class Called(Plain):
    """A layer that is a function of its input and of buffers."""

    def forward(self, x: Tensor) -> Tensor:
        """Call the function."""
        return self.weight(x, *self.buffers())


def layers() -> Iterator[Layer]:
    """Yield all layers; of libraries those that are installed."""
    for name, form in (FORMS | _MORE).items():
        yield Layer(name, lambda dtype, form=form: Plain(form.weight, form.parts()))  # type: ignore[misc]
    for name, (function, parts) in _FUNCTIONS.items():
        yield Layer(name, lambda dtype, f=function, p=parts: Called(f, p(dtype)), activations="input" in name)  # type: ignore[misc]
    for library, found in (("torchao", _torchao), ("bitsandbytes", _bitsandbytes), ("hqq", _hqq)):
        if find_spec(library) is not None:
            yield from found()


def dense(dtype: torch.dtype) -> nn.Linear:
    """Return a layer for a library to quantize."""
    torch.manual_seed(0)
    return nn.Linear(*SHAPE, bias=False).to(dtype)


# GGUF: blocks of bytes with their scales inside (ggml-common.h).


def _q8_0(b: Tensor, t: torch.dtype) -> Tensor:
    return (b[:, 2:].view(torch.int8).to(t) * half(b, 0).to(t)).reshape(COLUMNS, DEPTH)


def _q6_k(b: Tensor, t: torch.dtype) -> Tensor:
    low, high, scale = b[:, :128], b[:, 128:192], b[:, 192:208].view(torch.int8).to(t)
    n = b.shape[0]
    low = torch.stack([low.reshape(n, 2, 64) & 15, low.reshape(n, 2, 64) >> 4], 2).reshape(n, 2, 4, 32)
    high = torch.stack([high.reshape(n, 2, 32) >> i & 3 for i in (0, 2, 4, 6)], 2)
    q = ((low | high << 4).to(torch.int8) - 32).reshape(n, 16, 16).to(t)
    return (q * (scale * half(b, 208).to(t))[..., None]).reshape(COLUMNS, -1)


def _q4_k(b: Tensor, t: torch.dtype) -> Tensor:
    """Eight groups of 32, each with a scale and a minimum of six bits, packed in twelve bytes."""
    n, s = b.shape[0], b[:, 4:16].reshape(-1, 3, 4)
    low, high, rest = s[:, 0], s[:, 1], s[:, 2]
    scale = torch.cat([low & 63, (rest & 15) | (low >> 6) << 4], -1).to(t) * half(b, 0).to(t)
    least = torch.cat([high & 63, rest >> 4 | (high >> 6) << 4], -1).to(t) * half(b, 2).to(t)
    q = b[:, 16:].reshape(n, 4, 1, 32)
    q = torch.cat([q & 15, q >> 4], 2).reshape(n, 8, 32).to(t)
    return (q * scale[..., None] - least[..., None]).reshape(COLUMNS, DEPTH)


_MORE = {
    "NF4, scales in int8 with a mean": Packed(
        lambda p, a, b, m, code, t: (
            (
                code[torch.stack([p >> 4, p & 15], -1).long()].reshape(COLUMNS, -1, 48)
                * (a.float() / 127 * b + m)[..., None]
            )
            .to(t)
            .reshape(COLUMNS, DEPTH)
        ),
        lambda: (
            nibbles(),
            torch.randint(1, 128, (COLUMNS, DEPTH // 48), dtype=torch.int8),
            scales(COLUMNS, 1),
            scales(1),
            torch.tensor(NF4),
        ),
    ),
    "FP4": Packed(
        lambda p, s, code, t: (
            code[torch.stack([p >> 4, p & 15], -1).long()].reshape(COLUMNS, -1, 48).to(t) * s.to(t)[..., None]
        ).reshape(COLUMNS, DEPTH),
        lambda: (nibbles(), scales(COLUMNS, DEPTH // 48), torch.tensor(FP4)),
    ),
    "float8 e5m2, per channel": Packed(
        lambda q, s, t: q.to(t) * s.to(t)[:, None],
        lambda: (torch.randn(COLUMNS, DEPTH).to(torch.float8_e5m2), scales(COLUMNS)),
    ),
    "GGUF Q8_0": Packed(_q8_0, lambda: blocks(32, 34, 0)),
    "GGUF Q4_K": Packed(_q4_k, lambda: blocks(BLOCK, 144, 0, 2)),
    "GGUF Q6_K": Packed(_q6_k, lambda: blocks(BLOCK, 210, 208)),
}


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return torch.clamp(torch.round(x.float() / scale), -128, 127), scale


def _dequantized(x: Tensor) -> Tensor:
    codes, scale = _rows(x)
    return (codes.to(torch.int8) * scale).to(x.dtype)


def _bytes_of_input(x: Tensor, q: Tensor, s: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    codes, scale = _rows(x)
    return (multiply(codes.to(torch.int8), q) * scale * s).to(x.dtype)


def _bytes_by_groups(x: Tensor, p: Tensor, z: Tensor, s: Tensor) -> Tensor:
    codes, scale = _rows(x)
    groups = torch.stack([p & 15, p >> 4], -1).reshape(*s.shape, -1).to(x.dtype)
    weight = ((groups - z.to(x.dtype)[..., None]) * s[..., None]).reshape(s.shape[0], -1)
    return (F.linear(codes.to(torch.int8).to(x.dtype), weight).float() * scale).to(x.dtype)


def _int4_groups(dtype: torch.dtype) -> tuple[Tensor, ...]:
    shape = COLUMNS, DEPTH // 64
    return nibbles(), torch.randint(0, 16, shape, dtype=torch.uint8), scales(*shape).to(dtype)


def _unsigned_input(x: Tensor, q: Tensor, s: Tensor, sums: Tensor) -> Tensor:
    low, high = x.float().amin(-1, keepdim=True).clamp(max=0), x.float().amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = torch.round(-low / scale)
    codes = torch.clamp(torch.round(x.float() / scale) + zero, 0, 255).to(torch.uint8)
    return ((codes.int() @ q.int().t() - zero.int() * sums).float() * scale * s).to(x.dtype)


def _shifted_input(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    low, high = x.float().amin(-1, keepdim=True).clamp(max=0), x.float().amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = torch.clamp(-128 - torch.round(low / scale), -128, 127)
    codes = torch.clamp(torch.round(x.float() / scale) + zero, -128, 127).to(torch.int8)
    return (((codes.int() - zero.int()) @ q.int().t()).float() * scale * s).to(x.dtype)


def _int8_parts(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return int8(), scales(COLUMNS).to(dtype)


def _int4_of_torch(dtype: torch.dtype) -> tuple[Tensor, ...]:
    codes = torch.randint(0, 16, (COLUMNS // 16 * 16, DEPTH), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed, (torch.rand(DEPTH // 32, codes.shape[0], 2) * 0.1).to(dtype)


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word of eight columns has each of them, four bits at a time."""


def _awq(x: Tensor, words: Tensor, zeros: Tensor, scale: Tensor) -> Tensor:
    def unpacked(packed: Tensor) -> Tensor:
        return torch.stack([packed >> 4 * i & 15 for i in _AWQ_ORDER], -1).reshape(packed.shape[0], -1).to(torch.int8)

    codes = unpacked(words).reshape(scale.shape[0], -1, scale.shape[1])
    weight = (codes - unpacked(zeros)[:, None]).to(x.dtype) * scale[:, None]
    return x @ weight.reshape(words.shape[0], -1)


def _awq_parts(dtype: torch.dtype) -> tuple[Tensor, ...]:
    groups, most = DEPTH // 64, 2**31
    words, zeros = (torch.randint(-most, most, (n, COLUMNS // 8), dtype=torch.int32) for n in (DEPTH, groups))
    return words, zeros, scales(groups, COLUMNS).to(dtype)


_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[torch.dtype], tuple[Tensor, ...]]]] = {
    "int8, scales after the matmul": (lambda x, q, s: F.linear(x, q.to(x.dtype)) * s, _int8_parts),
    "aten._weight_int8pack_mm": (lambda x, q, s: torch.ops.aten._weight_int8pack_mm(x, q, s), _int8_parts),
    "aten._weight_int4pack_mm_for_cpu": (
        lambda x, q, s: torch.ops.aten._weight_int4pack_mm_for_cpu(x, q, 32, s),
        _int4_of_torch,
    ),
    "AWQ, words of eight columns": (_awq, _awq_parts),
    "int8 input, aten._int_mm": (
        lambda x, q, s: _bytes_of_input(x, q, s, lambda a, b: torch._int_mm(a, b.t()).float()),
        _int8_parts,
    ),
    "int8 input, int32 matmul": (
        lambda x, q, s: _bytes_of_input(x, q, s, lambda a, b: (a.int() @ b.int().t()).float()),
        _int8_parts,
    ),
    "int8 input, float matmul": (
        lambda x, q, s: _bytes_of_input(x, q, s, lambda a, b: F.linear(a.float(), b.float())),
        _int8_parts,
    ),
    "int8 input, int4 groups": (_bytes_by_groups, _int4_groups),
    "uint8 input with a zero point": (
        _unsigned_input,
        lambda dtype: (*(found := _int8_parts(dtype)), found[0].sum(1, dtype=torch.int32)),
    ),
    "int8 input less a zero point": (_shifted_input, _int8_parts),
    "int8 input, static scale": (
        lambda x, q, s: (
            torch._int_mm(torch.clamp(torch.round(x.float() / 0.05), -128, 127).to(torch.int8), q.t()).float()
            * 0.05
            * s
        ).to(x.dtype),
        _int8_parts,
    ),
    "int8 input, dequantized before the matmul": (
        lambda x, q, s: F.linear(_dequantized(x), q.to(x.dtype) * s[:, None]),
        _int8_parts,
    ),
}


def _torchao() -> Iterator[Layer]:
    from torchao import quantization as ao

    per_group = ao.granularity.PerGroup
    int4, int2 = (getattr(torch, f"int{bits}") for bits in (4, 2))
    configs: dict[str, Callable[[], Any]] = {
        "Int8WeightOnly": ao.Int8WeightOnlyConfig,
        "Int8WeightOnly, groups": lambda: ao.Int8WeightOnlyConfig(granularity=per_group(32)),
        "IntxWeightOnly int4, groups": lambda: ao.IntxWeightOnlyConfig(int4, per_group(32)),
        "IntxWeightOnly int8, per channel": lambda: ao.IntxWeightOnlyConfig(torch.int8, ao.granularity.PerAxis(0)),
        "IntxWeightOnly int2, groups": lambda: ao.IntxWeightOnlyConfig(int2, per_group(32)),
        "Int8DynamicActivationInt8Weight": ao.Int8DynamicActivationInt8WeightConfig,
        "Int8DynamicActivationInt8Weight, asymmetric": lambda: ao.Int8DynamicActivationInt8WeightConfig(
            act_mapping_type=ao.MappingType.ASYMMETRIC
        ),
        "Int8DynamicActivationIntxWeight int4": lambda: ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=int4, weight_granularity=per_group(32)
        ),
        "Float8WeightOnly": ao.Float8WeightOnlyConfig,
    }

    def make(config: Callable[[], Any], dtype: torch.dtype) -> nn.Module:
        model = nn.Sequential(dense(dtype))
        ao.quantize_(model, config())
        return model

    for name, config in configs.items():
        yield Layer(name, lambda dtype, c=config: make(c, dtype), "torchao", "Activation" in name)  # type: ignore[misc]


def _bitsandbytes() -> Iterator[Layer]:
    import bitsandbytes as bnb

    def make(kind: str, nested: bool, dtype: torch.dtype, repacks: bool = False) -> nn.Module:
        layer = bnb.nn.Linear4bit(*SHAPE, bias=False, compute_dtype=dtype, quant_type=kind, compress_statistics=nested)
        layer.weight = bnb.nn.Params4bit(
            dense(dtype).weight.data, requires_grad=False, quant_type=kind, compress_statistics=nested, module=layer
        )
        layer.support_avx512bf16_for_cpu &= repacks
        return layer.to("cpu").eval()

    def make8(dtype: torch.dtype) -> nn.Module:
        layer = bnb.nn.Linear8bitLt(*SHAPE, bias=False, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(dense(dtype).weight.data, requires_grad=False, has_fp16_weights=False)
        return layer.to("cpu").eval()

    for kind in ("nf4", "fp4"):
        yield Layer(f"Linear4bit {kind}", lambda dtype, k=kind: make(k, False, dtype), "bitsandbytes")  # type: ignore[misc]
    yield Layer("Linear4bit nf4, nested", lambda dtype: make("nf4", True, dtype), "bitsandbytes")
    yield Layer("Linear4bit nf4, AVX512-BF16", lambda dtype: make("nf4", False, dtype, True), "bitsandbytes")
    yield Layer("Linear8bitLt", make8, "bitsandbytes", activations=True)


def _hqq() -> Iterator[Layer]:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    def make(bits: int, dtype: torch.dtype) -> nn.Module:
        config = BaseQuantizeConfig(nbits=bits, group_size=48, axis=1)
        return HQQLinear(dense(dtype), config, compute_dtype=dtype, device="cpu").eval()

    for bits in (8, 4, 2):
        yield Layer(f"HQQLinear, {bits} bits", lambda dtype, b=bits: make(b, dtype), "hqq")  # type: ignore[misc]
