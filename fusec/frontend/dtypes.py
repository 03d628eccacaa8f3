"""Torch's element types and tensors as types of the IR."""

from typing import Any

import torch

from fusec.frontend.sizes import to_size
from fusec.ir import types as t
from fusec.ir.types import DType, OtherType, ScalarType, TensorType, Type
from fusec.verify.dtypes import TORCH_DTYPES

_NAMES = {torch_dtype: t.DTYPES[name] for name, torch_dtype in TORCH_DTYPES.items()}


def to_dtype(dtype: torch.dtype) -> DType:
    """The IR's element type; types without arithmetic of ours (complex, float8) have the kind ``other``."""
    known = _NAMES.get(dtype)
    return known or DType(str(dtype).removeprefix("torch."), "other", dtype.itemsize)


def to_torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's element type."""
    known = TORCH_DTYPES.get(dtype.name)
    return known if known is not None else getattr(torch, dtype.name)


def to_type(value: Any) -> Type:
    """The type of what ``meta["val"]`` holds: a fake tensor, a number (perhaps symbolic), or anything else."""
    if isinstance(value, torch.Tensor):
        return tensor_type(value)
    if isinstance(value, (bool, torch.SymBool)):
        return ScalarType("bool")
    if isinstance(value, (int, torch.SymInt)):
        return ScalarType("int", to_size(value))
    if isinstance(value, (float, torch.SymFloat)):
        return ScalarType("float")
    return OtherType("none" if value is None else type(value).__name__)


def tensor_type(value: torch.Tensor) -> "TensorType | OtherType":
    """The type of a tensor, strides included; a sparse or opaque layout is something only ATen understands."""
    if value.layout != torch.strided:
        return OtherType(str(value.layout).removeprefix("torch."))
    shape = tuple(to_size(n) for n in value.shape)
    strides = tuple(to_size(n) for n in value.stride())
    return TensorType(to_dtype(value.dtype), shape, strides, str(value.device))
