"""Recording with CUDA graphs: one stream and one memory pool for each device."""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class CudaGraphs:
    """The recorder of one GPU.

    All recordings share one memory pool: no data stays in it between replays, as inputs are copied before a replay and
    outputs after it, and replays never overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.RLock()
        self._last: torch.cuda.Stream | None = None
        with torch.cuda.device(device):
            self._stream, self._done = torch.cuda.Stream(), torch.cuda.Event()
            self._open_pool()

    def busy(self) -> bool:
        """Return whether the current stream is being recorded by other code."""
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude other threads, and let the current stream wait for replays on other streams."""
        with self._lock, torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            if self._last is not None and self._last != stream:
                stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)
                self._last = stream

    def record(self, run: Callable[[], list[Any]]) -> tuple[Callable[[], None], list[Any]]:
        """Record the launches of a function; return what replays them on the current stream, and the outputs."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with self._recording(graph):
                outputs = run()
        except BaseException:
            self._recover()
            raise
        finally:
            torch.cuda.set_stream(stream)  # torch leaves another one current if a recording fails
        return graph.replay, outputs

    def synchronize(self) -> None:
        """Wait for the last replay."""
        self._done.synchronize()

    def _open_pool(self) -> None:
        """Create the memory pool; torch frees it with its last graph, so an empty graph keeps it alive."""
        self._pool, self._empty_graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the empty graph
            with self._recording(self._empty_graph):
                pass

    def _recover(self) -> None:
        """Restore the state of torch, whose pool and random generator are still in use after a recording that failed.

        This releases the pool and creates another one; to record the empty graph resets the generator. Observed in
        torch 2.11.
        """
        with suppress(RuntimeError):  # versions of torch that release it themselves
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        with suppress(RuntimeError):  # the first error is raised; if this one persists, the next recording raises it
            self._open_pool()

    def _recording(self, graph: "torch.cuda.CUDAGraph") -> Any:
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")


@functools.cache
def cuda_graphs(device: torch.device) -> CudaGraphs:
    """Return the recorder of a GPU, which all programs share."""
    return CudaGraphs(device)
