"""What a benchmark asks of the device that it measures: to wait, to time, to tell its facts. A GPU, or the CPU."""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench.harness import wall_clock
from fusec.analysis.machine import cpu_name


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA or AMD GPU."""

    @property
    def device(self) -> torch.device:
        """Where tensors lie."""
        return torch.device("cuda", 0)

    @property
    def cache_bytes(self) -> int:
        """Of the last cache: what is read again sooner than that comes from there."""
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def clock(self, run: Callable[[], object], repeats: int) -> float:
        """Seconds of a call on the stream, from an idle device until its last kernel has ended."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    def wait(self) -> None:
        """Until all work is done."""
        torch.cuda.synchronize()

    def lives(self) -> bool:
        """Whether it still runs anything: an access to memory that is not there ends all work of this process."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def clear(self) -> None:
        """Give memory back that nothing holds."""
        gc.collect()
        if self.lives():
            torch.cuda.empty_cache()

    def poison(self) -> None:
        """Leave NaN in memory that tensors get next, as far as torch has it from earlier ones."""
        sizes = [1 << 16] * 256 + [1 << 28] * 4  # torch keeps small and large pieces apart
        pieces = [torch.full((n,), torch.nan, device=self.device) for n in sizes]
        del pieces

    def peak_bytes(self) -> int:
        """Memory that tensors took at most since the last question."""
        found = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return found

    def facts(self) -> dict[str, Any]:
        """What figures depend on."""
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "chip": properties.name, "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory, "cache": self.cache_bytes,
            "multiprocessors": properties.multi_processor_count, "cuda": torch.version.cuda or torch.version.hip,
        }  # fmt: skip

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Nothing has to be said: fusec compiles for the device of the inputs."""
        yield


@dataclass(frozen=True)
class Toy:
    """The processor in a GPU's stead: Triton kernels run in Triton's interpreter, and no time means anything."""

    @property
    def device(self) -> torch.device:
        """Where tensors lie."""
        return torch.device("cpu")

    def clock(self, run: Callable[[], object], repeats: int) -> float:
        """Seconds of a call."""
        return wall_clock(run, repeats)

    def wait(self) -> None:
        """Work is done when a call returns."""

    def lives(self) -> bool:
        """It does."""
        return True

    def clear(self) -> None:
        """What a toy takes is little, and to look for it takes longer than many a stage."""

    def poison(self) -> None:
        """The processor's memory is the system's."""

    def peak_bytes(self) -> int:
        """Not known."""
        return 0

    def facts(self) -> dict[str, Any]:
        """What figures depend on."""
        return {"chip": f"none: {cpu_name()}, Triton's interpreter"}

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Have fusec make Triton kernels."""
        before = os.environ.get("FUSEC_TARGET")
        os.environ["FUSEC_TARGET"] = "triton"
        try:
            yield
        finally:
            if before is None:
                del os.environ["FUSEC_TARGET"]
            else:
                os.environ["FUSEC_TARGET"] = before


Device = Gpu | Toy


PATIENCE_S = 10
"""Seconds that what has begun may take beyond a command's."""


class TooLate(BaseException):
    """Time ran out. Nothing that is interrupted takes it for a failure of its own."""


class Budget:
    """Seconds that a command may take."""

    def __init__(self, seconds: float) -> None:
        self.start = time.monotonic()
        self.end = self.start + seconds

    @property
    def left(self) -> float:
        """How many are left."""
        return self.end - time.monotonic()

    @property
    def spent(self) -> float:
        """How many have passed."""
        return time.monotonic() - self.start

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """Within, there are no more seconds than until so much of all has passed."""
        end = self.end
        self.end = self.start + share * (end - self.start)
        try:
            yield
        finally:
            self.end = end

    @contextmanager
    def kept(self) -> Iterator[None]:
        """End what takes longer; a call of a driver or of a compiler is waited for.

        Raises:
            TooLate: then.
        """

        def end(*_: object) -> None:
            raise TooLate

        before = signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, max(self.left, 0) + PATIENCE_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
