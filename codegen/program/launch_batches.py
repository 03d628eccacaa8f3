"""Launches in a row as one call into native code, with the memory between them as one block that is planned ahead."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sympy

from fusec.codegen.program.runtime import borrow, give_back, raise_out_of_range
from fusec.codegen.program.text import ProgramText
from fusec.codegen.target import DirectLaunchable, Launch, Launchable
from fusec.codegen.tile.kernel import MAX_CHECKS
from fusec.codegen.tile.sizes import PYTHON
from fusec.ir.graph import Value
from fusec.ir.types import Size, TensorType, simplify

LONGEST = 32
"""Launches: what dies in a row of them is freed at its end, which should not be the end of a backward pass."""
_LINE, _ELEMENT = 64, 8
"""Bytes of a cache line, and of the largest element."""


@dataclass
class _Block:
    """What one launch makes, as long as no tensor is made for it."""

    type: TensorType
    first: int
    """The launch that makes it."""
    last: int | None = None
    """The last one that reads it; None where something after the row does."""


@dataclass
class _Waiting:
    """A launch that is not written yet."""

    launchable: Launchable
    buffers: Sequence[str]
    """Variables."""
    symbols: Sequence[str]
    checks: Sequence[str]
    """What is to be said of each."""


class LaunchBatch:
    """The launches since the last line that reads data.

    Args:
        text: where they are written.
        longest: after how many they are.
    """

    def __init__(self, text: ProgramText, longest: int = LONGEST) -> None:
        self.text, self.longest = text, longest
        self.launches: list[_Waiting] = []
        self.blocks: dict[str, _Block] = {}
        """By variable."""
        self.dead: list[str] = []
        """Variables that are to be freed."""
        self.borrowed: list[str] = []
        """Variables of memory that is to be given back."""

    def takes(self, checks: Sequence[str]) -> bool:
        """Whether one more launch fits in: the number of a check that failed tells those of a whole row apart."""
        return sum(len(launch.checks) for launch in self.launches) + len(checks) <= MAX_CHECKS

    def result(self, value: Value, type: TensorType) -> str:
        """The variable of a result of the launch that is added next."""
        _, strides = self.text.allocate(type)
        name = self.text.define(value, strides)
        self.blocks[name] = _Block(type, len(self.launches))
        return name

    def add(
        self, launchable: Launchable, buffers: Sequence[str], symbols: Sequence[str], checks: Sequence[str]
    ) -> None:
        """One more launch."""
        self.launches.append(_Waiting(launchable, buffers, symbols, checks))

    def free(self, names: Iterable[str]) -> None:
        """Take note of what nobody reads from here on."""
        for name in dict.fromkeys(names):
            self.dead.append(name)
            if name in self.blocks:
                self.blocks[name].last = len(self.launches) - 1
        if not self.launches or len(self.launches) >= self.longest:
            self.write()

    def materialize(self, value: Value) -> None:
        """Have a tensor of a value, for a line that is written before the launches are but reads no data."""
        name = self.text.names[value]
        if name in self.blocks:
            self._allocate(name)

    def write(self) -> None:
        """Write one call for all launches, and free what is dead: a line that reads data may follow."""
        addresses = self._place() if len(self.launches) > 1 else {}
        for name in [name for name in self.blocks if name not in addresses]:
            self._allocate(name)
        if self.launches:
            self.text.line(self._call(addresses))
        for memory in self.borrowed:
            self.text.line(f"{self.text.constant(give_back, 'give_back')}({memory})")
        dead = [*(name for name in self.dead if name not in addresses), *self.text.take_temporaries()]
        if dead:
            self.text.line(f"del {', '.join(dict.fromkeys(dead))}")
        self.launches, self.blocks, self.dead, self.borrowed = [], {}, [], []

    def _call(self, addresses: dict[str, str]) -> str:
        launches, checks, first = [], list[str](), self.launches[0]
        for waiting in self.launches:
            places = tuple(addresses.get(name, f"{name}.data_ptr()") for name in waiting.buffers)
            first_check = len(checks) + 1 if waiting.checks else 0
            launches.append(Launch(waiting.launchable, places, tuple(waiting.symbols), first_check))
            checks += waiting.checks
        if isinstance(first.launchable, DirectLaunchable):
            call = first.launchable.call_text(launches, self.text.constant)
        else:
            buffers, symbols = ("".join(f"{name}, " for name in names) for names in (first.buffers, first.symbols))
            call = f"{self.text.constant(first.launchable, first.launchable.name)}(({buffers}), ({symbols}))"
        if not checks:
            return call
        function = self.text.constant(raise_out_of_range, "raise_out_of_range")
        return f"if fault := {call}: {function}(fault, ({''.join(f'{check}, ' for check in checks)}))"

    def _allocate(self, name: str) -> None:
        allocation, _ = self.text.allocate(self.blocks.pop(name).type)
        self.text.line(f"{name} = {allocation}")

    def _place(self) -> dict[str, str]:
        """Addresses of what only these launches see, in one block of memory for all sizes that share their symbols."""
        alike: dict[sympy.Expr, dict[str, Span]] = {}
        for name, block in self.blocks.items():
            if block.last is not None:
                count, factor = counted(block.type.nbytes)
                alike.setdefault(factor, {})[name] = Span(count, block.first, block.last)
        addresses = {}
        for factor, spans in alike.items():
            # With a factor nobody knows where lines begin, and a line for each of them might be much.
            offsets, length = pack(list(spans.values()), _LINE if factor == 1 else _ELEMENT)
            memory, start = self.text.fresh(), self.text.fresh()
            nbytes = PYTHON.print(simplify(factor * length))
            self.text.line(f"{memory} = {self.text.constant(borrow, 'borrow')}({nbytes})")
            self.borrowed.append(memory)
            self.text.line(f"{start} = {memory}.data_ptr()")
            for name, offset in zip(spans, offsets, strict=True):
                addresses[name] = f"{start} + {PYTHON.print(factor * offset)}" if offset else start
                del self.blocks[name]
        return addresses


def counted(nbytes: Size) -> tuple[int, sympy.Expr]:
    """A size as how many of what: a number and a factor that only a call knows, 1 where all is known."""
    count, factor = sympy.sympify(nbytes).as_content_primitive()
    return (int(count), factor) if count.is_Integer else (1, sympy.sympify(nbytes))


@dataclass(frozen=True)
class Span:
    """Memory that is needed from one launch to another, both included."""

    nbytes: int
    """Times the factor that all have in common."""
    first: int
    last: int


def pack(spans: Sequence[Span], aligned: int) -> tuple[list[int], int]:
    """Offsets at which no two spans share both time and place, and where the last one ends.

    The largest first, each as low as it fits: no optimum, but near it for what layers repeat.

    Args:
        spans: any number of them.
        aligned: bytes that offsets are multiples of.
    """
    placed: list[tuple[int, int, Span]] = []
    offsets = [0] * len(spans)
    for i in sorted(range(len(spans)), key=lambda i: -spans[i].nbytes):
        span, offset = spans[i], 0
        length = -(-span.nbytes // aligned) * aligned
        for start, stop, other in sorted(placed, key=lambda p: p[0]):
            together = span.first <= other.last and other.first <= span.last
            if together and start < offset + length and offset < stop:
                offset = stop
        offsets[i] = offset
        placed.append((offset, offset + length, span))
    return offsets, max((stop for _, stop, _ in placed), default=0)
