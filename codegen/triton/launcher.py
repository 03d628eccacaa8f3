"""Launches on a GPU: the first goes through Triton, which compiles; those after it straight to what it compiled."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.tile.sizes import PYTHON
from fusec.codegen.triton.descriptors import Descriptors
from fusec.codegen.triton.signature import launches
from fusec.errors import BuildError

_ALIGNMENT = 16
"""Bytes: Triton compiles anew for an address that is a multiple of this, and for one that is not."""
_IS_AMD = torch.version.hip is not None
"""There Triton also asks how long the memory is, and finds what it compiled itself."""


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
        self._kernel, self._function, self._options = kernel, function, options
        self._programs = counting(kernel)
        self._describe = Descriptors(kernel) if kernel.config.descriptors else None
        self._lanes = [p.default for p in function.params if p.is_constexpr]
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._refused: dict[tuple[Any, ...], str] = {}
        """Why there is nothing to launch; Triton says it in full only once."""

    def __call__(self, buffers: Sequence[Tensor], symbols: Sequence[int]) -> None:
        """Launch on the current stream of the device that the buffers lie on.

        Raises:
            BuildError: where Triton cannot compile it or the device cannot load it; nothing has been launched then.
        """
        programs = self._programs(*symbols)
        if not programs:
            return
        device, active = buffers[0].device.index, driver.active
        if active.get_current_device() != device:
            with torch.cuda.device(device):
                return self(buffers, symbols)
        pointers = [buffer.data_ptr() for buffer in buffers]
        kind = _kind(device, pointers, symbols)
        compiled = self._compiled.get(kind)
        described = self._describe(buffers, symbols) if self._describe else ()
        if compiled is None:
            compiled = self._compile(kind, programs, (*buffers, *described, *symbols))
        if _IS_AMD or _somebody_listens():
            self._function[(programs,)](*buffers, *described, *symbols, **self._options)
            return
        stream, metadata = active.get_current_stream(device), compiled.packed_metadata
        given = (*pointers, *described, *symbols, *self._lanes)
        compiled.run(programs, 1, 1, stream, compiled.function, metadata, None, None, None, *given)

    def prepare(self, buffers: Sequence[Tensor], symbols: Sequence[int]) -> None:
        """Compile and load what such a launch needs.

        Raises:
            BuildError: as a launch does.
        """
        if programs := self._programs(*symbols):
            kind = _kind(buffers[0].device.index, [buffer.data_ptr() for buffer in buffers], symbols)
            if kind not in self._compiled:
                described = self._describe(buffers, symbols) if self._describe else ()
                with torch.cuda.device(buffers[0].device):
                    self._compile(kind, programs, (*buffers, *described, *symbols))

    def _compile(self, kind: tuple[Any, ...], programs: int, arguments: Sequence[Any]) -> Any:
        """What Triton compiles for launches of a kind, loaded on the current device."""
        if (why := self._refused.get(kind)) is not None:
            raise self._error(why)
        try:
            compiled = self._function.warmup(*arguments, grid=(programs,), **self._options)
            compiled[programs, 1, 1]  # whoever asks for a launch has it loaded
        except Exception as reason:
            why = self._refused[kind] = " ".join(f"{type(reason).__name__}: {reason}".split())
            raise self._error(why) from reason
        self._compiled[kind] = compiled
        return compiled

    def _error(self, why: str) -> BuildError:
        where = str(next(iter(self._kernel.sources), ""))
        fix = "the option `strict` raises this with all that Triton says; another version of it may do better"
        return BuildError(f"kernel {self._kernel.name} cannot be launched", where=where, why=why, fix=fix)


def counting(kernel: Kernel) -> Callable[..., int]:
    """How many programs a launch starts, as a function of the kernel's symbols."""
    text = f"lambda {', '.join(kernel.symbols)}: {PYTHON.print(launches(kernel))}"
    function: Callable[..., int] = eval(text)
    return function


def _kind(device: int, pointers: Sequence[int], symbols: Sequence[int]) -> tuple[Any, ...]:
    """What a launch has in common with those that run the same code."""
    kind: tuple[Any, ...] = (device, *map(_kind_of_size, symbols))
    if reduce(or_, pointers) % _ALIGNMENT:
        kind += tuple(i for i, pointer in enumerate(pointers) if pointer % _ALIGNMENT)
    return kind


def _kind_of_size(size: int) -> tuple[bool, bool, bool]:
    """What Triton compiles anew for: 1, multiples of 16, and what needs 64 bits."""
    return size == 1, size % _ALIGNMENT == 0, size >= 2**31


def _somebody_listens() -> bool:
    """Whether a profiler wants to know of launches."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))
