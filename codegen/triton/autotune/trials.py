"""Trials of candidates: copies of a kernel's buffers, a timer, and the interface of a candidate."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from fusec.analysis.machine import Machine
from fusec.codegen.program.fallback import as_typed
from fusec.codegen.tile.kernel import Kernel
from fusec.ir.graph import Graph, is_written, storage

logger = logging.getLogger(__name__)

_MOST_COPIES, _MOST_BYTES = 64, 2 << 30
"""The most copies of a kernel's buffers, and the most bytes of all copies together."""
_USUAL_CACHE = 128 << 20
"""Bytes of the last-level cache, if the profile has none."""

Timer: TypeAlias = Callable[[Callable[[], object]], float]
"""Returns the seconds that the launches of a function take with cold caches."""


class EventTimer:
    """Times with CUDA events, after a fill that empties the caches and runs until all launches are queued."""

    def __init__(self, cold_bytes: int) -> None:
        self.filled = torch.empty(max(cold_bytes, 1 << 29), dtype=torch.uint8, device="cuda")

    def __call__(self, run: Callable[[], object]) -> float:
        """Return the seconds between events before and after the launches."""
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # vendor calls take long to queue from Python
            self.filled.zero_()
        begun.record()
        run()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) * 1e-3


@runtime_checkable
class Candidate(Protocol):
    """An alternative to a kernel."""

    name: str
    source: str

    def __call__(self, buffers: Sequence[Any], symbols: Sequence[int]) -> int | None:
        """As ``Launchable``."""

    def prepare(self, buffers: Sequence[Any]) -> None:
        """Build what a call with such buffers needs; candidates can be prepared in parallel."""


def cold_bytes(machine: Machine) -> int:
    """Return the number of bytes whose access evicts everything else from the caches."""
    return 2 * (machine.cache_bytes or _USUAL_CACHE)


def outputs(kernel: Kernel, body: Graph, candidate: Candidate, buffers: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of a candidate on copies of the buffers."""
    copies = copied(kernel, buffers)
    candidate(copies, ())
    given = dict(zip(body.inputs, as_typed(copies, body.inputs), strict=True))
    own = iter(as_typed(copies[len(given) :], [v for v in body.outputs if not is_written(v)]))
    return [given[storage(v)] if is_written(v) else next(own) for v in body.outputs]


def rotating(kernel: Kernel, buffers: Sequence[Tensor], machine: Machine) -> list[list[Tensor]]:
    """Return copies of the buffers: as many as it takes that none is cached when its turn comes, within a limit."""
    bytes_ = max(1, sum(map(flat_bytes, buffers)))
    wanted = min(1 + math.ceil(cold_bytes(machine) / bytes_), _MOST_COPIES, _MOST_BYTES // bytes_)
    return [copied(kernel, buffers) for _ in range(max(1, wanted))]


def restore_counters(kernel: Kernel, copies: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    """Restore updated numbers, such as positions in a KV cache, which would run out of bounds."""
    for buffer, copy, tensor in zip(kernel.given, copies, buffers, strict=True):
        if buffer.role == "update" and tensor.numel() == 1:
            copy.copy_(tensor)


def copied(kernel: Kernel, buffers: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the buffers with their strides; outputs are filled with values that reveal a missing store."""
    copies = []
    for buffer, tensor in zip(kernel.given, buffers, strict=True):
        length = flat_bytes(tensor) // tensor.element_size()
        copy = tensor.as_strided((length,), (1,)).clone().as_strided(tensor.shape, tensor.stride())
        if buffer.role == "output":
            copy.fill_(torch.nan if copy.is_floating_point() else 1)
        copies.append(copy)
    return copies


def flat_bytes(tensor: Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last."""
    length = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return length * tensor.element_size() if tensor.numel() else 0


@contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr, if that is a terminal; yield the function that advances it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    logger.info("timing candidates of %s", name)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"autotune {name}", total=total)
        yield lambda: bar.advance(task)
