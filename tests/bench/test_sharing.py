"""Sharing a machine: the busy process is there when it should be; threads are counted; the command runs to its end."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from bench import sharing
from bench.sharing import Beside, BusyProcess


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_busy_process_goes_and_stops() -> None:
    with BusyProcess() as process:
        process.go()
        had = process.seconds
        until(lambda: process.seconds > had + 0.02)
        process.stop()
        had = process.seconds
        time.sleep(0.1)
        assert process.seconds == had
    assert process.process.returncode is not None


def test_a_step_is_held_against_its_quiet_time() -> None:
    one = Beside(quiet_ms=10.0, median_ms=25.0, slow_ms=40.0, calls=9, busy=0.7)
    assert (one.ratio, one.slow) == (2.5, 4.0) and one.slow > sharing.MOST


def test_threads_at_work_are_counted() -> None:
    def alone() -> int:
        return sum(range(10000))

    assert sharing.at_work(alone, 1, 0.1) == 1
    assert sharing.at_work(alone, 1, 0.1, in_a_thread=True) == 1
    matrix = torch.randn(512, 512)
    assert sharing.at_work(lambda: matrix @ matrix, 2, 0.3) == 2
    assert sharing.at_work(lambda: matrix @ matrix, 1, 0.3) == 1


@pytest.mark.thorough
def test_sharing_runs_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "sharing.json"
    words = ["--peers", "", "--hidden", "64", "--layers", "1", "--rounds", "1", "--seconds", "0.05", "--allow-busy"]
    sharing.main([*words, "--json", str(file)])
    found = json.loads(file.read_text())
    assert list(found["beside a busy process"]) == ["fusec"] and len(found["promises"]) == 9
    assert found["promises"]["8 threads that call one model have the results of one"]
    assert found["promises"]["one thread gives the bits of two"]


@pytest.mark.parametrize("fault", [0.0, 1.0])
def test_a_thread_with_other_results_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: float) -> None:
    class Model(torch.nn.Module):
        config = type("Config", (), {"vocab_size": 100})

        def forward(self, tokens: torch.Tensor, use_cache: bool) -> object:
            elsewhere = threading.current_thread() is not threading.main_thread()
            return type("Output", (), {"logits": tokens + fault * elsewhere})

    monkeypatch.setattr(sharing, "llama", lambda *_: Model())
    options = sharing._parser().parse_args(["--seconds", "0.01"])
    assert sharing.callers("eager", torch.float32, options)["same"] == (not fault)
