"""What a target is to the rest: schedules regions, prints kernels, builds them into something that can be launched."""

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


def current(device: Any) -> AbstractContextManager[None]:
    """Within it, a GPU is the one that torch and Triton ask and build for; it changes nothing for other devices.

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
    """Its text, as printed."""

    def __call__(self, buffers: Sequence[Any], symbols: Sequence[int]) -> int | None:
        """Run it on tensors (inputs, then outputs; none for scratch) and the values of its symbols.

        Gives ``256 · value + number`` of a check that failed, and nothing otherwise.
        """


@dataclass(frozen=True)
class Launch:
    """One launch as a program spells it."""

    launchable: Any
    buffers: tuple[str, ...]
    """Texts of addresses."""
    symbols: tuple[str, ...]
    """Names."""
    first_check: int = 0
    """The number of its first check among those of all launches in a row; 0 where it has none."""


@runtime_checkable
class DirectLaunchable(Protocol):
    """A built kernel with a cheaper call than Python's, which the program spells out where it launches."""

    def call_text(self, launches: Sequence[Launch], bind: Callable[[Any, str], str]) -> str:
        """One call for launches in a row, of kernels like this; ``bind`` gives the name of an object under a hint.

        It gives what a launch does, the checks of all counted from 1.
        """


class Target(Protocol):
    """A kind of machine that fusec generates code for."""

    @property
    def name(self) -> str:
        """What options call it."""

    def machine(self, config: Config) -> Machine:
        """What its kernels run on, as far as it is known."""

    def limits(self, config: Config, machine: Machine) -> Limits:
        """Return the kernels that it has schedules for, and the GEMMs that it wins on a machine."""

    def schedule(self, plan: Plan, name: str = "kernel", machine: Machine | None = None) -> Kernel:
        """Return the tile program of a planned kernel, for a machine; raises ScheduleError where there is none."""

    def print(self, kernel: Kernel) -> str:
        """Its text."""

    def build(self, kernels: Sequence[Kernel], config: Config) -> "list[Launchable | BuildError]":
        """Build all, side by side; a kernel that fails gives its error in its place.

        Raises:
            BuildError: where nothing can be built at all, as for want of a compiler.
        """

    def select_kernel(
        self,
        region: Node,
        kernel: Kernel,
        built: Launchable,
        context: Context,
        report: Callable[[BuildError], None],
    ) -> tuple[Kernel, Launchable]:
        """What runs a region: its kernel as it was built, or under ``autotune`` whatever is quicker.

        Args:
            region: what is run.
            kernel: its tile program.
            built: that, built.
            context: of the compile.
            report: takes why a kernel could not be built at its first launch, after which its operations run through
                ATen; may raise.
        """
