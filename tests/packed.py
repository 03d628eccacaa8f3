"""Packed forms of a weight in plain PyTorch: integers of 8 bits and fewer, with scales, zero points and codebooks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

COLUMNS, DEPTH, GROUP = 72, 768, 24


@dataclass(frozen=True)
class Packed:
    """One packed form of a [columns, depth] weight."""

    weight: Callable[..., Tensor]
    """The dense weight, from the packed parts and a dtype."""
    parts: Callable[[], tuple[Tensor, ...]]
    """Random packed parts: integers first."""


def per_group(q: Tensor, zero: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    groups = q.reshape(COLUMNS, -1, GROUP).to(dtype)
    return ((groups - zero.to(dtype)[..., None]) * scale.to(dtype)[..., None]).reshape(COLUMNS, DEPTH)


def int8() -> Tensor:
    return torch.randint(-127, 128, (COLUMNS, DEPTH), dtype=torch.int8)


def nibbles() -> Tensor:
    return torch.randint(0, 256, (COLUMNS, DEPTH // 2), dtype=torch.uint8)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape) * 0.1 + 0.01


def groups() -> tuple[Tensor, Tensor]:
    shape = COLUMNS, DEPTH // GROUP
    return torch.randint(0, 16, shape, dtype=torch.uint8), scales(*shape)


def half(blocks: Tensor, start: int) -> Tensor:
    """The half-precision number in two bytes of each block."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def blocks(per: int, size: int, *starts: int) -> tuple[Tensor, ...]:
    """Random blocks, each the bytes of so many elements, with small half-precision numbers from each start on."""
    found = torch.randint(0, 256, (COLUMNS * DEPTH // per, size), dtype=torch.uint8)
    for start in starts:
        found[:, start : start + 2] = (torch.rand(found.shape[0], 1) * 0.01).half().view(torch.uint8)
    return (found,)


FORMS = {
    "int8 per channel": Packed(lambda q, s, t: q.to(t) * s.to(t)[:, None], lambda: (int8(), scales(COLUMNS))),
    "int8 per group": Packed(per_group, lambda: (int8(), *groups())),
    "int4, neighbours in a byte": Packed(
        lambda p, z, s, t: per_group(torch.stack([p & 15, p >> 4], -1), z, s, t), lambda: (nibbles(), *groups())
    ),
    "int4, halves in a byte": Packed(
        lambda p, z, s, t: per_group(torch.cat([p & 15, p >> 4], -1), z, s, t), lambda: (nibbles(), *groups())
    ),
    "int4 by arithmetic, symmetric": Packed(
        lambda p, s, t: (
            ((torch.stack([p % 16, p // 16], -1).to(torch.int8) - 8).to(t)).reshape(COLUMNS, DEPTH) * s.to(t)[:, None]
        ),
        lambda: (nibbles(), scales(COLUMNS)),
    ),
    "two bits": Packed(
        lambda p, s, t: (
            torch.stack([p >> i & 3 for i in (0, 2, 4, 6)], -1).reshape(COLUMNS, DEPTH).to(t) * s.to(t)[:, None]
        ),
        lambda: (torch.randint(0, 256, (COLUMNS, DEPTH // 4), dtype=torch.uint8), scales(COLUMNS)),
    ),
    "a codebook": Packed(
        lambda p, s, code, t: (
            code[torch.stack([p >> 4, p & 15], -1).long()].reshape(COLUMNS, DEPTH).to(t) * s.to(t)[:, None]
        ),
        lambda: (nibbles(), scales(COLUMNS), torch.randn(16)),
    ),
    "a codebook of eight, scales with scales": Packed(
        lambda p, s, t, code, dtype: (
            code.index_select(0, (p & 7).reshape(-1).int()).to(dtype).reshape(COLUMNS, -1, GROUP)
            * (s.to(dtype) * t.to(dtype))[..., None]
        ).reshape(COLUMNS, DEPTH),
        lambda: (int8().view(torch.uint8), groups()[0], scales(COLUMNS, 1), torch.randn(8)),
    ),
    "words of eight along the depth, columns contiguous": Packed(
        lambda q, s, t: (
            (
                ((q.unsqueeze(1) >> torch.arange(0, 32, 4, dtype=torch.int32)[None, :, None]) & 15)
                .reshape(DEPTH // GROUP, GROUP, COLUMNS)
                .to(t)
                - 8
            )
            .mul(s.to(t)[:, None])
            .reshape(DEPTH, COLUMNS)
            .T
        ),
        lambda: (
            torch.randint(-(2**31), 2**31 - 1, (DEPTH // 8, COLUMNS), dtype=torch.int32),
            scales(DEPTH // GROUP, COLUMNS),
        ),
    ),
    "halves of the rows in a byte": Packed(
        lambda p, z, s, t: per_group(torch.cat([p >> 4, p & 15], 0), z, s, t),
        lambda: (torch.randint(0, 256, (COLUMNS // 2, DEPTH), dtype=torch.uint8), *groups()),
    ),
    "bytes that wrap around": Packed(
        lambda p, s, t: ((torch.cat([p & 15, p >> 4], -1) - 8).to(t) - 100) * s.to(t)[:, None],
        lambda: (nibbles(), scales(COLUMNS)),
    ),
    "GGUF Q4_0": Packed(  # halves of a block of 32 share bytes
        lambda b, t: (
            (torch.cat([b[:, 2:] & 15, b[:, 2:] >> 4], -1).to(torch.int8) - 8).to(t) * half(b, 0).to(t)
        ).reshape(COLUMNS, DEPTH),
        lambda: blocks(32, 18, 0),
    ),
    "float8 e4m3": Packed(
        lambda q, s, t: q.to(t) * s.to(t)[:, None],
        lambda: (torch.randn(COLUMNS, DEPTH).to(torch.float8_e4m3fn), scales(COLUMNS)),
    ),
    "booleans": Packed(
        lambda q, s, t: (q.to(t) - 0.5) * s.to(t)[:, None],
        lambda: (torch.rand(COLUMNS, DEPTH) > 0.5, scales(COLUMNS)),
    ),
    "blocks of columns and depth": Packed(
        lambda q, s, t: q.to(t) * s.to(t).repeat_interleave(8, 0).repeat_interleave(GROUP, 1),
        lambda: (int8(), scales(COLUMNS // 8, DEPTH // GROUP)),
    ),
}
