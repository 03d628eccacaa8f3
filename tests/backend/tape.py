"""A recorder for the CPU: takes down every launch and every call of ATen with its memory, and replays just those."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusec import codegen
from fusec.analysis.machine import Machine
from fusec.codegen import target_named
from fusec.codegen.program import function_builder, recordings
from fusec.codegen.tile.kernel import Kernel
from fusec.config import Config
from fusec.errors import BuildError
from fusec.ir.graph import Node
from fusec.loops.kinds import Limits
from fusec.loops.plan import Plan
from fusec.pipeline import Context


class Tape(TorchDispatchMode):
    """What one recording consists of."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self.launches = 0
        self.saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """What was there before, by address, as it was."""
        self.made: dict[int, Tensor] = {}
        """Memory that the recording took itself."""
        self.aside = False
        """Whether calls are the tape's own, or a launch's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.aside:
            return func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.look_at(given)
        results = func(*args, **kwargs)
        known = {x.untyped_storage().data_ptr() for x in given}
        for x in tree_leaves(results):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.made[x.untyped_storage().data_ptr()] = x

        def again() -> None:
            for old, new in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        if not func.name().startswith("aten::empty"):
            self.steps.append(again)
        return results

    def look_at(self, tensors: Sequence[Tensor]) -> None:
        """Remember what somebody else's memory held before anything was done with it."""
        self.aside = True
        for memory in (x.untyped_storage() for x in tensors):
            if memory.data_ptr() not in self.saved and memory.data_ptr() not in self.made:
                self.saved[memory.data_ptr()] = memory, memory.clone()
        self.aside = False

    def launch(self, launchable: Any, buffers: Sequence[Tensor], symbols: Sequence[int]) -> Any:
        self.look_at(buffers)

        def again() -> None:
            assert not launchable(buffers, symbols)

        self.aside = True
        try:
            fault = launchable(buffers, symbols)
        finally:
            self.aside = False
        self.launches += 1
        self.steps.append(again)
        return fault

    def undo(self) -> None:
        for memory, before in self.saved.values():
            memory.copy_(before)
        self.saved.clear()

    def spoil(self) -> None:
        """Leave rubbish in the recording's own memory, as another recording would that shares the pool."""
        for x in self.made.values():
            x.untyped_storage().fill_(0x7F)


class TapeRecorder:
    """Records on tapes; recording does nothing to memory that was there before, as on a GPU."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.tapes: list[Tape] = []
        self.recording: Tape | None = None
        self.replays = 0
        self.log: list[str] = []
        self.runs_elsewhere = False

    def busy(self) -> bool:
        return self.runs_elsewhere

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self.lock:
            yield
            for tape in self.tapes:
                tape.spoil()

    def record(self, run: Callable[[], list[Any]]) -> tuple[Callable[[], None], list[Any]]:
        tape = self.recording = Tape()
        random = torch.get_rng_state()
        try:
            with tape:
                outputs = run()
        finally:
            self.recording = None
            tape.undo()
            torch.set_rng_state(random)
        self.tapes.append(tape)
        self.log.append("record")

        def replay() -> None:
            self.replays += 1
            self.log.append("replay")
            for step in tape.steps:
                step()

        return replay, outputs

    def synchronize(self) -> None:
        self.log.append("synchronize")


class Launched:
    """A built kernel whose launches the recorder sees."""

    def __init__(self, launchable: Any, recorder: TapeRecorder) -> None:
        self.launchable, self.recorder = launchable, recorder
        self.name, self.source = launchable.name, launchable.source

    def __call__(self, buffers: Sequence[Tensor], symbols: Sequence[int]) -> Any:
        if self.recorder.recording is not None:
            return self.recorder.recording.launch(self.launchable, buffers, symbols)
        self.recorder.log.append("launch")
        return self.launchable(buffers, symbols)


class Watched:
    """A target whose kernels are launched one by one, where a recorder sees it."""

    def __init__(self, name: str, recorder: TapeRecorder) -> None:
        self.target, self.recorder = target_named(name), recorder
        self.name, self.shares_code = name, self.target.shares_code

    def machine(self, config: Config) -> Machine:
        return self.target.machine(config)

    def limits(self, config: Config, machine: Machine) -> Limits:
        return self.target.limits(config, machine)

    def schedule(self, plan: Plan, name: str = "kernel", machine: Machine | None = None) -> Kernel:
        return self.target.schedule(plan, name, machine)

    def print(self, kernel: Kernel) -> str:
        return self.target.print(kernel)

    def build(self, kernels: Sequence[Kernel], config: Config) -> list[Any]:
        return [Launched(kernel, self.recorder) for kernel in self.target.build(kernels, config)]

    def select_kernel(
        self, region: Node, kernel: Kernel, built: Any, context: Context, report: Callable[[BuildError], None]
    ) -> tuple[Kernel, Any]:
        return self.target.select_kernel(region, kernel, built, context, report)


def record_on_cpu(patch: pytest.MonkeyPatch, target: str = "cpp") -> TapeRecorder:
    """Have programs on the CPU recorded, of kernels for a target: the recorder."""
    recorder = TapeRecorder()
    patch.setitem(recordings.RECORDERS, "cpu", lambda device: recorder)
    patch.setattr(codegen, "target_for", lambda graph, config: Watched(target, recorder))
    # Torch's own allocation, which a dispatch mode sees.
    patch.setattr(function_builder, "empty_on_cpu", lambda *a: torch.empty_strided(*a[:2], dtype=a[2]))
    return recorder
