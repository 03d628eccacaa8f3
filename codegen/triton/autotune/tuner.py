"""Autotuning: the candidates of a kernel are timed at its first launch, and the fastest correct one is chosen.

Only ``autotune`` does that. The choice is cached, keyed by the kernel's source, the device, fusec's code and the
versions of the compilers, so that later processes make the same choice without timing.
"""

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import triton
from torch import Tensor

from fusec.analysis.machine import Machine
from fusec.artifacts import export
from fusec.cache import Cache, open_cache
from fusec.codegen.program.fallback import UnfusedKernel, as_typed
from fusec.codegen.target import Launchable, Target, device_guard
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.triton.autotune.trials import (
    Candidate,
    EventTimer,
    Timer,
    cold_bytes,
    outputs,
    progress,
    restore_counters,
    rotating,
)
from fusec.codegen.triton.autotune.vendor_attention import with_one_call
from fusec.codegen.triton.autotune.vendor_candidate import VendorCandidate
from fusec.codegen.triton.grids import grids
from fusec.codegen.triton.kernel import TritonKernel
from fusec.codegen.triton.legality import ANY
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.schedules import configs, schedule
from fusec.codegen.triton.signature import options
from fusec.errors import BuildError, FusecError
from fusec.ir.graph import Graph, Node
from fusec.loops.plan import plan_kernel
from fusec.pipeline import Context
from fusec.provenance import key_of_derived
from fusec.reference.contract import compare_outputs
from fusec.reference.interpreter import evaluate
from fusec.remarks import Remarks

PASS_NAME = "autotune"
_SUFFIX = ".config"
_ROUNDS = 7
"""Number of timings of each candidate, in rotation; the median counts."""


@dataclass(frozen=True)
class Tuner:
    """Chooses between the candidates of kernels on one device."""

    device: str
    """As named by the driver."""
    machine: Machine
    cache: Cache
    remarks: Remarks
    timer: Callable[[], Timer]
    """Creates a timer for each kernel, which is freed afterwards."""
    vendor_candidate: Callable[[str, Graph], Candidate]
    """Creates the candidate of the vendor's library from a kernel's name and body."""
    dependent: bool = False
    """See ``TritonKernel``."""
    versions: tuple[str, ...] = (torch.__version__, str(torch.version.cuda), triton.__version__)

    @classmethod
    def of_current_device(cls, context: Context, target: Target, dependent: bool) -> "Tuner | None":
        """Return the tuner of the current GPU; None without a GPU."""
        if not torch.cuda.is_available():
            return None
        machine = context.machine
        name = torch.cuda.get_device_name()
        cache, timer = open_cache(context.config), lambda: EventTimer(cold_bytes(machine))
        vendor_candidate = partial(VendorCandidate, target=target, context=context)
        return cls(name, machine, cache, context.remarks, timer, vendor_candidate, dependent)

    def select_kernel(self, region: Node, kernel: Kernel, built: Candidate) -> tuple[Kernel, Launchable]:
        """Return the recorded choice for a region, or a kernel that tunes itself at its first launch.

        Args:
            region: the kernel region.
            kernel: its tile program with the default configuration.
            built: the same, built.
        """
        if kernel.symbols:
            self.remarks.add(
                "missed", PASS_NAME, f"{kernel.name} is not timed", subject=kernel.name,
                reason=f"it has dynamic sizes: {', '.join(kernel.symbols)}",
            )  # fmt: skip
            return kernel, built
        recorded = self._recorded(region, kernel)
        return recorded or (kernel, TunedKernel(self, region, kernel, built))

    def _recorded(self, region: Node, kernel: Kernel) -> tuple[Kernel, Candidate] | None:
        """Return the recorded choice; None if there is none, or none that is still valid."""
        key = self.key(kernel)
        record = self.cache.read(key, _SUFFIX) if key else None
        if record is None:
            return None
        export(self.cache, key, _SUFFIX)
        try:
            chosen = json.loads(record)["chosen"]
            if chosen is None:
                return kernel, self._vendor_candidate(region, kernel)
            other = self._scheduled(region, kernel, KernelConfig(**chosen))
        except (FusecError, KeyError, TypeError, ValueError) as reason:
            self._report_failure(kernel, "recorded", str(reason))
            return None
        return other, TritonKernel(other, self.dependent)

    def key(self, kernel: Kernel) -> str:
        """Return the key under which the choice for a kernel is recorded; "" if it must not be recorded."""
        types = ", ".join(f"{b.dtype.name} {b.role}" for b in kernel.buffers)
        return key_of_derived("config", _code(replace(kernel, name="kernel")), types, self.device, *self.versions)

    def candidates(self, region: Node, kernel: Kernel) -> dict[str, tuple[KernelConfig | None, Candidate]]:
        """Return the candidates besides the default, by name; the vendor's library has no configuration."""
        found: dict[str, tuple[KernelConfig | None, Candidate]] = {}
        known = {_code(kernel)}
        for config in configs(plan_kernel(region.body, ANY), self.machine)[1:]:
            try:
                other = self._scheduled(region, kernel, config)
                if (code := _code(other)) not in known:  # configurations may compile to the same code
                    known.add(code)
                    found[str(config)] = config, TritonKernel(other, self.dependent)
            except FusecError as reason:
                self._report_failure(kernel, str(config), reason.reason)
        if kernel.kind in ("contraction", "attention"):
            try:
                found["the library"] = None, self._vendor_candidate(region, kernel)
            except FusecError as reason:
                message = f"the vendor's library is no candidate for {kernel.name}"
                self.remarks.add("missed", PASS_NAME, message, subject=kernel.name, reason=reason.reason)
        return found

    def tune(self, region: Node, kernel: Kernel, built: Candidate, buffers: Sequence[Tensor]) -> Candidate:
        """Return the fastest correct candidate on these buffers, and record it; or the choice that is recorded already.

        If there is not enough memory for the trials, this returns the default.

        Raises:
            BuildError: if no candidate is correct, with what is wrong with the default.
        """
        if recorded := self._recorded(region, kernel):
            return recorded[1]
        found = {str(kernel.config): (kernel.config, built), **self.candidates(region, kernel)}
        with progress(kernel.name, len(found) * (_ROUNDS + 1)) as step:
            try:
                correct = self._correct(region.body, kernel, found, buffers, step)
                seconds = self._seconds(kernel, correct, buffers, step)
            except torch.OutOfMemoryError as reason:
                self.remarks.add(
                    "missed", PASS_NAME, f"{kernel.name} is not timed", subject=kernel.name,
                    reason=f"there is not enough memory for copies of its buffers: {reason}",
                )  # fmt: skip
                return built
        best = min(seconds, key=seconds.__getitem__)
        chosen, winner = found[best]
        record = {"chosen": None if chosen is None else asdict(chosen), "seconds": seconds, "kernel": kernel.name}
        if key := self.key(kernel):
            self.cache.offer(key, _SUFFIX, json.dumps(record).encode(), f"the config for {kernel.name}")
            export(self.cache, key, _SUFFIX)
        self.remarks.add(
            "analysis", PASS_NAME, f"{kernel.name} runs as {best}", subject=kernel.name,
            reason=f"the fastest of {len(seconds)} on {self.device}",
            figures={name: round(s * 1e6, 2) for name, s in seconds.items()},
        )  # fmt: skip
        return winner

    def _vendor_candidate(self, region: Node, kernel: Kernel) -> Candidate:
        """Return the kernel with attention and matmuls as vendor calls.

        Raises:
            ScheduleError: for attention that the vendor's does not support.
        """
        body = with_one_call(region.body) if kernel.kind == "attention" else region.body
        return self.vendor_candidate(kernel.name, body)

    def _scheduled(self, region: Node, kernel: Kernel, config: KernelConfig) -> Kernel:
        return schedule(plan_kernel(region.body, ANY), kernel.name, self.machine, config)

    def _correct(
        self,
        body: Graph,
        kernel: Kernel,
        found: dict[str, tuple[KernelConfig | None, Candidate]],
        buffers: Sequence[Tensor],
        step: Callable[[], None],
    ) -> dict[str, Candidate]:
        """Return the candidates whose results satisfy the numeric rule, given those of eager and float64."""
        reference = evaluate(body, as_typed(buffers, body.inputs), {}, dtype=torch.float64)
        correct, wrong = dict[str, Candidate](), list[str]()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            prepared = {name: pool.submit(c.prepare, buffers) for name, (_, c) in found.items()}
            expected = outputs(kernel, body, UnfusedKernel(kernel.name, body), buffers)
        for name, (_, candidate) in found.items():
            try:
                prepared[name].result()
                comparison = compare_outputs(expected, outputs(kernel, body, candidate, buffers), reference)
                why = "" if comparison.passed else f"its results are wrong: {comparison}"
            except torch.OutOfMemoryError:
                raise
            except Exception as reason:
                why = f"it fails: {reason}"
            if why:
                wrong.append(why)
                self._report_failure(kernel, name, why)
            else:
                correct[name] = candidate
            step()
        if not correct:
            raise BuildError(f"no candidate of kernel {kernel.name} is correct", why=wrong[0])
        return correct

    def _seconds(
        self, kernel: Kernel, correct: dict[str, Candidate], buffers: Sequence[Tensor], step: Callable[[], None]
    ) -> dict[str, float]:
        """Return the median time of each candidate, on rotating copies of the buffers, which exceed the caches."""
        copies, timer, turn = rotating(kernel, buffers, self.machine), self.timer(), 0
        times = {name: list[float]() for name in correct}
        for _ in range(_ROUNDS):
            for name, candidate in correct.items():
                given, turn = copies[turn % len(copies)], turn + 1
                restore_counters(kernel, given, buffers)
                times[name].append(timer(partial(candidate, given, ())))
                step()
        return {name: median(found) for name, found in times.items()}

    def _report_failure(self, kernel: Kernel, name: str, why: str) -> None:
        self.remarks.add("failure", PASS_NAME, f"{kernel.name} does not run as {name}", subject=kernel.name, reason=why)


class TunedKernel:
    """A kernel that is tuned at its first launch, and then runs as the chosen candidate."""

    def __init__(self, tuner: Tuner, region: Node, kernel: Kernel, built: Candidate) -> None:
        self.name, self.source = built.name, built.source
        self._tune: Callable[[Sequence[Tensor]], Candidate] | None = partial(tuner.tune, region, kernel, built)
        self._best: Any = built
        self._lock = threading.Lock()

    def __call__(self, buffers: Sequence[Tensor], symbols: Sequence[int] = ()) -> None:
        """As ``TritonKernel``; while a CUDA graph is recorded nothing can be timed, and the default runs."""
        if self._tune is not None and not (buffers[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            with self._lock, device_guard(buffers[0].device):
                self._choose(buffers)
        self._best(buffers, symbols)

    def _choose(self, buffers: Sequence[Tensor]) -> None:
        if self._tune is None:
            return  # tuned by another thread while this one waited for the lock
        try:
            self._best = self._tune(buffers)
        except BuildError as reason:
            self._best = _NoCandidate(self.source, reason)
        self._tune, self.source = None, self._best.source


@dataclass(frozen=True)
class _NoCandidate:
    """A kernel without a correct candidate."""

    source: str
    reason: BuildError

    def __call__(self, buffers: Sequence[Tensor], symbols: Sequence[int] = ()) -> None:
        raise self.reason


def _code(kernel: Kernel) -> str:
    """Return all that determines the machine code of a kernel, except the types of its buffers."""
    lines = [line for line in print_kernel(kernel).splitlines() if not line.lstrip().startswith("#")]
    return "\n".join([*lines, *(str(options(grid)) for grid in grids(kernel))])
