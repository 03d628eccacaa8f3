"""Launches on a GPU that bypass Triton's dispatch once a kernel is compiled."""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.triton.arguments import DescriptorArguments, program_count
from fusec.errors import BuildError

_ALIGNMENT = 16
"""In bytes: Triton specializes a kernel on whether addresses and sizes are multiples of it."""
_IS_AMD = torch.version.hip is not None
"""There Triton also specializes on the length of buffers, so launches go through its dispatch."""


class Launcher:
    """Launches one grid of a kernel.

    Triton inspects every argument at each launch to find the specialization that it compiled, and prepares for
    profilers. Here only what may differ between launches of one kernel is inspected: the device, which buffers are not
    aligned, and the properties of sizes that Triton specializes on. Addresses are passed as integers, which the driver
    does not inspect.

    Args:
        kernel: the grid.
        function: its ``triton.jit`` function.
        options: of Triton's compiler.
    """

    def __init__(self, kernel: Kernel, function: Any, options: dict[str, Any]) -> None:
        self._kernel, self._function, self._options = kernel, function, options
        self._programs = program_count(kernel)
        self._describe = DescriptorArguments(kernel) if kernel.config.descriptors else None
        self._lanes = [p.default for p in function.params if p.is_constexpr]
        self._compiled: dict[tuple[Any, ...], Any] = {}
        """By specialization."""
        self._errors: dict[tuple[Any, ...], str] = {}
        """By specialization that failed to compile; Triton reports an error in full only once."""

    def __call__(self, buffers: Sequence[Tensor], symbols: Sequence[int]) -> None:
        """Launch on the current stream of the buffers' device.

        Raises:
            BuildError: if Triton cannot compile it or the device cannot load it; nothing was launched then.
        """
        programs = self._programs(*symbols)
        if not programs:
            return
        device, active = buffers[0].device.index, driver.active
        if active.get_current_device() != device:
            with torch.cuda.device(device):
                return self(buffers, symbols)
        pointers = [buffer.data_ptr() for buffer in buffers]
        key = _specialization(device, pointers, symbols)
        compiled = self._compiled.get(key)
        described = self._describe(buffers, symbols) if self._describe else ()
        if compiled is None:
            compiled = self._compile(key, programs, (*buffers, *described, *symbols))
        if _IS_AMD or _has_launch_hook():
            self._function[(programs,)](*buffers, *described, *symbols, **self._options)
            return
        stream, metadata = active.get_current_stream(device), compiled.packed_metadata
        given = (*pointers, *described, *symbols, *self._lanes)
        compiled.run(programs, 1, 1, stream, compiled.function, metadata, None, None, None, *given)

    def prepare(self, buffers: Sequence[Tensor], symbols: Sequence[int]) -> None:
        """Compile and load the specialization for a launch.

        Raises:
            BuildError: as a launch does.
        """
        if programs := self._programs(*symbols):
            key = _specialization(buffers[0].device.index, [buffer.data_ptr() for buffer in buffers], symbols)
            if key not in self._compiled:
                described = self._describe(buffers, symbols) if self._describe else ()
                with torch.cuda.device(buffers[0].device):
                    self._compile(key, programs, (*buffers, *described, *symbols))

    def _compile(self, key: tuple[Any, ...], programs: int, arguments: Sequence[Any]) -> Any:
        """Compile a specialization, and load it on the current device."""
        if (why := self._errors.get(key)) is not None:
            raise self._error(why)
        try:
            compiled = self._function.warmup(*arguments, grid=(programs,), **self._options)
            compiled[programs, 1, 1]  # loads it
        except Exception as reason:
            why = self._errors[key] = " ".join(f"{type(reason).__name__}: {reason}".split())
            raise self._error(why) from reason
        self._compiled[key] = compiled
        return compiled

    def _error(self, why: str) -> BuildError:
        where = str(next(iter(self._kernel.sources), ""))
        fix = "the option `strict` raises this error with all of Triton's message; try another version of Triton"
        return BuildError(f"kernel {self._kernel.name} cannot be launched", where=where, why=why, fix=fix)


def _specialization(device: int, pointers: Sequence[int], symbols: Sequence[int]) -> tuple[Any, ...]:
    """Return a key that is equal for launches that run the same machine code."""
    key: tuple[Any, ...] = (device, *map(_size_properties, symbols))
    if reduce(or_, pointers) % _ALIGNMENT:
        key += tuple(i for i, pointer in enumerate(pointers) if pointer % _ALIGNMENT)
    return key


def _size_properties(size: int) -> tuple[bool, bool, bool]:
    """Return what Triton specializes on: whether a size is 1, a multiple of 16, or needs 64 bits."""
    return size == 1, size % _ALIGNMENT == 0, size >= 2**31


def _has_launch_hook() -> bool:
    """Return whether a profiler hooks launches."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))
