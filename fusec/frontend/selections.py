"""Selections along the last dim, in plain PyTorch: reductions that find the largest elements and where they are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_MOST_SELECTED = 8
"""The most elements that are selected, one after another."""
_LONGEST = 1024
"""The most elements that they are selected from, as each selection reads all of them again."""


def decompositions_of_selections() -> dict[Any, Callable[..., Any]]:
    """Return the decomposition of each operation."""
    return {
        _aten.argmax.default: _argmax,
        _aten.argmin.default: _argmin,
        _aten.topk.default: _topk,
    }


def _argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """``argmax``: the first of the largest elements; NaN is larger than all others.

    Args:
        x: [..., elements], of any number of dims, or of one where all are searched.
        dim: the last, or None for all elements.
        keepdim: leave a dim of length 1.
    """
    if x.ndim == 0 or dim not in (-1, x.ndim - 1, *((None,) if x.ndim == 1 else ())) or not _is_searched(x):
        return NotImplemented
    found = _first(x, x.amax(-1, keepdim=True), None).long()
    return found if keepdim else found.squeeze(-1)


def _argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """``argmin``: as ``argmax``, of numbers in reverse order; the negative of the least integer is no integer."""
    return _argmax(-x if x.is_floating_point() else ~x, dim, keepdim)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """``topk``, largest first, and of equal elements the first; NaN is larger than all others.

    Args:
        x: [..., elements].
        k: few.
        dim: the last.
        largest: opaque where the smallest are selected.
        sorted: ignored, as any order is right where it is False.
    """
    last = x.ndim > 0 and dim in (-1, x.ndim - 1)
    if not (last and largest and 0 < k <= _MOST_SELECTED and _is_searched(x) and x.is_floating_point()):
        return NotImplemented
    if not isinstance(x.shape[-1], int) or x.shape[-1] > _LONGEST:
        return NotImplemented
    values, indices, taken = list[Tensor](), list[Tensor](), None
    for _ in range(k):
        left = x if taken is None else x.masked_fill(taken, -torch.inf)
        values.append(left.amax(-1, keepdim=True))
        indices.append(_first(left, values[-1], taken))
        chosen = _positions(x) == indices[-1]
        taken = chosen if taken is None else taken | chosen
    return torch.cat(values, -1), torch.cat(indices, -1).long()


def _is_searched(x: Tensor) -> bool:
    return x.dtype != torch.bool and not x.is_complex() and x.numel() != 0


def _first(x: Tensor, largest: Tensor, taken: Tensor | None) -> Tensor:
    """Return where the first of the largest elements is that is not taken, int32."""
    found = x == largest
    if x.is_floating_point():
        found = found | (x.isnan() & largest.isnan())
    if taken is not None:
        found = found & ~taken
    return torch.where(found, _positions(x), x.shape[-1] - 1).amin(-1, keepdim=True)


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
