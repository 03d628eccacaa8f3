"""Binary searches of sorted rows, in plain PyTorch: each step looks at one element of the row for each value."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def decompositions_of_searches() -> dict[Any, Callable[..., Any]]:
    """Return the decomposition of each operation."""
    return {_aten.searchsorted.Tensor: _searchsorted, _aten.bucketize.Tensor: _bucketize}


def _bucketize(x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Any:
    """``bucketize``: ``searchsorted`` of one row, with its operands in another order."""
    if boundaries.ndim != 1:
        return NotImplemented
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)


def _searchsorted(
    rows: Tensor,
    values: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Any:
    """``searchsorted``: how many elements of a sorted row are less than each value, or, on the right, not greater.

    The steps are eager's, whose result shows them where a row holds NaN or is not sorted.

    Args:
        rows: [elements] or [..., elements]; opaque where the number of elements is symbolic, as that of the steps is.
        values: any shape, or [..., values] beside rows.
        out_int32: dtype of the result.
        right: see above.
        side: "right" as well.
        sorter: none; with one it stays a call, as does what eager refuses.
    """
    n = rows.shape[-1] if rows.ndim else 0
    if sorter is not None or not isinstance(n, int) or not 0 < n < 2**30 or side not in (None, "left", "right"):
        return NotImplemented
    if rows.dtype != values.dtype or rows.dtype == torch.bool:
        return NotImplemented
    after = right or side == "right"
    low = torch.zeros(values.shape, dtype=torch.int32, device=values.device)
    high = low + n
    for _ in range(n.bit_length()):
        middle = (low + high) >> 1
        at = middle.clamp(0, n - 1).long()
        element = rows[at] if rows.ndim == 1 else rows.gather(-1, at)
        found = element > values if after else element >= values
        done = low == high
        low, high = torch.where(found | done, low, middle + 1), torch.where(found, middle, high)
    return low if out_int32 else low.long()
