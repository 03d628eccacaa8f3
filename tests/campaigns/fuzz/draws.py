"""A random program as data: bytes for its head and for each of its steps, which hypothesis can shrink."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.errors import Flaky

T = TypeVar("T")
Program: TypeAlias = tuple[bytes, list[bytes]]
"""What the inputs and outputs are drawn from, and what each step is."""

HEAD, STEP, LONGEST = 48, 14, 24
"""Bytes of the head and of a step, and steps of the longest program."""
_BUFFER = 2048
_SHRINKING = settings(
    deadline=None,
    database=None,
    phases=[Phase.reuse, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    report_multiple_bugs=False,
)


class Draws:
    """Choices read off bytes, the first of all where they end or are 0: so shrinking makes programs simpler."""

    def __init__(self, data: bytes) -> None:
        self._left = iter(data)

    def below(self, count: int) -> int:
        """A number from 0 to ``count - 1``, which is at most 256."""
        return next(self._left, 0) % count

    def choice(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def chance(self, percent: int) -> bool:
        """True about so often; not for 0."""
        return self.below(256) >= 256 - percent * 256 // 100

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in some order; as they are for zeros."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in items]


def programs() -> st.SearchStrategy[Program]:
    """A strategy of programs."""
    steps = st.lists(st.binary(min_size=STEP, max_size=STEP), min_size=1, max_size=LONGEST)
    return st.tuples(st.binary(min_size=HEAD, max_size=HEAD), steps)


def drawn(seed: int, indices: Iterable[int]) -> list[Program]:
    """The programs of a seed by index: the same in every run."""
    found: list[Program] = []

    def take(program: Program) -> None:
        found.append(program)

    test: Any = _SHRINKING(given(programs())(take))
    for index in indices:
        test.hypothesis.fuzz_one_input(_buffer(seed, index))
    return found


def shrunk(seed: int, index: int, fails: Callable[[Program], bool], trials: int = 400) -> Program:
    """The simplest program that fails as that of a seed and an index does, after so many trials at most."""
    (best,), left = drawn(seed, [index]), iter(range(trials))

    def check(program: Program) -> None:
        nonlocal best
        if next(left, None) is not None and fails(program):
            best = program
            raise _Fails

    test: Any = settings(_SHRINKING, database=InMemoryExampleDatabase())(given(programs())(check))
    for run in (lambda: test.hypothesis.fuzz_one_input(_buffer(seed, index)), test):
        try:
            run()
        except (_Fails, Flaky):
            pass
    return best


class _Fails(Exception):
    """What hypothesis takes for a failure of the test."""


def _buffer(seed: int, index: int) -> bytes:
    return random.Random(f"{seed}/{index}").randbytes(_BUFFER)


def written(program: Program) -> Iterator[str]:
    """A program as text, a line for the head and for each step."""
    yield from (part.hex() for part in (program[0], *program[1]))


def read(lines: Sequence[str]) -> Program:
    """What ``written`` wrote."""
    head, *steps = (bytes.fromhex(line) for line in lines)
    return head, steps
