"""Choosing by timing: a kernel's candidates run on copies of what it first meets, and the quickest right one stays.

Only ``autotune`` does that. What was chosen is kept in the cache, for the kernel's text, its chip, this code and the
versions of all that compiles it, so that later processes neither time nor differ.
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
from fusec.codegen.program.unfused import Unfused, as_typed
from fusec.codegen.target import Launchable, Target, current
from fusec.codegen.tile.configuration import KernelConfig
from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.triton.autotune.trials import (
    Candidate,
    EventTimer,
    Timer,
    cold_bytes,
    outputs,
    progress,
    rotating,
    set_back,
)
from fusec.codegen.triton.autotune.vendor_attention import with_one_call
from fusec.codegen.triton.autotune.vendor_candidate import VendorCandidate
from fusec.codegen.triton.grids import grids
from fusec.codegen.triton.launch import TritonKernel
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
"""How often each candidate is timed, all in turn; the median counts."""


@dataclass(frozen=True)
class Tuner:
    """Chooses between the candidates of kernels on one device."""

    device: str
    """Its name, as the driver gives it."""
    machine: Machine
    cache: Cache
    remarks: Remarks
    timer: Callable[[], Timer]
    """Makes one for each kernel, so that what it occupies is given back."""
    vendor_candidate: Callable[[str, Graph], Candidate]
    """Makes the library's candidate of a kernel's name and body."""
    dependent: bool = False
    """Whether what it chooses is launched so; see ``TritonKernel``."""
    versions: tuple[str, ...] = (torch.__version__, str(torch.version.cuda), triton.__version__)

    @classmethod
    def here(cls, context: Context, target: Target, dependent: bool) -> "Tuner | None":
        """The one of the present GPU; None where there is none."""
        if not torch.cuda.is_available():
            return None
        machine = context.machine
        name = torch.cuda.get_device_name()
        cache, timer = open_cache(context.config), lambda: EventTimer(cold_bytes(machine))
        vendor_candidate = partial(VendorCandidate, target=target, context=context)
        return cls(name, machine, cache, context.remarks, timer, vendor_candidate, dependent)

    def select_kernel(self, region: Node, kernel: Kernel, built: Candidate) -> tuple[Kernel, Launchable]:
        """What runs a region: what is recorded for it, or what will choose at its first run.

        Args:
            region: the kernel region.
            kernel: its tile program by default.
            built: that, built.
        """
        if kernel.symbols:
            self.remarks.add(
                "missed", PASS_NAME, f"{kernel.name} is not timed", subject=kernel.name,
                reason=f"its sizes are not known when it is made: {', '.join(kernel.symbols)}",
            )  # fmt: skip
            return kernel, built
        recorded = self._recorded(region, kernel)
        return recorded or (kernel, TunedKernel(self, region, kernel, built))

    def _recorded(self, region: Node, kernel: Kernel) -> tuple[Kernel, Candidate] | None:
        """What was chosen before; None where nothing was, or nothing that still is a config."""
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
            self._lost(kernel, "recorded", str(reason))
            return None
        return other, TritonKernel(other, self.dependent)

    def key(self, kernel: Kernel) -> str:
        """Under which name the config for a kernel is recorded; empty where it is not to be."""
        types = ", ".join(f"{b.dtype.name} {b.role}" for b in kernel.buffers)
        return key_of_derived("config", _code(replace(kernel, name="kernel")), types, self.device, *self.versions)

    def candidates(self, region: Node, kernel: Kernel) -> dict[str, tuple[KernelConfig | None, Candidate]]:
        """What is timed against the default, by name; the vendor's library has no config."""
        found: dict[str, tuple[KernelConfig | None, Candidate]] = {}
        known = {_code(kernel)}
        for config in configs(plan_kernel(region.body, ANY), self.machine)[1:]:
            try:
                other = self._scheduled(region, kernel, config)
                if (code := _code(other)) not in known:  # what some configs say, others leave to the compiler
                    known.add(code)
                    found[str(config)] = config, TritonKernel(other, self.dependent)
            except FusecError as reason:
                self._lost(kernel, str(config), reason.reason)
        if kernel.kind in ("contraction", "attention"):
            try:
                found["the library"] = None, self._vendor_candidate(region, kernel)
            except FusecError as reason:
                what = f"{kernel.name} is not tried as the library's"
                self.remarks.add("missed", PASS_NAME, what, subject=kernel.name, reason=reason.reason)
        return found

    def tune(self, region: Node, kernel: Kernel, built: Candidate, buffers: Sequence[Tensor]) -> Candidate:
        """The quickest of all candidates that are right, on these buffers; it is recorded, unless one is already.

        Where there is no memory to try them, the default runs untried.

        Raises:
            BuildError: where none is right, with what is wrong with the default.
        """
        if recorded := self._recorded(region, kernel):
            return recorded[1]
        found = {str(kernel.config): (kernel.config, built), **self.candidates(region, kernel)}
        with progress(kernel.name, len(found) * (_ROUNDS + 1)) as step:
            try:
                right = self._right(region.body, kernel, found, buffers, step)
                seconds = self._seconds(kernel, right, buffers, step)
            except torch.OutOfMemoryError as reason:
                self.remarks.add(
                    "missed", PASS_NAME, f"{kernel.name} is not timed", subject=kernel.name,
                    reason=f"there is no memory for copies of what it reads: {reason}",
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
            reason=f"the quickest of {len(seconds)} on {self.device}",
            figures={name: round(s * 1e6, 2) for name, s in seconds.items()},
        )  # fmt: skip
        return winner

    def _vendor_candidate(self, region: Node, kernel: Kernel) -> Candidate:
        """What the vendor's libraries make of a kernel: attention is one call, other products are calls already.

        Raises:
            ScheduleError: for attention that such a call cannot say.
        """
        body = with_one_call(region.body) if kernel.kind == "attention" else region.body
        return self.vendor_candidate(kernel.name, body)

    def _scheduled(self, region: Node, kernel: Kernel, config: KernelConfig) -> Kernel:
        return schedule(plan_kernel(region.body, ANY), kernel.name, self.machine, config)

    def _right(
        self,
        body: Graph,
        kernel: Kernel,
        found: dict[str, tuple[KernelConfig | None, Candidate]],
        buffers: Sequence[Tensor],
        step: Callable[[], None],
    ) -> dict[str, Candidate]:
        """The candidates that compute what eager does, no farther from float64 than the numeric rule allows."""
        truth = evaluate(body, as_typed(buffers, body.inputs), {}, dtype=torch.float64)
        right, wrong = dict[str, Candidate](), list[str]()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            prepared = {name: pool.submit(c.prepare, buffers) for name, (_, c) in found.items()}
            expected = outputs(kernel, body, Unfused(kernel.name, body), buffers)
        for name, (_, candidate) in found.items():
            try:
                prepared[name].result()
                comparison = compare_outputs(expected, outputs(kernel, body, candidate, buffers), truth)
                why = "" if comparison.passed else f"it computes something else: {comparison}"
            except torch.OutOfMemoryError:
                raise
            except Exception as reason:
                why = f"it fails: {reason}"
            if why:
                wrong.append(why)
                self._lost(kernel, name, why)
            else:
                right[name] = candidate
            step()
        if not right:
            raise BuildError(f"no candidate of kernel {kernel.name} is right", why=wrong[0])
        return right

    def _seconds(
        self, kernel: Kernel, right: dict[str, Candidate], buffers: Sequence[Tensor], step: Callable[[], None]
    ) -> dict[str, float]:
        """The median time of each, on one copy of the buffers after the other: more bytes than a cache holds."""
        copies, timer, turn = rotating(kernel, buffers, self.machine), self.timer(), 0
        times = {name: list[float]() for name in right}
        for _ in range(_ROUNDS):
            for name, candidate in right.items():
                given, turn = copies[turn % len(copies)], turn + 1
                set_back(kernel, given, buffers)
                times[name].append(timer(partial(candidate, given, ())))
                step()
        return {name: median(found) for name, found in times.items()}

    def _lost(self, kernel: Kernel, name: str, why: str) -> None:
        self.remarks.add("failure", PASS_NAME, f"{kernel.name} does not run as {name}", subject=kernel.name, reason=why)


class TunedKernel:
    """A kernel whose config is made when it first runs, and then the one that was chosen."""

    def __init__(self, tuner: Tuner, region: Node, kernel: Kernel, built: Candidate) -> None:
        self.name, self.source = built.name, built.source
        self._tune: Callable[[Sequence[Tensor]], Candidate] | None = partial(tuner.tune, region, kernel, built)
        self._best: Any = built
        self._turn = threading.Lock()

    def __call__(self, buffers: Sequence[Tensor], symbols: Sequence[int] = ()) -> None:
        """As ``TritonKernel``. While a CUDA graph is recorded nothing can be timed."""
        if self._tune is not None and not (buffers[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            with self._turn, current(buffers[0].device):
                self._choose(buffers)
        self._best(buffers, symbols)

    def _choose(self, buffers: Sequence[Tensor]) -> None:
        if self._tune is None:
            return  # another thread was here first
        try:
            self._best = self._tune(buffers)
        except BuildError as reason:
            self._best = _Refused(self.source, reason)
        self._tune, self.source = None, self._best.source


@dataclass(frozen=True)
class _Refused:
    """A kernel without a candidate that is right."""

    source: str
    reason: BuildError

    def __call__(self, buffers: Sequence[Tensor], symbols: Sequence[int] = ()) -> None:
        raise self.reason


def _code(kernel: Kernel) -> str:
    """All that a compiler sees of a kernel but the types of its buffers."""
    lines = [line for line in print_kernel(kernel).splitlines() if not line.lstrip().startswith("#")]
    return "\n".join([*lines, *(str(options(grid)) for grid in grids(kernel))])
