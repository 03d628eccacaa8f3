"""CUDA graphs as torch has them: one stream to record on and one pool of memory for each device."""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class CudaGraphs:
    """The recorder of one GPU.

    All recordings take their memory from one pool: nothing that one leaves there is read by another, as inputs are
    copied in ahead of a replay and outputs are copied out behind it, and replays never overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._turn = threading.RLock()
        self._last: torch.cuda.Stream | None = None
        with torch.cuda.device(device):
            self._stream, self._done = torch.cuda.Stream(), torch.cuda.Event()
            self._open_pool()

    def busy(self) -> bool:
        """Whether the current stream is being recorded by somebody else."""
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One thread at a time; a stream waits for what was replayed on another one."""
        with self._turn, torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            if self._last is not None and self._last != stream:
                stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)
                self._last = stream

    def record(self, run: Callable[[], list[Any]]) -> tuple[Callable[[], None], list[Any]]:
        """What replays the launches of a function on the current stream, and what the function gave."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with self._recording(graph):
                outputs = run()
        except BaseException:
            self._recover()
            raise
        finally:
            torch.cuda.set_stream(stream)  # torch leaves another one where a recording fails
        return graph.replay, outputs

    def synchronize(self) -> None:
        """Wait for the last replay."""
        self._done.synchronize()

    def _open_pool(self) -> None:
        """A pool goes when its last graph does, and its handle with it: an empty one keeps it."""
        self._pool, self._keeps_pool = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is empty
            with self._recording(self._keeps_pool):
                pass

    def _recover(self) -> None:
        """Let others record: where a recording fails, torch 2.11 still takes the pool and the generator for in use.

        The pool is given back by hand and another one opened; recording that ends what the generator has begun.
        """
        with suppress(RuntimeError):  # a torch that has done so itself
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        with suppress(RuntimeError):  # what failed is told, and whoever records next is told this
            self._open_pool()

    def _recording(self, graph: "torch.cuda.CUDAGraph") -> Any:
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")


@functools.cache
def cuda_graphs(device: torch.device) -> CudaGraphs:
    """The recorder of a GPU, the same for all programs."""
    return CudaGraphs(device)
