"""The order of the calls that the recorder of a GPU makes, on a fake of torch.cuda; recording itself needs a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fusec.codegen.program.cuda_graphs import CudaGraphs

DEVICE = torch.device("cuda:1")


class Cuda:
    """Streams by name, and what was asked of them."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.stream: Any = self.Stream("user's")
        self.capturing = False
        self.pools: list[str] = []
        self.taken: str | None = None
        """The pool that a recording which failed has not given back, as in torch 2.11."""

    def open_pool(self) -> str:
        self.pools.append(f"pool {len(self.pools)}")
        return self.pools[-1]

    def give_back(self, device: int, pool: str) -> None:
        if (device, pool) != (DEVICE.index, self.taken):
            raise RuntimeError("no such pool is in use")
        self.taken = None

    class Stream:
        def __init__(self, name: str = "recording") -> None:
            self.name = name

        def wait_event(self, event: Any) -> None:
            event.cuda.asked.append((self.name, "waits"))

    def event(self) -> Any:
        cuda = self

        class Event:
            def __init__(self) -> None:
                self.cuda = cuda

            def record(self, stream: Any) -> None:
                cuda.asked.append((stream.name, "done"))

            def synchronize(self) -> None:
                cuda.asked.append("settled")

        return Event()

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == (self.pools[-1], "thread_local") and self.taken is None
        self.stream, self.taken = stream, pool
        yield  # like torch, it leaves its stream where something is raised
        self.stream, self.taken = self.before, None

    def use(self, stream: Any) -> None:
        self.stream = self.before = stream


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    found.use(found.stream)

    @contextmanager
    def device(device: torch.device) -> Iterator[None]:
        found.asked.append(device)
        yield

    class Graph:
        def replay(self) -> None:
            found.asked.append((found.stream.name, "replays"))

    for name, value in {
        "device": device, "Stream": Cuda.Stream, "Event": found.event, "graph_pool_handle": found.open_pool,
        "CUDAGraph": Graph, "graph": found.graph, "current_stream": lambda: found.stream, "set_stream": found.use,
        "is_current_stream_capturing": lambda: found.capturing,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.give_back, raising=False)
    return found


def test_a_recording_is_made_on_its_own_stream_and_replayed_on_the_current_one(cuda: Cuda) -> None:
    recorder = CudaGraphs(DEVICE)
    cuda.asked.clear()
    with recorder.exclusive():
        replay, outputs = recorder.record(lambda: [cuda.stream.name])
        replay()
    assert outputs == ["recording"]
    assert cuda.asked == [DEVICE, ("user's", "replays"), ("user's", "done")]


def test_another_stream_waits_for_the_last_replay(cuda: Cuda) -> None:
    recorder, names = CudaGraphs(DEVICE), ["a", "a", "b", "a"]
    streams = {name: Cuda.Stream(name) for name in names}
    cuda.asked.clear()
    for name in names:
        cuda.use(streams[name])
        with recorder.exclusive():
            pass
    asked = [what for what in cuda.asked if what != DEVICE]
    assert asked == [("a", "done"), ("a", "done"), ("b", "waits"), ("b", "done"), ("a", "waits"), ("a", "done")]


def test_after_a_failed_recording_the_stream_is_restored(cuda: Cuda) -> None:
    recorder, own = CudaGraphs(DEVICE), cuda.stream

    def fails() -> list[Any]:
        raise RuntimeError("waits for the GPU")

    with pytest.raises(RuntimeError, match="waits"), recorder.exclusive():
        recorder.record(fails)
    assert cuda.stream is own and cuda.asked[-1] == ("user's", "done")


@pytest.mark.parametrize("gives_back", [False, True], ids=["torch 2.11", "a torch that gives its pool back"])
def test_after_a_failed_recording_others_can_record(cuda: Cuda, gives_back: bool) -> None:
    recorder = CudaGraphs(DEVICE)

    def fails() -> list[Any]:
        cuda.taken = None if gives_back else cuda.taken
        raise RuntimeError("waits for the GPU")

    with pytest.raises(RuntimeError, match="waits"), recorder.exclusive():
        recorder.record(fails)
    with recorder.exclusive():
        _, outputs = recorder.record(lambda: ["recorded"])
    assert outputs == ["recorded"] and cuda.pools == ["pool 0", "pool 1"]


def test_a_recording_by_other_code_and_pending_replays(cuda: Cuda) -> None:
    recorder = CudaGraphs(DEVICE)
    assert not recorder.busy()
    cuda.capturing = True
    assert recorder.busy()
    recorder.synchronize()
    assert cuda.asked[-1] == "settled"
