"""Draws of random numbers in plain PyTorch: one call makes the same uniform numbers as eager's, kernels do the rest."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_CHECKED = 1000
"""Numbers that are compared."""


def decompositions_of_draws() -> dict[Any, Callable[..., Any]]:
    """Return the decomposition of each operation; none where torch draws in another way."""
    if not _exponentials_are_of_uniform_numbers():
        return {}
    return {_aten.multinomial.default: _multinomial, _aten.exponential.default: _exponential}


def _exponential(x: Tensor, lambd: float = 1.0, *, generator: Any = None) -> Any:
    """``exponential``: -ln(1 - u) of uniform numbers u in float64, which it rounds to the dtype.

    Args:
        x: gives shape and dtype.
        lambd: 1; with another rate it stays a call.
        generator: none; with one of the caller's it stays a call.
    """
    plain = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and x.is_contiguous()
    if not plain or lambd != 1 or generator is not None:
        return NotImplemented
    return (-torch.log1p(-torch.rand(x.shape, dtype=torch.float64))).to(x.dtype)


def _multinomial(p: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Any:
    """``multinomial`` of one sample: where the probabilities over exponential numbers are greatest.

    The checks of eager follow the draw, so that one kernel computes both.

    Args:
        p: [rows, elements] or [elements].
        num_samples: 1; several samples stay a call.
        replacement: makes no difference for one sample.
        generator: as for ``exponential``.
    """
    q = _exponential(p, generator=generator)
    if num_samples != 1 or q is NotImplemented or p.numel() == 0:
        return NotImplemented
    found = (p / q).argmax(-1, keepdim=True)
    valid = ((p >= 0) & (p < torch.inf)).all(-1).all()
    _aten._assert_async.msg(valid, "probability tensor contains either `inf`, `nan` or element < 0")
    _aten._assert_async.msg((p.sum(-1) > 0).all(), "invalid multinomial distribution (sum of probabilities <= 0)")
    return found


@cache
def _exponentials_are_of_uniform_numbers() -> bool:
    """Return whether torch draws exponential numbers this way, as it does unless it has MKL's generator."""
    one, other = torch.Generator(), torch.Generator()
    drawn = torch.empty(_CHECKED).exponential_(generator=one.manual_seed(0))
    uniform = torch.rand(_CHECKED, dtype=torch.float64, generator=other.manual_seed(0))
    return torch.equal(drawn, (-torch.log1p(-uniform)).float()) and torch.equal(one.get_state(), other.get_state())
