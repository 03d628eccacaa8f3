"""Launch batches: consecutive launches as one call into native code, with the memory between them planned ahead."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sympy

from fusec.codegen.program.function_builder import FunctionBuilder
from fusec.codegen.program.memory_planning import LiveRange, plan, split_size
from fusec.codegen.program.runtime import acquire_block, raise_out_of_range, release_block
from fusec.codegen.target import BatchLaunchable, Launch, Launchable
from fusec.codegen.tile.kernel import MAX_CHECKS
from fusec.codegen.tile.sizes import PYTHON
from fusec.ir.graph import Value
from fusec.ir.types import TensorType, simplify

MAX_LAUNCHES = 32
"""Launches of one batch: dead tensors are freed at its end, which should not be the end of a backward pass."""
_CACHE_LINE, _LARGEST_ELEMENT = 64, 8
"""In bytes."""


@dataclass
class _Result:
    """A result of a launch for which no tensor is allocated yet."""

    type: TensorType
    first: int
    """The launch that writes it."""
    last: int | None = None
    """The last launch that reads it; None if it outlives the batch."""


@dataclass
class _PendingLaunch:
    """A launch of the current batch."""

    launchable: Launchable
    buffers: Sequence[str]
    """Variables."""
    symbols: Sequence[str]
    checks: Sequence[str]
    """For each index check, the arguments of its error message."""


class LaunchBatch:
    """The launches that wait to be emitted as one call, at the latest when there are ``max_launches``."""

    def __init__(self, code: FunctionBuilder, max_launches: int = MAX_LAUNCHES) -> None:
        self.code, self.max_launches = code, max_launches
        self.launches: list[_PendingLaunch] = []
        self.results: dict[str, _Result] = {}
        """By variable."""
        self.dead: list[str] = []
        """Variables to delete after the call."""
        self.acquired: list[str] = []
        """Variables of memory blocks to release after the call."""

    def has_room(self, checks: Sequence[str]) -> bool:
        """Return whether a launch with these checks fits: the checks of a batch are numbered, up to a maximum."""
        return sum(len(launch.checks) for launch in self.launches) + len(checks) <= MAX_CHECKS

    def result(self, value: Value, type: TensorType) -> str:
        """Define a result of the launch that is added next, and return its variable."""
        _, strides = self.code.allocate(type)
        name = self.code.define(value, strides)
        self.results[name] = _Result(type, len(self.launches))
        return name

    def add(
        self, launchable: Launchable, buffers: Sequence[str], symbols: Sequence[str], checks: Sequence[str]
    ) -> None:
        """Append a launch to the batch."""
        self.launches.append(_PendingLaunch(launchable, buffers, symbols, checks))

    def free(self, names: Iterable[str]) -> None:
        """Mark variables as dead from here on; emit the batch if it is empty or full."""
        for name in dict.fromkeys(names):
            self.dead.append(name)
            if name in self.results:
                self.results[name].last = len(self.launches) - 1
        if not self.launches or len(self.launches) >= self.max_launches:
            self.emit()

    def materialize(self, value: Value) -> None:
        """Allocate the tensor of a value for a line that precedes the call, such as a view, and reads no data."""
        name = self.code.names[value]
        if name in self.results:
            self._allocate(name)

    def emit(self) -> None:
        """Append one call for all launches, and free what is dead; lines that read data may follow."""
        addresses = self._plan_memory() if len(self.launches) > 1 else {}
        for name in [name for name in self.results if name not in addresses]:
            self._allocate(name)
        if self.launches:
            self.code.line(self._call(addresses))
        for memory in self.acquired:
            self.code.line(f"{self.code.constant(release_block, 'release_block')}({memory})")
        dead = [*(name for name in self.dead if name not in addresses), *self.code.take_temporaries()]
        if dead:
            self.code.line(f"del {', '.join(dict.fromkeys(dead))}")
        self.launches, self.results, self.dead, self.acquired = [], {}, [], []

    def _call(self, addresses: dict[str, str]) -> str:
        launches, checks, first = [], list[str](), self.launches[0]
        for pending in self.launches:
            pointers = tuple(addresses.get(name, f"{name}.data_ptr()") for name in pending.buffers)
            first_check = len(checks) + 1 if pending.checks else 0
            launches.append(Launch(pending.launchable, pointers, tuple(pending.symbols), first_check))
            checks += pending.checks
        if isinstance(first.launchable, BatchLaunchable):
            call = first.launchable.call_text(launches, self.code.constant)
        else:
            buffers, symbols = ("".join(f"{name}, " for name in names) for names in (first.buffers, first.symbols))
            call = f"{self.code.constant(first.launchable, first.launchable.name)}(({buffers}), ({symbols}))"
        if not checks:
            return call
        function = self.code.constant(raise_out_of_range, "raise_out_of_range")
        return f"if fault := {call}: {function}(fault, ({''.join(f'{check}, ' for check in checks)}))"

    def _allocate(self, name: str) -> None:
        allocation, _ = self.code.allocate(self.results.pop(name).type)
        self.code.line(f"{name} = {allocation}")

    def _plan_memory(self) -> dict[str, str]:
        """Return the addresses of results that die in the batch, in one block for each symbolic factor of sizes."""
        by_factor: dict[sympy.Expr, dict[str, LiveRange]] = {}
        for name, result in self.results.items():
            if result.last is not None:
                count, factor = split_size(result.type.nbytes)
                by_factor.setdefault(factor, {})[name] = LiveRange(count, result.first, result.last)
        addresses = {}
        for factor, buffers in by_factor.items():
            # With a symbolic factor cache lines are not known, and to align each unit to one might take much memory.
            offsets, length = plan(list(buffers.values()), _CACHE_LINE if factor == 1 else _LARGEST_ELEMENT)
            memory, start = self.code.fresh(), self.code.fresh()
            nbytes = PYTHON.print(simplify(factor * length))
            self.code.line(f"{memory} = {self.code.constant(acquire_block, 'acquire_block')}({nbytes})")
            self.acquired.append(memory)
            self.code.line(f"{start} = {memory}.data_ptr()")
            for name, offset in zip(buffers, offsets, strict=True):
                addresses[name] = f"{start} + {PYTHON.print(factor * offset)}" if offset else start
                del self.results[name]
        return addresses
