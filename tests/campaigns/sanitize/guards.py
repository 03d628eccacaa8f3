"""Tensors between pages that nobody may touch: the first access beyond them ends the process."""

import ctypes
import mmap
import os
from typing import Any

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_NOTHING = 0
"""PROT_NONE"""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(x: Any) -> Any:
    """Return a tensor with the same elements, dtype and strides whose storage ends where a page without access begins.

    The page before the storage has no access either. Anything but a tensor with elements is returned as it is.

    Raises:
        OSError: where memory cannot be protected.
    """
    if not isinstance(x, Tensor) or x.numel() == 0:
        return x
    count = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    size = count * x.element_size()
    inner = -(-size // _PAGE) * _PAGE
    memory = mmap.mmap(-1, inner + 2 * _PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + _PAGE + inner):
        if _libc.mprotect(page, _PAGE, _NOTHING):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    flat = torch.frombuffer(memory, dtype=x.dtype, count=count, offset=_PAGE + inner - size)
    flat.copy_(torch.as_strided(x, (count,), (1,)))
    return flat.as_strided(x.shape, x.stride())
