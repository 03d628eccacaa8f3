"""Number formats of weights: quantization to codes and scales, and dequantization."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from fusec.errors import OptionError, suggestion

Parts: TypeAlias = Mapping[str, Tensor]
"""The tensors that a weight is stored as, by name."""

_CLIPS = tuple(1 - 0.02 * i for i in range(16))
"""Clipping ratios of a group's range that are tried."""
_LEAST_SCALE = torch.finfo(torch.float16).tiny
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution (Dettmers et al., "QLoRA", 2023, appendix E)."""


@dataclass(frozen=True)
class Format(ABC):
    """A number format with scales for each group of neighbours in a row."""

    name: str
    group: int = 0
    """Columns that share a scale; 0 for the whole row."""
    activations: bool = False
    """True if inputs are quantized too: to int8, with a scale for each row, so that products are of integers."""
    bits: ClassVar[int] = 4
    """Length of one code. Two codes of four bits are a byte: neighbours of a row, the first in the low half."""

    def groups(self, columns: int) -> int:
        """Return the number of groups in a row of so many columns.

        Raises:
            OptionError: where whole groups, or bytes, do not fill the row.
        """
        length = self.group or columns
        if columns % length or columns * self.bits % 8:
            why = f"a row is whole groups of {length}"
            raise OptionError(f"{columns} columns have no format {self.name}", why=why, fix="choose another group")
        return columns // length

    def pack(self, codes: Tensor, scales: Parts) -> Parts:
        """Return the parts of [*, columns] codes and their scales."""
        return {"codes": codes if self.bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4, **scales}

    def unpack(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Return the dequantized [*, columns] values of parts, in a dtype."""
        codes = parts["codes"]
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        groups = codes.reshape(*parts["scale"].shape, -1)
        return self.decode(groups, parts, dtype).reshape(codes.shape)

    @abstractmethod
    def fit(self, weight: Tensor) -> Parts:
        """Return scales, [rows, groups] in the dtype of a [rows, groups, columns] weight."""

    def cover(self, values: Tensor) -> Parts:
        """Return scales [*, groups] of [*, groups, columns] values, with which all of them are in range."""
        return self.fit(values)

    @abstractmethod
    def encode(self, weight: Tensor, scales: Parts) -> Tensor:
        """Return the codes of a [rows, groups, columns] weight."""

    @abstractmethod
    def decode(self, codes: Tensor, scales: Parts, dtype: torch.dtype) -> Tensor:
        """Return the dequantized values of [rows, groups, columns] codes, in a dtype."""


class Int8(Format):
    """Symmetric: ``codes · scale``, with codes from -127 to 127."""

    bits = 8

    def fit(self, weight: Tensor) -> Parts:
        """Return ``scale``."""
        return {"scale": (weight.float().abs().amax(-1) / 127).clamp(min=_LEAST_SCALE).to(weight.dtype)}

    def encode(self, weight: Tensor, scales: Parts) -> Tensor:
        """Return the nearest codes, int8."""
        return (weight.float() / scales["scale"].float()[..., None]).round().clamp(-127, 127).to(torch.int8)

    def decode(self, codes: Tensor, scales: Parts, dtype: torch.dtype) -> Tensor:
        """Return the dequantized values."""
        return codes.to(dtype) * scales["scale"].to(dtype)[..., None]


class Float8(Format):
    """Symmetric: ``codes · scale``, with codes in float8 (E4M3)."""

    bits = 8

    def fit(self, weight: Tensor) -> Parts:
        """Return ``scale``."""
        largest = weight.float().abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max
        return {"scale": largest.clamp(min=_LEAST_SCALE).to(weight.dtype)}

    def encode(self, weight: Tensor, scales: Parts) -> Tensor:
        """Return the nearest codes, float8_e4m3fn: the largest, where a scale that is rounded down would exceed it."""
        most = torch.finfo(torch.float8_e4m3fn).max
        return (weight.float() / scales["scale"].float()[..., None]).clamp(-most, most).to(torch.float8_e4m3fn)

    def decode(self, codes: Tensor, scales: Parts, dtype: torch.dtype) -> Tensor:
        """Return the dequantized values."""
        return codes.to(dtype) * scales["scale"].to(dtype)[..., None]


class Int4(Format):
    """With zero points: ``(codes - zero) · scale``, with codes from 0 to 15."""

    def fit(self, weight: Tensor) -> Parts:
        """Return ``scale`` and ``zero``, uint8: those with the least squared error among the clipping ratios."""
        x = weight.float()
        low, high = x.aminmax(dim=-1)
        least, best = torch.full_like(low, torch.inf), self._scales(low, high, weight.dtype)
        for clip in _CLIPS:
            tried = self._scales(low * clip, high * clip, weight.dtype)
            error = (self.decode(self.encode(x, tried), tried, torch.float32) - x).square().sum(-1)
            better = error < least
            least, best = torch.where(better, error, least), {n: torch.where(better, tried[n], best[n]) for n in best}
        return best

    def cover(self, values: Tensor) -> Parts:
        """Return ``scale`` and ``zero`` of the whole range."""
        return self._scales(*values.float().aminmax(dim=-1), values.dtype)

    def _scales(self, low: Tensor, high: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the scale of a range, which is extended to 0, in a dtype, and its zero point."""
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = ((high - low) / 15).clamp(min=_LEAST_SCALE).to(dtype)
        return {"scale": scale, "zero": (-low / scale.float()).round().clamp(0, 15).to(torch.uint8)}

    def encode(self, weight: Tensor, scales: Parts) -> Tensor:
        """Return the nearest codes, uint8."""
        x = weight.float() / scales["scale"].float()[..., None] + scales["zero"].float()[..., None]
        return x.round().clamp(0, 15).to(torch.uint8)

    def decode(self, codes: Tensor, scales: Parts, dtype: torch.dtype) -> Tensor:
        """Return the dequantized values."""
        return (codes.to(dtype) - scales["zero"].to(dtype)[..., None]) * scales["scale"].to(dtype)[..., None]


class NormalFloat4(Format):
    """A codebook: ``numbers[codes] · scale``, with the sixteen numbers of ``NF4``."""

    def fit(self, weight: Tensor) -> Parts:
        """Return ``scale``, and ``numbers``, [16]."""
        scale = weight.float().abs().amax(-1).clamp(min=_LEAST_SCALE)
        numbers = torch.tensor(NF4, device=weight.device)
        return {"scale": scale.to(weight.dtype), "numbers": numbers.to(weight.dtype)}

    def encode(self, weight: Tensor, scales: Parts) -> Tensor:
        """Return the nearest codes, uint8."""
        numbers = scales["numbers"].float()
        between = (numbers[1:] + numbers[:-1]) / 2
        scaled = (weight.float() / scales["scale"].float()[..., None]).contiguous()
        return torch.bucketize(scaled, between).to(torch.uint8)

    def decode(self, codes: Tensor, scales: Parts, dtype: torch.dtype) -> Tensor:
        """Return the dequantized values."""
        return scales["numbers"][codes.int()].to(dtype) * scales["scale"].to(dtype)[..., None]


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 codes of rows [*, columns], and their scales [*, 1] in float32, with which codes reach ±127."""
    rows = x.float()
    scale = (rows.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (rows / scale).round().to(torch.int8), scale


_FAMILIES: dict[str, tuple[type[Format], int, bool]] = {
    "int8": (Int8, 128, False), "int4": (Int4, 64, False), "nf4": (NormalFloat4, 64, False),
    "fp8": (Float8, 0, False), "w8a8": (Int8, 0, True), "w4a8": (Int4, 64, True),
}  # fmt: skip
"""By the first part of a name: the class, the group where the name has none, and whether inputs are quantized too."""


def format_named(name: str) -> Format:
    """Return the format of a name, with a group as in ``int4-g128``, or for whole rows as in ``int8-row``.

    ``w8a8`` is ``int8-row`` with inputs in int8, and ``w4a8`` is ``int4`` with these.

    Raises:
        OptionError: for any other name.
    """
    family, _, group = name.partition("-")
    if family in _FAMILIES:
        kind, usual, activations = _FAMILIES[family]
        if group in ("", "row"):
            return kind(name, 0 if group else usual, activations)
        if group[0] == "g" and group[1:].isdecimal() and int(group[1:]):
            return kind(name, int(group[1:]), activations)
    known = [*_FAMILIES, *(f"{f}-{g}" for f in _FAMILIES for g in ("g32", "g64", "g128", "row"))]
    raise OptionError(f"no format is called {name!r}", fix=suggestion(name, known))
