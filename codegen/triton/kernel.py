"""Kernels that Triton compiles, at the first launch or ahead of it in parallel; CPU tensors go to its interpreter."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from fusec.codegen.program.edits import edited_source
from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.triton.arguments import buffers_by_name, fits
from fusec.codegen.triton.grids import grids
from fusec.codegen.triton.interpreter import InterpretedKernel
from fusec.codegen.triton.jit import define
from fusec.codegen.triton.launcher import Launcher
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.signature import options
from fusec.config import Config
from fusec.errors import BuildError, FusecError
from fusec.reference.dtypes import memory_dtype


class TritonKernel:
    """One kernel: compiled by Triton for GPU tensors, run by its interpreter on CPU tensors.

    Args:
        kernel: the tile program.
        dependent: launch it before the previous kernel ends, for which it waits (programmatic dependent launch).
        config: names the cache with edits; without it the generated source is used.
    """

    def __init__(self, kernel: Kernel, dependent: bool = False, config: Config | None = None) -> None:
        self.kernel, self.name = kernel, kernel.name
        self.source, self.edited = print_kernel(kernel, dependent), ""
        """``edited`` is the path of the edit that the source is from; "" for the generated one."""
        if config is not None:
            self.source, self.edited = edited_source(self.name, self.source, config)
        self._launch_options = {"launch_pdl": True} if dependent else {}
        self._launchers: list[tuple[Kernel, Launcher]] = []
        self._interpreted: InterpretedKernel | None = None
        self._fits = fits(kernel)
        by_address = replace(kernel, config=replace(kernel.config, descriptors=False))
        self._by_address = TritonKernel(by_address, dependent, config) if kernel.config.descriptors else None
        """Runs where descriptors cannot describe the memory."""

    def __call__(self, buffers: Sequence[Tensor], symbols: Sequence[int] = ()) -> None:
        """Launch on tensors, whose first elements the pointers of the kernel address.

        Args:
            buffers: one for each buffer of the kernel, in order, without shared memory.
            symbols: their values, in the order of ``kernel.symbols``.

        Raises:
            BuildError: if Triton cannot compile it or the GPU cannot load it; nothing was launched then.
        """
        if len(buffers) != len(self.kernel.given) or len(symbols) != len(self.kernel.symbols):
            raise FusecError(
                f"kernel {self.name} takes {len(self.kernel.given)} buffers and {len(self.kernel.symbols)} symbols",
                why=f"{len(buffers)} and {len(symbols)} were passed",
            )
        if self._by_address is not None and not self._fits(buffers, symbols):
            return self._by_address(buffers, symbols)
        if buffers[0].device.type == "cpu":
            return self._interpret(buffers, symbols)
        launches = self._launches(buffers, symbols)
        for launcher, given in launches[1:]:  # launch the first only if all can be
            launcher.prepare(given, symbols)
        for launcher, given in launches:
            launcher(given, symbols)

    def _interpret(self, buffers: Sequence[Tensor], symbols: Sequence[int]) -> None:
        """Run in the interpreter.

        Raises:
            FusecError: for an edited source that the interpreter cannot run; a BuildError where the kernel has not
                updated its inputs, so that its operations may run instead.
        """
        self._interpreted = self._interpreted or InterpretedKernel(self.kernel, self.source if self.edited else "")
        try:
            self._interpreted(buffers, symbols)
        except IndexError:
            raise  # as eager raises it
        except Exception as reason:
            if not self.edited:
                raise
            why, fix = f"{type(reason).__name__}: {reason}", "edit it again, or remove it by `fusec kernels revert`"
            updates = any(buffer.role == "update" for buffer in self.kernel.buffers)
            error = FusecError if updates else BuildError
            raise error(f"the edited kernel {self.name} fails", where=self.edited, why=why, fix=fix) from reason

    def prepare(self, buffers: Sequence[Tensor], symbols: Sequence[int] = ()) -> None:
        """Compile what a call with these arguments needs; kernels can be prepared in parallel."""
        if self._by_address is not None and not self._fits(buffers, symbols):
            return self._by_address.prepare(buffers, symbols)
        if buffers[0].device.type == "cpu":
            return
        for launcher, given in self._launches(buffers, symbols):
            launcher.prepare(given, symbols)

    def _launches(self, buffers: Sequence[Tensor], symbols: Sequence[int]) -> list[tuple[Launcher, Sequence[Tensor]]]:
        """Return the launcher of each grid with its buffers."""
        if not self._launchers:
            self._launchers = [
                (grid, Launcher(grid, define(grid, self.source), options(grid) | self._launch_options))
                for grid in grids(self.kernel)
            ]
        if len(self._launchers) == 1:
            return [(self._launchers[0][1], buffers)]
        by_name = buffers_by_name(self.kernel, buffers, symbols)
        return [(launcher, [by_name[b.name] for b in grid.buffers]) for grid, launcher in self._launchers]


class _AlignedMemory(MockTensor):  # type: ignore[misc]
    """A stand-in for GPU memory aligned to 16 bytes, as torch allocates it: all that compilation depends on."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype)
        self.device = device


def prepare_all(kernels: Sequence[TritonKernel]) -> None:
    """Compile kernels of static sizes for the current GPU in parallel.

    Kernels of dynamic sizes, and those whose memory turns out to be unaligned or on another GPU, are compiled at their
    launch; so are those that fail here, and then the error is reported.
    """
    device = torch.device("cuda", driver.active.get_current_device())

    def prepare(kernel: TritonKernel) -> None:
        buffers = [_AlignedMemory(memory_dtype(b.dtype), device) for b in kernel.kernel.given]
        with suppress(Exception):
            kernel.prepare(buffers)

    static = [k for k in kernels if not (k.kernel.symbols or k.kernel.config.descriptors)]
    if static:
        with ThreadPoolExecutor(min(len(static), os.cpu_count() or 1)) as pool:
            list(pool.map(prepare, static))
