"""The Triton target: GPU kernels, which Triton's interpreter also runs on CPU tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True)
class TritonTarget:
    """Generates Triton, with blocks whose sizes are powers of two; a row of static length is one block."""

    name: str = "triton"
    shares_code = False
    """Triton loads whole vectors where it knows that an offset is divisible by their length."""

    def machine(self, config: Config) -> Machine:
        """Return the profile of the GPU that options name, by its datasheet, or of the one that is present."""
        import torch

        if config.machine or not torch.cuda.is_available():
            return chip(config.machine, USUAL_CHIP_OF_AMD if torch.version.hip else USUAL_CHIP)
        return _profile(torch.cuda.get_device_properties(), nvidia=torch.version.hip is None)

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
            config: block sizes, warps and stages; by default chosen by heuristics for that GPU.

        Raises:
            ScheduleError: if there is none.
        """
        kernel = schedule(plan, name, machine, config)
        for statement in walk(kernel.body):
            if isinstance(statement, Compute):
                expression(statement, str)  # grouping splits what has no form in Triton
        return with_distinct_axes(kernel)

    def print(self, kernel: Kernel) -> str:
        """Return the source of a kernel.

        Raises:
            ScheduleError: for what Triton cannot express.
        """
        return print_kernel(kernel)

    def build(self, kernels: Sequence[Kernel], config: Config) -> list[Launchable | BuildError]:
        """Print kernels, and compile those with static sizes in parallel; Triton compiles the others at their launch.

        Edited sources are used in place of those that were printed.

        On GPUs of AMD all are compiled at their launch, since Triton specializes on the length of buffers there; under
        ``autotune`` they are compiled together with the other candidates.

        Raises:
            BuildError: if Triton is not installed.
        """
        try:
            import torch

            from fusec.codegen.triton.kernel import TritonKernel, prepare_all
        except ImportError as reason:
            raise BuildError("Triton is not installed", why=str(reason), fix="pip install triton") from reason
        built: list[Launchable | BuildError] = []
        dependent = _has_dependent_launch(config)
        for kernel in kernels:
            try:
                built.append(TritonKernel(kernel, dependent, config))
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
        """Return the kernel with a fallback; under ``autotune`` the recorded choice, or a kernel that tunes itself.

        If Triton cannot compile the kernel at its first launch, its operations run through ATen.
        """
        from fusec.codegen.program.fallback import KernelWithFallback, UnfusedKernel
        from fusec.codegen.triton.autotune.trials import Candidate
        from fusec.codegen.triton.autotune.tuner import Tuner

        unfused = UnfusedKernel(kernel.name, region.body, kernel.symbols)
        is_edited = bool(getattr(built, "edited", ""))
        if context.config.autotune and isinstance(built, Candidate) and not is_edited:
            tuner = Tuner.of_current_device(context, self, _has_dependent_launch(context.config))
            kernel, built = tuner.select_kernel(region, kernel, built) if tuner else (kernel, built)
        return kernel, KernelWithFallback(built, unfused, report)


_GENERATIONS = {
    (8, 9): CHIPS["rtx4090"], (9, 0): CHIPS["h100"], (10, 0): CHIPS["b200"], (12, 0): CHIPS["rtx5090"],
}  # fmt: skip
"""GPUs of NVIDIA by the lowest compute capability of their generation."""


def _profile(properties: Any, nvidia: bool) -> Machine:
    """Return the profile of a GPU: what its driver reports, and the rest from its datasheet or one of its generation.

    Of many chips there are smaller versions and partitions (MIG), so peak rates scale with the number of processors.
    """
    has = (properties.major, properties.minor)
    lower = [least for least in _GENERATIONS if (properties.major, 0) <= least <= has]
    similar = USUAL_CHIP_OF_AMD if not nvidia else _GENERATIONS[max(lower)] if lower else USUAL_CHIP
    known = known_chip(properties.name)
    like = known or replace(similar, cache_gb_s=0.0)
    part = properties.multi_processor_count / like.threads
    return replace(
        like,
        name=properties.name,
        peaks={unit: rate * part for unit, rate in like.peaks.items()},
        # Drivers of AMD do not report the last-level cache.
        cache_bytes=like.cache_bytes if known and not nvidia else properties.L2_cache_size,
        cache_gb_s=like.cache_gb_s * part,
        threads=properties.multi_processor_count,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", 0) or like.shared_bytes,
    )


def _has_dependent_launch(config: Config) -> bool:
    """Return whether kernels use programmatic dependent launch, which takes a GPU that supports it."""
    import torch

    nvidia = config.dependent_launch and torch.version.hip is None and torch.cuda.is_available()
    return nvidia and torch.cuda.get_device_capability() >= (9, 0)
