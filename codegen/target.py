"""The interface of targets: schedule regions, print kernels, build them into objects that can be launched."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from fusec.analysis.machine import Machine
from fusec.codegen.tile.kernel import Kernel
from fusec.config import Config
from fusec.errors import BuildError
from fusec.ir.graph import Node
from fusec.loops.kinds import Limits
from fusec.loops.plan import Plan
from fusec.pipeline import Context


def device_guard(device: Any) -> AbstractContextManager[None]:
    """Make a GPU the current device of torch and Triton within a ``with`` block; do nothing for other devices.

    Args:
        device: a ``torch.device`` or its name.
    """
    import torch

    gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
    return torch.cuda.device(device) if gpu else nullcontext()


class Launchable(Protocol):
    """A built kernel."""

    name: str
    source: str
    """As printed."""

    def __call__(self, buffers: Sequence[Any], symbols: Sequence[int]) -> int | None:
        """Launch it on tensors (inputs, then outputs; none for scratch) and the values of its symbols.

        Returns ``256 · index + number`` for an index check that failed, and 0 or None otherwise.
        """


@dataclass
class PrintedKernel:
    """A kernel that a tool shows; it is not built, and cannot run."""

    name: str
    source: str

    def __call__(self, buffers: Sequence[Any], symbols: Sequence[int]) -> int | None:
        """Raise BuildError."""
        raise BuildError(f"kernel {self.name} is not built", why="it was compiled for a tool that only shows it")


@dataclass(frozen=True)
class Launch:
    """One launch of a batch."""

    launchable: Any
    buffers: tuple[str, ...]
    """Expressions of their addresses."""
    symbols: tuple[str, ...]
    """Variables."""
    first_check: int = 0
    """The number, from 1, of its first check among those of the batch; 0 if it has none."""


@runtime_checkable
class BatchLaunchable(Protocol):
    """A built kernel that can be launched in a batch, by one call into native code."""

    def call_text(self, launches: Sequence[Launch], bind: Callable[[Any, str], str]) -> str:
        """Return the expression of a batch, whose value is as of one launch, with checks numbered across the batch.

        ``bind`` returns a name, based on a hint, for an object that the expression refers to.
        """


class Target(Protocol):
    """A kind of device that fusec generates code for."""

    @property
    def name(self) -> str:
        """As in the option ``target``."""

    @property
    def shares_code(self) -> bool:
        """True if an offset that a launch passes costs no more than one in the code."""

    def machine(self, config: Config) -> Machine:
        """Return the profile of the machine that kernels run on."""

    def limits(self, config: Config, machine: Machine) -> Limits:
        """Return the kernels that it has schedules for, and the GEMMs that it wins on a machine."""

    def schedule(self, plan: Plan, name: str = "kernel", machine: Machine | None = None) -> Kernel:
        """Return the tile program of a planned kernel, for a machine; raises ScheduleError if there is none."""

    def print(self, kernel: Kernel) -> str:
        """Return the source of a kernel."""

    def build(self, kernels: Sequence[Kernel], config: Config) -> "list[Launchable | BuildError]":
        """Build kernels in parallel; return the error of each kernel that fails in its place.

        Raises:
            BuildError: if none can be built, for example without a compiler.
        """

    def select_kernel(
        self,
        region: Node,
        kernel: Kernel,
        built: Launchable,
        context: Context,
        report: Callable[[BuildError], None],
    ) -> tuple[Kernel, Launchable]:
        """Return the kernel that runs a region: the one that was built or, under ``autotune``, the fastest candidate.

        Args:
            region: the region.
            kernel: its tile program.
            built: the same, built.
            context: of the compile.
            report: called with the reason if a kernel cannot be compiled at its first launch, after which its
                operations run through ATen; may raise.
        """
