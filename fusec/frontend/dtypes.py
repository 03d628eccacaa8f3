"""Torch's dtypes and tensors as types of the IR."""

from typing import Any

import sympy
import torch

from fusec.frontend.sizes import to_size
from fusec.ir import types as t
from fusec.ir.types import DType, OtherType, ScalarType, Size, TensorType, Type, simplify
from fusec.reference.dtypes import TORCH_DTYPES

_NAMES = {torch_dtype: t.DTYPES[name] for name, torch_dtype in TORCH_DTYPES.items()}


def to_dtype(dtype: torch.dtype) -> DType:
    """Return the IR's dtype; dtypes without generated arithmetic (complex, float8) have the kind ``other``."""
    known = _NAMES.get(dtype)
    return known or DType(str(dtype).removeprefix("torch."), "other", dtype.itemsize)


def to_torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's dtype."""
    known = TORCH_DTYPES.get(dtype.name)
    return known if known is not None else getattr(torch, dtype.name)


def to_type(value: Any) -> Type:
    """Return the type of ``meta["val"]``: a fake tensor, a number (perhaps symbolic), or anything else."""
    if isinstance(value, torch.Tensor):
        return tensor_type(value)
    if isinstance(value, (bool, torch.SymBool)):
        return ScalarType("bool")
    if isinstance(value, (int, torch.SymInt)):
        return ScalarType("int", to_size(value))
    if isinstance(value, (float, torch.SymFloat)):
        return ScalarType("float")
    return OtherType("none" if value is None else type(value).__name__)


def tensor_type(value: torch.Tensor, even_empty: bool = False) -> "TensorType | OtherType":
    """The type of a tensor, strides included; a sparse or opaque layout is something only ATen understands.

    Args:
        value: most often a fake tensor.
        even_empty: the strides must be eager's even if a computed length turns out to be 0.
    """
    if value.layout != torch.strided:
        return OtherType(str(value.layout).removeprefix("torch."))
    shape = tuple(to_size(n) for n in value.shape)
    strides = tuple(to_size(n) if even_empty else _of_some(to_size(n)) for n in value.stride())
    return TensorType(to_dtype(value.dtype), shape, strides, str(value.device))


def _of_some(stride: Size) -> Size:
    """Return a stride of a nonempty tensor: torch takes the larger of 1 and each length."""
    if isinstance(stride, int) or not stride.has(sympy.Max):
        return stride
    return simplify(
        stride.replace(lambda e: isinstance(e, sympy.Max) and e.args[0] == 1, lambda e: sympy.Max(*e.args[1:]))
    )
