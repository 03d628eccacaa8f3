"""Rounding of a weight to a format: to nearest, or calibrated on a sample (GPTQ)."""

import torch
from torch import Tensor

from fusec.quantization.formats import Format, Parts

_DAMPING = 0.01
"""Hessian damping, as in GPTQ: the share of the mean square of the inputs that is added to the diagonal."""
_BLOCK = 128
"""Columns whose errors are applied to later columns at once."""


def round_to_nearest(weight: Tensor, format: Format) -> Parts:
    """Return the parts of a [rows, columns] weight, each number rounded to the nearest; raises as ``Format.groups``."""
    groups = weight.reshape(weight.shape[0], format.groups(weight.shape[1]), -1)
    scales = format.fit(groups)
    return format.pack(format.encode(groups, scales).reshape(weight.shape), scales)


def round_for_inputs(weight: Tensor, format: Format, squares: Tensor) -> Parts:
    """Return the parts of a weight rounded column by column, where later columns make up for errors of earlier ones.

    The method is that of Frantar et al., "GPTQ" (2022), with columns in the order of the weight.

    Args:
        weight: [rows, columns].
        format: the number format.
        squares: Σ xᵀ·x over inputs x of the layer, [columns, columns] in float32.

    Raises:
        OptionError: as ``Format.groups``.
    """
    rows, columns = weight.shape
    length = columns // format.groups(columns)
    squares = squares.double()
    idle = squares.diagonal() == 0
    squares = squares + torch.diag(idle + _DAMPING * squares.diagonal().mean())
    upper = torch.linalg.cholesky(torch.linalg.inv(squares), upper=True).float()
    rest = weight.float().clone()
    codes: list[Tensor] = []
    scales: list[Parts] = []
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        errors = torch.zeros(rows, stop - start, device=rest.device)
        for column in range(start, stop):
            if column % length == 0:
                # Errors of earlier columns are already applied to this group.
                group = rest[:, column : column + length].to(weight.dtype)
                scales.append(format.fit(group[:, None]))
            numbers = rest[:, column, None, None]
            codes.append(format.encode(numbers, scales[-1])[:, 0])
            found = format.decode(codes[-1][:, None], scales[-1], torch.float32)[:, 0, 0]
            errors[:, column - start] = (rest[:, column] - found) / upper[column, column]
            rest[:, column:stop] -= errors[:, column - start, None] * upper[column, None, column:stop]
        rest[:, stop:] -= errors @ upper[start:stop, stop:]
    joined = {name: torch.cat([s[name] for s in scales], 1) for name in scales[0] if scales[0][name].ndim == 2}
    return format.pack(torch.cat(codes, 1), {**scales[0], **joined})
