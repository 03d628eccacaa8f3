"""Launches on a GPU: the first goes through Triton, which compiles; those after it straight to what it compiled."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from fusec.codegen.kernel import Kernel
from fusec.codegen.sizes import PYTHON
from fusec.codegen.triton.descriptors import Descriptors
from fusec.codegen.triton.signature import launches

_ALIGNMENT = 16
"""Bytes: Triton compiles anew for an address that is a multiple of this, and for one that is not."""


class Launcher:
    """What launches one kernel.

    Triton's own way asks at every launch what each argument is, to find what it compiled for such ones, and makes ready
    for profilers. Here only what may differ between two launches of one kernel is asked: the device, which memory is
    not aligned, and of which kind sizes are. Addresses are handed over as numbers, of which the driver asks nothing.

    Args:
        kernel: what is launched.
        function: its ``triton.jit`` function.
        options: those of its compiler.
    """

    def __init__(self, kernel: Kernel, function: Any, options: dict[str, Any]) -> None:
        self._function, self._options = function, options
        self._programs = counting(kernel)
        self._describe = Descriptors(kernel) if kernel.choice.descriptors else None
        self._lanes = [p.default for p in function.params if p.is_constexpr]
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, buffers: Sequence[Tensor], symbols: Sequence[int]) -> None:
        """Launch on the current stream of the device that the buffers lie on."""
        programs = self._programs(*symbols)
        if not programs:
            return
        device, active = buffers[0].device.index, driver.active
        if active.get_current_device() != device:
            with torch.cuda.device(device):
                return self(buffers, symbols)
        pointers = [buffer.data_ptr() for buffer in buffers]
        kind: tuple[Any, ...] = (device, *map(_kind, symbols))
        if reduce(or_, pointers) % _ALIGNMENT:
            kind += tuple(i for i, pointer in enumerate(pointers) if pointer % _ALIGNMENT)
        compiled = self._compiled.get(kind)
        described = self._describe(buffers, symbols) if self._describe else ()
        if compiled is None or _somebody_listens():
            compiled = self._function[(programs,)](*buffers, *described, *symbols, **self._options)
            if torch.version.hip is None:  # there Triton also asks how long the memory is
                self._compiled[kind] = compiled
            return
        stream, metadata = active.get_current_stream(device), compiled.packed_metadata
        given = (*pointers, *described, *symbols, *self._lanes)
        compiled.run(programs, 1, 1, stream, compiled.function, metadata, None, None, None, *given)

    def prepare(self, buffers: Sequence[Tensor], symbols: Sequence[int]) -> None:
        """Compile what such a launch needs."""
        if programs := self._programs(*symbols):
            described = self._describe(buffers, symbols) if self._describe else ()
            with torch.cuda.device(buffers[0].device):
                self._function.warmup(*buffers, *described, *symbols, grid=(programs,), **self._options)


def counting(kernel: Kernel) -> Callable[..., int]:
    """How many programs a launch starts, as a function of the kernel's symbols."""
    text = f"lambda {', '.join(kernel.symbols)}: {PYTHON.print(launches(kernel))}"
    function: Callable[..., int] = eval(text)
    return function


def _kind(size: int) -> tuple[bool, bool, bool]:
    """What Triton compiles anew for: 1, multiples of 16, and what needs 64 bits."""
    return size == 1, size % _ALIGNMENT == 0, size >= 2**31


def _somebody_listens() -> bool:
    """Whether a profiler wants to know of launches."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))
