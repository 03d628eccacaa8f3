"""Operations of libraries that multiply by packed weights, in plain PyTorch: kernels then unpack what they read."""

import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.frontend.torch_internals import outside_tracing

_aten = torch.ops.aten
_NESTED = 256
"""Scales that share one."""
_BLOCKS = {"AVX512": 64, "AVX2": 32, "DEFAULT": 32}
"""Columns of a whole block of torch's packed four-bit weights, by the instructions that its kernels use."""
Decomposition: TypeAlias = Callable[..., Any]


def decompositions_of_packed_matmuls() -> dict[Any, Decomposition]:
    """Return the decomposition of each operation whose library is loaded."""
    found: dict[Any, Decomposition] = {_aten._weight_int4pack_mm_for_cpu.default: _int4pack_mm}
    if hasattr(torch.ops.bitsandbytes, "gemm_4bit") and (codebooks := _codebooks()):
        dequantize = partial(_dequantize_4bit, codebooks)
        found[torch.ops.bitsandbytes.dequantize_4bit.default] = dequantize
        found[torch.ops.bitsandbytes.gemm_4bit.default] = partial(_gemm_4bit, dequantize)
        found[torch.ops.bitsandbytes.gemv_4bit.default] = _gemv_4bit
        found[torch.ops.bitsandbytes.dequantize_blockwise.default] = _dequantize_blockwise
    return found


def _int4pack_mm(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> Any:
    """``_weight_int4pack_mm_for_cpu``: codes as ``_convert_weight_to_int4pack_for_cpu`` lays them out on x86.

    Blocks of columns lie one after another, each [summed, columns / 2] bytes. With vector instructions a whole block
    has its first half of the columns in the low bits. In a last block that is not whole, and without vector
    instructions, neighbours share a byte.

    Args:
        x: [rows, summed].
        packed: uint8, [columns, summed / 2].
        group: summed elements that share a scale.
        scales: [summed / group, columns, 2]: scales, and what is added to the products of the codes less 8 and them.
    """
    columns, summed = packed.shape[0], 2 * packed.shape[1]
    capability = torch.backends.cpu.get_cpu_capability()
    width = _BLOCKS.get(capability) if platform.machine() in ("x86_64", "AMD64") else None
    if width is None:
        return NotImplemented
    whole = columns // width * width
    flat, parts = packed.reshape(-1), list[Tensor]()
    if whole:
        blocks = flat[: whole * summed // 2].reshape(whole // width, summed, width // 2)
        halves = torch.cat([blocks & 15, blocks >> 4], -1) if capability != "DEFAULT" else _neighbours(blocks)
        parts.append(halves.transpose(1, 2).reshape(whole, summed))
    if whole < columns:
        rest = flat[whole * summed // 2 :].reshape(summed, (columns - whole) // 2)
        parts.append(_neighbours(rest).t())
    codes = parts[0] if len(parts) == 1 else torch.cat(parts)
    scale, zero = scales.to(x.dtype).permute(2, 1, 0)[..., None].unbind(0)
    weight = (codes.reshape(columns, -1, group).to(x.dtype) - 8) * scale + zero
    return F.linear(x, weight.reshape(columns, summed))


def _neighbours(packed: Tensor) -> Tensor:
    """Return the codes of bytes, the low bits first."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _gemm_4bit(
    dequantize: Decomposition,
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    block: int,
    kind: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Any:
    """bitsandbytes' ``gemm_4bit``: neighbours of a row share a byte, the first in the high bits.

    With ``absmax_8bit`` the scales are codes themselves, with a scale for 256 of them.
    """
    if absmax_8bit is not None and absmax_code is not None and absmax_offset is not None:
        absmax = _dequantize_blockwise(absmax_8bit, absmax, absmax_code, _NESTED, absmax.dtype) + absmax_offset
    weight = dequantize(packed, absmax, block, kind, shape, x.dtype)
    return weight if weight is NotImplemented else F.linear(x, weight, bias)


def _dequantize_4bit(
    codebooks: Mapping[str, Tensor],
    packed: Tensor,
    absmax: Tensor,
    block: int,
    kind: str,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Any:
    """bitsandbytes' ``dequantize_4bit``, where blocks are whole and do not cross rows."""
    if packed.dtype != torch.uint8 or len(shape) != 2 or shape[1] % block:
        return NotImplemented
    numbers = _aten.lift_fresh_copy.default(codebooks[kind]).to(packed.device)
    return _blocks(numbers[_high_first(packed)], absmax, block).reshape(tuple(shape)).to(dtype)


def _gemv_4bit(x: Tensor, packed: Tensor, shape: Sequence[int], absmax: Tensor, code: Tensor, block: int) -> Any:
    """bitsandbytes' ``gemv_4bit``, of weights as ``gemm_4bit`` takes them.

    Where the library has a kernel of its own for the CPU, that takes weights in another order.
    """
    has_own = torch._C._dispatch_has_kernel_for_dispatch_key("bitsandbytes::gemv_4bit", "CPU")
    if has_own or packed.dtype != torch.uint8 or shape[1] % block:
        return NotImplemented
    weight = _blocks(code[_high_first(packed)], absmax, block).reshape(tuple(shape)).to(x.dtype)
    return F.linear(x, weight)


def _dequantize_blockwise(codes: Tensor, absmax: Tensor, code: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """bitsandbytes' ``dequantize_blockwise``: bytes with a scale for each block, the last of which may be shorter."""
    outer = absmax[:, None].expand(-1, block).reshape(-1)[: codes.numel()]
    return (code[codes.int()] * outer.reshape(codes.shape)).to(dtype)


def _high_first(packed: Tensor) -> Tensor:
    """Return the codes of bytes, the high bits first, as indices."""
    flat = packed.reshape(-1)
    return torch.stack([flat >> 4, flat & 15], -1).int()


def _blocks(values: Tensor, absmax: Tensor, block: int) -> Tensor:
    """Return values times the scales of their blocks."""
    return values.reshape(-1, block) * absmax[:, None]


@cache
def _codebooks() -> dict[str, Tensor]:
    """Return the numbers of all codes, as bitsandbytes has them; none if it has no kernels for the CPU.

    To be called ahead of a trace, which would record it.
    """
    pairs = torch.tensor([[code << 4 | code] for code in range(16)] * 2, dtype=torch.uint8)

    def numbers(kind: str) -> Tensor:
        found = torch.ops.bitsandbytes.dequantize_4bit.default(pairs, torch.ones(2), 32, kind, (32, 2), torch.float32)
        return found[:16, 0].clone()

    try:
        with outside_tracing(), torch.inference_mode(False):
            return {kind: numbers(kind) for kind in ("nf4", "fp4")}
    except (RuntimeError, OSError):
        return {}
