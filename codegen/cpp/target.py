"""The C++ target: the features of this machine, and from a region to a loaded kernel."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusec.analysis.machine import ASSUMED, Machine, chip, cpu_machine, cpu_name
from fusec.codegen.cpp.build import CppKernel, build
from fusec.codegen.cpp.compiler import Compiler, find_compiler
from fusec.codegen.cpp.printer import print_kernel
from fusec.codegen.program.edits import edited_source, refused_edit
from fusec.codegen.target import Launchable, PrintedKernel
from fusec.codegen.tile.kernel import Kernel
from fusec.config import Config
from fusec.errors import BuildError
from fusec.ir.graph import Node
from fusec.loops.kinds import Limits
from fusec.loops.plan import Plan
from fusec.pipeline import Context

_USUAL_LANES = 16
_INTEL_SHARE = 0.85
"""Share of the vendor's speed in float32 on processors of Intel with AVX-512; measured: 0.87, on an Emerald Rapids."""


def _compiler() -> Compiler | None:
    """Return the compiler; None if there is none."""
    try:
        return find_compiler()
    except BuildError:
        return None


@dataclass(frozen=True)
class CppTarget:
    """Generates C++ for the CPU of this machine."""

    builds: bool = True
    """False for tools that show kernels: only edited ones are compiled, which may fail."""

    name = "cpp"
    shares_code = True

    @property
    def lanes(self) -> int:
        """The number of floats in a vector register."""
        compiler = _compiler()
        return compiler.lanes if compiler else _USUAL_LANES

    @property
    def bf16_products(self) -> bool:
        """True if the machine multiplies pairs of bfloat16 (AVX512_BF16), and the compiler supports that."""
        compiler = _compiler()
        return compiler is not None and compiler.has_bf16_products

    @property
    def many_bf16_products(self) -> bool:
        """True if it does so for many rows: in pairs, or in tiles of AMX."""
        return self.bf16_products or self.has_amx

    @property
    def has_amx(self) -> bool:
        """True if the machine multiplies tiles of bfloat16 and bytes with Intel AMX."""
        compiler = _compiler()
        return compiler is not None and compiler.has_amx

    def machine(self, config: Config) -> Machine:
        """Return the profile of this machine, with torch's number of threads, or of the one that options name.

        Without a measured profile, large-M GEMMs are left to the vendor's library except where generated ones were
        found to be faster: in float32 with AVX-512, though on Intel only for some numbers of rows; in half types if
        the library has no better instructions.
        """
        import torch

        if config.machine:
            return chip(config.machine)
        machine = cpu_machine(config, torch.get_num_threads())
        if machine.source != ASSUMED:
            return machine
        compiler = _compiler()
        narrow = ("bf16", "f16", "i8")
        slow = {f"product {dtype}": compiler is not None and compiler.vendor_is_faster(dtype) for dtype in narrow}
        slow["product f32"] = self.lanes < _USUAL_LANES
        peaks = {unit: rate for unit, rate in machine.peaks.items() if not slow.get(unit)}
        if "product f32" in peaks and "intel" in cpu_name().lower():
            peaks["product f32"] *= _INTEL_SHARE
        return replace(machine, peaks=peaks)

    @property
    def cores(self) -> int:
        """The cores of the machine: results must not depend on the number of threads."""
        return os.cpu_count() or 1

    def limits(self, config: Config, machine: Machine) -> Limits:
        """Return the kernels that it has schedules for, and the GEMMs that it wins on a machine."""
        from fusec.codegen.cpp.legality import limits

        return limits(config, machine, self.lanes)

    def schedule(self, plan: Plan, name: str = "kernel", machine: Machine | None = None) -> Kernel:
        """Return the tile program of a planned kernel; raises ScheduleError if there is none."""
        from fusec.codegen.cpp.schedules import schedule
        from fusec.codegen.tile.rows import Tiling

        tiling = Tiling(
            self.lanes,
            bf16_products=self.bf16_products,
            many_bf16_products=self.many_bf16_products,
            cache_bytes=(2 if self.has_amx else 1) << 20,  # the least of such processors
            tile_rows=48 if self.has_amx else 6,  # whole tiles of 6 rows and of AMX's 16
            cores=self.cores,
        )
        return schedule(plan, name, tiling)

    def print(self, kernel: Kernel) -> str:
        """Return the translation unit of a kernel."""
        return print_kernel(kernel)

    def build(self, kernels: Sequence[Kernel], config: Config) -> list[Launchable | BuildError]:
        """Compile and load kernels, or load them from the cache; edited ones in place of those generated.

        Raises:
            BuildError: if there is no compiler, whether kernels are to be compiled or not.
        """
        texts: list[tuple[str, str] | BuildError] = []
        edits: dict[str, str] = {}
        for kernel in kernels:
            try:
                source, edits[kernel.name] = edited_source(kernel.name, print_kernel(kernel), config)
                texts.append((kernel.name, source))
            except BuildError as error:
                texts.append(error)
        find_compiler()
        wanted = [text for text in texts if not isinstance(text, BuildError) and (self.builds or edits[text[0]])]
        built = dict(zip(wanted, build(wanted, config) if wanted else (), strict=True))
        results: list[Launchable | BuildError] = []
        for text in texts:
            one = text if isinstance(text, BuildError) else built.get(text) or PrintedKernel(*text)
            if isinstance(one, CppKernel):
                one.edited = edits[one.name]
            elif not isinstance(text, BuildError) and edits[text[0]] and isinstance(one, BuildError):
                one = refused_edit(text[0], edits[text[0]], one)
            results.append(one)
        return results

    def select_kernel(
        self,
        region: Node,
        kernel: Kernel,
        built: Launchable,
        context: Context,
        report: Callable[[BuildError], None],
    ) -> tuple[Kernel, Launchable]:
        """Return the kernel that was built: on a CPU nothing is tuned, nor compiled at a launch."""
        return kernel, built
