"""Matmuls of groups of rows, each with a matrix of its own, in plain PyTorch: the matrices are looked up by row."""

from typing import Any

import torch
from torch import Tensor

from fusec.frontend.packed_matmuls import Decomposition

_aten = torch.ops.aten


def decompositions_of_grouped_matmuls() -> dict[Any, Decomposition]:
    """Return the decomposition of each operation whose library is loaded."""
    found: dict[Any, Decomposition] = {_aten._grouped_mm.default: _grouped_mm}
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        found[torch.ops.transformers.grouped_mm_fallback.default] = _grouped_mm
    return found


def _grouped_mm(
    x: Tensor,
    matrices: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """torch's ``_grouped_mm``, of a stack of matrices.

    Args:
        x: [rows, summed].
        matrices: [groups, summed, columns].
        offs: for each group the row at which it ends. Eager's result is undefined for rows beyond the last end.
        bias: opaque where there is one.
        out_dtype: the same.
    """
    if offs is None or bias is not None or out_dtype is not None or (x.ndim, matrices.ndim) != (2, 3) or not x.is_cpu:
        return NotImplemented  # a GPU's own kernel multiplies with its matrix units
    rows = torch.arange(x.shape[0], device=x.device)
    group = (offs <= rows[:, None]).sum(-1).clamp(max=matrices.shape[0] - 1)
    return torch.bmm(x[:, None], matrices[group])[:, 0]
