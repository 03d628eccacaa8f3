"""Kernels compiled side by side before their first launches, which would compile them one after the other."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from fusec.codegen.triton.kernel import TritonKernel
from fusec.reference.dtypes import torch_dtype


class _Aligned(MockTensor):  # type: ignore[misc]
    """Memory of a GPU that starts at a multiple of 16 bytes, as torch's does: all that a compile asks of it."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype)
        self.device = device


def prepare_all(kernels: Sequence[TritonKernel]) -> None:
    """Compile kernels of known sizes for the present GPU.

    Others, and those whose memory is not aligned or lies on another GPU, are compiled when they are launched; so is,
    once more, what fails here, and told then.
    """
    device = torch.device("cuda", driver.active.get_current_device())

    def prepare(kernel: TritonKernel) -> None:
        given = [_Aligned(torch_dtype(b.dtype), device) for b in kernel.kernel.given]
        with suppress(Exception):
            kernel.prepare(given)

    known = [k for k in kernels if not (k.kernel.symbols or k.kernel.config.descriptors)]
    if known:
        with ThreadPoolExecutor(min(len(known), os.cpu_count() or 1)) as pool:
            list(pool.map(prepare, known))
