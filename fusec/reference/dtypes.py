"""Torch's dtypes for the IR's."""

import torch

from fusec.errors import GraphError
from fusec.ir.types import DType

TORCH_DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's dtype for the IR's.

    Raises:
        GraphError: for one that only opaque nodes touch.
    """
    found = TORCH_DTYPES.get(dtype.name)
    if found is None:
        raise GraphError(f"dtype {dtype} has no arithmetic", why="only opaque nodes use it")
    return found


def memory_dtype(dtype: DType) -> torch.dtype:
    """Return torch's dtype of memory, also for those that have no arithmetic."""
    return TORCH_DTYPES.get(dtype.name) or getattr(torch, dtype.name)
