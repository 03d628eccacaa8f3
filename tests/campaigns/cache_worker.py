"""Processes that compile a small function with a given cache, and say what came of it."""

import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

import fusec.dynamo
from fusec.codegen.cpp import build

SECONDS = 300.0
"""After which a process counts as hung; less than it may wait for a lock and a compiler."""


@dataclass(frozen=True)
class Report:
    """What a process found."""

    right: bool
    kernels: bool
    """Generated kernels ran; else ATen did."""
    reasons: tuple[str, ...]
    """Warnings, and why ATen ran."""


def function(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function whose result says which one it is: a kernel of another is noticed."""
    return lambda x: torch.sin(x) * (number + 0.5) + number


def warm_up(folder: Path) -> None:
    """Import all that compiling needs, so that forked processes begin with it."""
    torch.set_num_threads(1)  # a forked process cannot use the threads of its parent
    (folder / "tmp").mkdir()
    os.environ |= {"TMPDIR": str(folder / "tmp"), "FUSEC_CACHE_DIR": str(folder / "first")}
    tempfile.tempdir = None  # it is looked up anew
    torch.compile(torch.cos, backend="fusec")(torch.ones(3))
    fusec.dynamo.reset()


class Worker:
    """A forked process that compiles the function of a number."""

    def __init__(self, number: int, folder: Path, before: Callable[[], None] = lambda: None) -> None:
        context: Any = multiprocessing.get_context("fork")
        self.answer, told = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(number, folder, before, told), daemon=True)
        self.process.start()
        told.close()

    def kill(self, delay: float) -> None:
        """Kill it after a while, unless it is done by then."""
        self.answer.poll(delay)
        self.process.kill()

    def report(self) -> Report | str:
        """Wait for its end, and return what it says, or else what became of it."""
        try:
            if not self.answer.poll(SECONDS):
                return f"it hangs: no answer after {SECONDS:.0f} s"
            found: Report = self.answer.recv()
            return found
        except EOFError:
            self.process.join()
            return f"it died with code {self.process.exitcode}"
        finally:
            self.process.kill()
            self.process.join()
            self.answer.close()


def _work(number: int, folder: Path, before: Callable[[], None], told: Connection) -> None:
    os.environ["FUSEC_CACHE_DIR"] = str(folder)
    build.forget_loaded()
    before()
    x = torch.linspace(-3, 3, 50)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        result = torch.compile(function(number), backend="fusec")(x)
    graphs = fusec.dynamo.compiled_graphs()
    reasons = [str(remark) for graph in graphs for remark in graph.remarks.of("failure")]
    reasons += [str(warning.message) for warning in heard] + fusec.dynamo.fallbacks()
    kernels = bool(graphs) and all(step.kind == "kernel" for graph in graphs for step in graph.program.steps)
    right = torch.allclose(result, function(number)(x), rtol=1e-6, atol=1e-6)
    told.send(Report(right, kernels, tuple(reasons)))
