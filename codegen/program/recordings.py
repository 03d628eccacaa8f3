"""What a program launches, recorded once for each set of sizes and replayed from then on."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from fusec.codegen.program.cuda_graphs import cuda_graphs
from fusec.codegen.program.program import Program
from fusec.ir.graph import Graph, storage
from fusec.ir.ops import Trait
from fusec.ir.types import ScalarType, TensorType
from fusec.reference.layout import copied
from fusec.remarks import Remarks

PASS_NAME = "cuda-graphs"
MOST = 16
"""Sets of sizes that one program is recorded for: each recording holds memory for what its launches make."""
MOVES = 3
"""Calls in a row that find an input elsewhere before it is told that nothing will ever be replayed so."""


class Recorder(Protocol):
    """What can record the launches of one device."""

    def busy(self) -> bool:
        """Whether somebody else records what is launched now."""

    def turn(self) -> AbstractContextManager[None]:
        """Within it nobody else records or replays, and what was replayed before comes first."""

    def record(self, run: Callable[[], list[Any]]) -> tuple[Callable[[], None], list[Any]]:
        """Take down what a function launches, of which nothing is done yet.

        Gives what does it, any number of times, on the same memory; and what the function gave, which lies there.
        """

    def synchronize(self) -> None:
        """Wait for all that was replayed, so that its memory can be freed."""


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": cuda_graphs}
"""By kind of device."""
_Marks: TypeAlias = tuple[int, ...]


@dataclass
class _Recording:
    """One set of sizes: first what the launches will read and write, then what replays them."""

    marks: _Marks
    """Where the inputs lie that keep their place."""
    kept: tuple[Tensor | None, ...]
    """What the program keeps from call to call, which its launches read, too."""
    buffers: dict[int, Tensor]
    """Memory of the other inputs, by position."""
    moves: int = 0
    """How often in a row one of them lay elsewhere before anything was replayed."""
    replay: Callable[[], None] | None = None
    outputs: list[Any] = field(default_factory=list)


class Recordings:
    """Runs in the place of a program; any number of threads may call it.

    The first call with some sizes runs as it is. The second runs on the memory that the recording will use, so that
    everything is compiled, loaded and set up for it. The third records, and from then on launches are replayed.

    Args:
        program: what is recorded.
        graph: the one that it runs, after all passes.
        static: which inputs lie where they lay in the call before: weights, caches. They are recorded by address, as
            is what the graph writes to, and recorded again when one moves. Other inputs are copied to where they stay.
        recorder: of the device that all of it runs on.
        remarks: where it is told what was recorded, and what was not.
    """

    def __init__(
        self, program: Program, graph: Graph, static: frozenset[int], recorder: Recorder, remarks: Remarks
    ) -> None:
        self.run, self.recorder, self.remarks = program.run, recorder, remarks
        written = {storage(v) for node in graph.nodes for v in node.written}
        types = [(i, v, v.type) for i, v in enumerate(graph.inputs)]
        tensors = [(i, v, type) for i, v, type in types if isinstance(type, TensorType)]
        self.static = [i for i, v, _ in tensors if i in static or v in written]
        self.copied = [i for i, v, _ in tensors if i not in static and v not in written]
        self.numbers = [i for i, _, type in types if isinstance(type, ScalarType)]
        self.symbolic = [i for i, _, t in tensors if not all(isinstance(n, int) for n in (*t.shape, *t.strides))]
        self.frozen = program.keeping.frozen
        self.weights = [graph.inputs.index(v) for v in program.keeping.weights]
        """Positions of what decides the values that are kept."""
        self.found: dict[tuple[Any, ...], _Recording | None] = {}
        """By sizes; None where there was one call with them."""
        self.given_up = False
        self._told = set[str]()

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run on the inputs of the graph; the list is cleared."""
        if self.given_up or self.recorder.busy():
            return self.run(args)
        sizes = (*[args[i] for i in self.numbers], *[(args[i].shape, args[i].stride()) for i in self.symbolic])
        if sizes in self.found:
            with self.recorder.turn():
                return self.run(args) if self.given_up else self._again(sizes, args)
        if len(self.found) < MOST:
            self.found[sizes] = None
        else:
            fix = "pad inputs to few sizes, or call without CUDA graphs"
            self._tell("missed", f"calls with more than {MOST} sets of sizes run without a recording", suggestion=fix)
        return self.run(args)

    def _again(self, sizes: tuple[Any, ...], args: list[Any]) -> list[Any]:
        recording, marks = self.found[sizes], self._marks(args)
        kept = self.frozen(tuple(args[i] for i in self.weights)) if self.weights else ()
        warm = recording is not None and recording.marks == marks and recording.kept is kept
        if recording is None or not warm:
            moves = self._moved(recording) if recording else 0
            with torch.inference_mode(False):
                buffers = {i: torch.empty_like(args[i]) for i in self.copied}
            recording = self.found[sizes] = _Recording(marks, kept, buffers, moves)
        for i, buffer in recording.buffers.items():
            buffer.copy_(args[i])
        if not warm or recording.replay is None:
            placed = [recording.buffers.get(i, x) for i, x in enumerate(args)]
            if not warm or not self._record(recording, placed):
                args.clear()
                return self.run(placed)
        args.clear()
        assert recording.replay is not None
        recording.replay()
        return [copied(x, x.stride()) if isinstance(x, Tensor) else x for x in recording.outputs]

    def _moved(self, recording: _Recording) -> int:
        """An input lies elsewhere than the recording expects; gives how often in a row."""
        if recording.replay is not None:
            self.recorder.synchronize()
            self._tell("analysis", "recorded again, since an input that keeps its place lies elsewhere or changed")
            return 1
        if recording.moves + 1 == MOVES:
            reason = "a weight, or what the call writes to, lies elsewhere or changed at each call"
            fix = "write to memory that stays where it is, such as a static cache, or call without CUDA graphs"
            self._tell("missed", "launches are not replayed", reason=reason, suggestion=fix)
        return recording.moves + 1

    def _marks(self, args: Sequence[Any]) -> _Marks:
        """Addresses, and what a program asks its inputs at each call, as it may change without Dynamo's knowledge."""
        static = [args[i] for i in self.static]
        return (*map(Tensor.data_ptr, static), *map(Tensor.is_contiguous, static))

    def _record(self, recording: _Recording, args: list[Any]) -> bool:
        """Whether it worked."""
        try:
            recording.replay, recording.outputs = self.recorder.record(lambda: self.run(list(args)))
        except Exception as reason:
            self.given_up = True
            self.recorder.synchronize()
            self.found.clear()  # which frees the memory of all recordings: it may be what was missing
            text = f"{type(reason).__name__}: {reason}"
            fix = "call without CUDA graphs; what is at fault waits for the GPU, or asks it for a number"
            self._tell("missed", "the launches could not be recorded", reason=text, suggestion=fix)
            return False
        moved = sum(buffer.nbytes for buffer in recording.buffers.values())
        figures = {"static": len(self.static), "copied": len(self.copied), "bytes": moved}
        what = f"recorded: {len(self.static)} inputs by address, {len(self.copied)} copied at each call"
        self._tell("analysis", what, figures=figures)
        return True

    def _tell(self, kind: Any, message: str, **fields: Any) -> None:
        """Leave a remark, once."""
        if message not in self._told:
            self._told.add(message)
            self.remarks.add(kind, PASS_NAME, message, **fields)


def recorded(
    program: Program, graph: Graph, static: frozenset[int] | None, remarks: Remarks, unrecordable: Callable[[], str]
) -> Program:
    """The program with its launches recorded and replayed; itself where that cannot be, which a remark explains.

    Args:
        program: of the graph.
        graph: after all passes.
        static: as ``Recordings`` takes it; None in training, where nothing is recorded.
        remarks: of the compile.
        unrecordable: gives the name of an operation that cannot be recorded, or nothing.
    """
    hindrance = "gradients may be asked for" if static is None else _hindrance(program, graph)
    if static is not None and not hindrance and (operation := unrecordable()):
        hindrance = f"torch says that {operation} cannot be recorded"
    if static is None or hindrance:
        remarks.add("missed", PASS_NAME, "launches are not recorded", reason=hindrance)
        return program
    (device,) = _devices(graph)
    recorder = RECORDERS[device.type](device)
    return replace(program, run=Recordings(program, graph, static, recorder, remarks))


def _hindrance(program: Program, graph: Graph) -> str:
    """Why the launches of a program cannot be recorded; empty where they can."""
    devices = _devices(graph)
    if others := sorted(str(device) for device in devices if device.type not in RECORDERS):
        return f"nothing can be recorded on the device {others[0]}"
    if len(devices) != 1:
        return f"it runs on {len(devices)} devices"
    steps = [step.name for step in program.steps if step.kind == "interpreted"]
    return f"{steps[0]} has no kernel and runs operation by operation" if steps else ""


def _devices(graph: Graph) -> set[torch.device]:
    """Those that tensors lie on; numbers and ranges are made where they are needed."""
    values = [*graph.inputs, *(r for node in graph.nodes if not node.has(Trait.SOURCE) for r in node.results)]
    return {torch.device(v.type.device) for v in values if isinstance(v.type, TensorType)}
