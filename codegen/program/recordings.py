"""Recordings: the launches of a program, recorded once for each set of sizes and replayed from then on."""

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
MAX_RECORDINGS = 16
"""Recordings of one program: each holds the memory of all intermediate results."""
MAX_MOVES = 3
"""Consecutive calls with a static input at another address after which a remark says that nothing is replayed."""


class Recorder(Protocol):
    """Records the launches of one device."""

    def busy(self) -> bool:
        """Return whether the current stream is being recorded by other code."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Exclude other threads from recording and replaying, and order work after earlier replays."""

    def record(self, run: Callable[[], list[Any]]) -> tuple[Callable[[], None], list[Any]]:
        """Record the launches of a function without executing them.

        Returns:
            A function that replays them on the same memory, and the outputs, which lie in that memory.
        """

    def synchronize(self) -> None:
        """Wait for all replays, so that their memory can be freed."""


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": cuda_graphs}
"""By type of device."""
_State: TypeAlias = tuple[int, ...]


@dataclass
class _Recording:
    """The recording of one set of sizes; before it is made, the memory that it will use."""

    state: _State
    """State of the static inputs."""
    folded: tuple[Tensor | None, ...]
    """The folded values that its launches read."""
    buffers: dict[int, Tensor]
    """The memory to which the other inputs are copied, by position."""
    moves: int = 0
    """The number of consecutive calls in which a static input had moved before anything was replayed."""
    replay: Callable[[], None] | None = None
    outputs: list[Any] = field(default_factory=list)


class Recordings:
    """Replaces the function of a program; threads may call it concurrently.

    The first call with a set of sizes runs without a recording. The second is a warm-up on the memory that the
    recording will use: it compiles and loads all kernels. The third records; later ones replay.

    Args:
        program: the program.
        graph: its graph, after all passes.
        static: positions of the inputs that keep their address from call to call, such as weights and caches. They
            and the inputs that the graph writes to are recorded by address, and recorded again if one moves. Other
            inputs are copied to memory of the recording.
        recorder: of the device that the program runs on.
        remarks: takes what was recorded, and what was not.
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
        self.weight_cache = program.folded.cache
        self.weights = [graph.inputs.index(v) for v in program.folded.weights]
        """Positions of the inputs that the folded values depend on."""
        self.found: dict[tuple[Any, ...], _Recording | None] = {}
        """By sizes; None after the first call with them."""
        self.given_up = False
        self._reported = set[str]()

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run on the inputs of the graph; the list is cleared."""
        if self.given_up or self.recorder.busy():
            return self.run(args)
        sizes = (*[args[i] for i in self.numbers], *[(args[i].shape, args[i].stride()) for i in self.symbolic])
        if sizes in self.found:
            with self.recorder.exclusive():
                return self.run(args) if self.given_up else self._replay(sizes, args)
        if len(self.found) < MAX_RECORDINGS:
            self.found[sizes] = None
        else:
            fix = "pad inputs to few sizes, or call without CUDA graphs"
            message = f"calls with more than {MAX_RECORDINGS} sets of sizes run without a recording"
            self._remark("missed", message, suggestion=fix)
        return self.run(args)

    def _replay(self, sizes: tuple[Any, ...], args: list[Any]) -> list[Any]:
        recording, state = self.found[sizes], self._state(args)
        folded = self.weight_cache(tuple(args[i] for i in self.weights)) if self.weights else ()
        warm = recording is not None and recording.state == state and recording.folded is folded
        if recording is None or not warm:
            moves = self._count_moves(recording) if recording else 0
            with torch.inference_mode(False):
                buffers = {i: torch.empty_like(args[i]) for i in self.copied}
            recording = self.found[sizes] = _Recording(state, folded, buffers, moves)
        for i, buffer in recording.buffers.items():
            buffer.copy_(args[i])
        if not warm or recording.replay is None:
            inputs = [recording.buffers.get(i, x) for i, x in enumerate(args)]
            if not warm or not self._record(recording, inputs):
                args.clear()
                return self.run(inputs)
        args.clear()
        assert recording.replay is not None
        recording.replay()
        return [copied(x, x.stride()) if isinstance(x, Tensor) else x for x in recording.outputs]

    def _count_moves(self, recording: _Recording) -> int:
        """Return the number of consecutive calls, with this one, in which a static input had moved; report it."""
        if recording.replay is not None:
            self.recorder.synchronize()
            self._remark("analysis", "recorded again, since a static input moved or a weight changed")
            return 1
        if recording.moves + 1 == MAX_MOVES:
            reason = "a static input moves, or a weight changes, at each call"
            fix = "write to memory that keeps its address, such as a static cache, or call without CUDA graphs"
            self._remark("missed", "launches are not replayed", reason=reason, suggestion=fix)
        return recording.moves + 1

    def _state(self, args: Sequence[Any]) -> _State:
        """Return the addresses of static inputs and whether each is contiguous, which no guard of Dynamo checks."""
        static = [args[i] for i in self.static]
        return (*map(Tensor.data_ptr, static), *map(Tensor.is_contiguous, static))

    def _record(self, recording: _Recording, args: list[Any]) -> bool:
        """Record a call; return whether that succeeded."""
        try:
            recording.replay, recording.outputs = self.recorder.record(lambda: self.run(list(args)))
        except Exception as reason:
            self.given_up = True
            self.recorder.synchronize()
            self.found.clear()  # frees their memory, for lack of which it may have failed
            text = f"{type(reason).__name__}: {reason}"
            fix = "call without CUDA graphs; the failing operation synchronizes with the GPU, or reads a number from it"
            self._remark("missed", "the launches could not be recorded", reason=text, suggestion=fix)
            return False
        copied_bytes = sum(buffer.nbytes for buffer in recording.buffers.values())
        figures = {"static": len(self.static), "copied": len(self.copied), "bytes": copied_bytes}
        message = f"recorded: {len(self.static)} inputs by address, {len(self.copied)} copied at each call"
        self._remark("analysis", message, figures=figures)
        return True

    def _remark(self, kind: Any, message: str, **fields: Any) -> None:
        """Add a remark, once."""
        if message not in self._reported:
            self._reported.add(message)
            self.remarks.add(kind, PASS_NAME, message, **fields)


def recorded(
    program: Program, graph: Graph, static: frozenset[int] | None, remarks: Remarks, unrecordable: Callable[[], str]
) -> Program:
    """Return a program that records and replays its launches; the program itself, and a remark, if that is impossible.

    Args:
        program: of the graph.
        graph: after all passes.
        static: see ``Recordings``; None in training, where nothing is recorded.
        remarks: of the compile.
        unrecordable: returns the name of an operation that cannot be recorded, or "".
    """
    obstacle = "gradients may be asked for" if static is None else _obstacle(program, graph)
    if static is not None and not obstacle and (operation := unrecordable()):
        obstacle = f"torch says that {operation} cannot be recorded"
    if static is None or obstacle:
        remarks.add("missed", PASS_NAME, "launches are not recorded", reason=obstacle)
        return program
    (device,) = _devices(graph)
    recorder = RECORDERS[device.type](device)
    return replace(program, run=Recordings(program, graph, static, recorder, remarks))


def _obstacle(program: Program, graph: Graph) -> str:
    """Return why the launches of a program cannot be recorded; "" if they can."""
    devices = _devices(graph)
    if others := sorted(str(device) for device in devices if device.type not in RECORDERS):
        return f"nothing can be recorded on the device {others[0]}"
    if len(devices) != 1:
        return f"it runs on {len(devices)} devices"
    steps = [step.name for step in program.steps if step.kind == "interpreted"]
    return f"{steps[0]} has no kernel and runs one operation at a time" if steps else ""


def _devices(graph: Graph) -> set[torch.device]:
    """Return the devices of all tensors but the results of sources, which are created where they are used."""
    values = [*graph.inputs, *(r for node in graph.nodes if not node.has(Trait.SOURCE) for r in node.results)]
    return {torch.device(v.type.device) for v in values if isinstance(v.type, TensorType)}
