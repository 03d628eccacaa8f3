"""The Triton target: GPU kernels, which Triton's interpreter also runs on CPU tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fusec.analysis.machine import CHIPS, USUAL_CHIP, USUAL_CHIP_OF_AMD, Machine, chip, known_chip
from fusec.codegen.target import Launchable
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.kernel import Compute, Kernel, walk
from fusec.codegen.triton.arithmetic import expression
from fusec.codegen.triton.legality import limits
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.schedules import schedule
from fusec.codegen.triton.tiles import with_distinct_axes
from fusec.config import Config
from fusec.errors import BuildError, FusecError
from fusec.ir.graph import Node
from fusec.loops.kinds import Limits
from fusec.loops.plan import Plan
from fusec.pipeline import Context

if TYPE_CHECKING:
    from fusec.codegen.triton.check import RegionCheck


@dataclass(frozen=True)
class TritonTarget:
    """Blocks of a power of two; a row is one block, as long as its length is known."""

    name: str = "triton"

    def machine(self, config: Config) -> Machine:
        """The GPU that is asked for, by its datasheet; or the one that is there."""
        import torch

        if config.machine or not torch.cuda.is_available():
            return chip(config.machine, USUAL_CHIP_OF_AMD if torch.version.hip else USUAL_CHIP)
        return _described(torch.cuda.get_device_properties(), nvidia=torch.version.hip is None)

    def limits(self, config: Config, machine: Machine) -> Limits:
        """Return the kernels that it has schedules for."""
        return limits(config)

    def schedule(
        self, plan: Plan, name: str = "kernel", machine: Machine | None = None, config: KernelConfig | None = None
    ) -> Kernel:
        """Return the tile program of a planned kernel.

        Args:
            plan: of the kernel.
            name: of the kernel.
            machine: the GPU; by default the usual one.
            config: what its schedule leaves free; by default what suits that GPU.

        Raises:
            ScheduleError: where there is none.
        """
        kernel = schedule(plan, name, machine, config)
        for statement in walk(kernel.body):
            if isinstance(statement, Compute):
                expression(statement, str)  # grouping splits what has no form in Triton
        return with_distinct_axes(kernel)

    def print(self, kernel: Kernel) -> str:
        """Its text.

        Raises:
            ScheduleError: for what Triton cannot express.
        """
        return print_kernel(kernel)

    def build(self, kernels: Sequence[Kernel], config: Config) -> list[Launchable | BuildError]:
        """Print all. Triton compiles here what it can expect, and the rest at launches, for what it meets there.

        On AMD's GPUs it asks how long memory is, and under ``autotune`` other candidates are compiled beside.

        Raises:
            BuildError: where Triton is not installed.
        """
        try:
            import torch

            from fusec.codegen.triton.ahead import prepare_all
            from fusec.codegen.triton.launch import TritonKernel
        except ImportError as reason:
            raise BuildError("Triton is not installed", why=str(reason), fix="pip install triton") from reason
        built: list[Launchable | BuildError] = []
        dependent = _launches_dependents(config)
        for kernel in kernels:
            try:
                built.append(TritonKernel(kernel, dependent))
            except FusecError as reason:
                built.append(BuildError(f"kernel {kernel.name} was not built", why=reason.what))
        if torch.cuda.is_available() and torch.version.hip is None and not config.autotune:
            prepare_all([kernel for kernel in built if isinstance(kernel, TritonKernel)])
        return built

    def select_kernel(
        self,
        region: Node,
        kernel: Kernel,
        built: Launchable,
        context: Context,
        report: Callable[[BuildError], None],
    ) -> tuple[Kernel, Launchable]:
        """The kernel, or under ``autotune`` what was recorded as quickest, or what finds that out when it first runs.

        Triton compiles at a launch. Where that fails the operations run one by one.
        """
        from fusec.codegen.program.unfused import Unfused
        from fusec.codegen.triton.autotune.trials import Candidate
        from fusec.codegen.triton.autotune.tuner import Tuner
        from fusec.codegen.triton.guarded import GuardedKernel

        unfused = Unfused(kernel.name, region.body, kernel.symbols)
        if context.config.autotune and isinstance(built, Candidate):
            tuner = Tuner.here(context, self, _launches_dependents(context.config))
            kernel, built = tuner.select_kernel(region, kernel, built) if tuner else (kernel, built)
        return kernel, GuardedKernel(built, unfused, report)


_GENERATIONS = {
    (8, 9): CHIPS["rtx4090"], (9, 0): CHIPS["h100"], (10, 0): CHIPS["b200"], (12, 0): CHIPS["rtx5090"],
}  # fmt: skip
"""GPUs of NVIDIA's by the least capability of their kind."""


def _described(properties: Any, nvidia: bool) -> Machine:
    """A GPU by what its driver tells, and for the rest by its datasheet, or by that of one of its generation.

    Of many chips there are smaller editions, and parts (MIG): what one computes goes by its processors.
    """
    has = (properties.major, properties.minor)
    kinds = [least for least in _GENERATIONS if (properties.major, 0) <= least <= has]
    akin = USUAL_CHIP_OF_AMD if not nvidia else _GENERATIONS[max(kinds)] if kinds else USUAL_CHIP
    known = known_chip(properties.name)
    like = known or replace(akin, cache_gb_s=0.0)
    part = properties.multi_processor_count / like.threads
    return replace(
        like,
        name=properties.name,
        peaks={unit: rate * part for unit, rate in like.peaks.items()},
        # What lies behind the L2 of AMD's is in no driver.
        cache_bytes=like.cache_bytes if known and not nvidia else properties.L2_cache_size,
        cache_gb_s=like.cache_gb_s * part,
        threads=properties.multi_processor_count,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", 0) or like.shared_bytes,
    )


def _launches_dependents(config: Config) -> bool:
    """Whether a kernel is to start before the one ahead has ended, and the GPU can do that."""
    import torch

    nvidia = config.dependent_launch and torch.version.hip is None and torch.cuda.is_available()
    return nvidia and torch.cuda.get_device_capability() >= (9, 0)


def check_region(region: Node, name: str = "kernel") -> "RegionCheck":
    """A region's Triton kernel held against its body in the interpreter, and compiled ahead of time.

    Raises:
        ScheduleError: where Triton has no schedule for the region.
        BuildError: where Triton refuses the kernel.
    """
    from fusec.codegen.triton import check

    return check.check_region(region, name)
