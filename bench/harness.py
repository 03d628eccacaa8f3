"""Paired rounds: every candidate runs once in each round, so that what disturbs a round disturbs all of them."""

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.machine import BUSY, Watch

console = Console(stderr=True)
OURS = "fusec"
BASELINE = "eager"
FLOOR = "eager again"
"""Eager, or whatever is the baseline, against itself: what the machine's noise alone makes of a ratio."""
NOT_MEASURED = "not measured"
LASTING = 0.1
"""Seconds: a call that takes longer is timed as it comes."""


@dataclass(frozen=True)
class Row:
    """One candidate's times over all rounds."""

    name: str
    milliseconds: float
    """Median of one call."""
    ratio: float
    """Median, over the rounds, of its time over the baseline's in the same round; below 1 is faster."""
    spread: float
    """Half-width of a 95 % interval of that median."""


@dataclass(frozen=True)
class Measurement:
    """All candidates on one question."""

    rows: list[Row]
    rounds: int
    others: float
    """Share of the machine that other processes used meanwhile."""

    @property
    def disturbed(self) -> bool:
        """Whether the figures mean nothing."""
        return self.others > BUSY

    @property
    def noise(self) -> float:
        """The noise floor: how far eager seems from itself."""
        return next((abs(row.ratio - 1) + row.spread for row in self.rows if row.name == FLOOR), 0.0)

    def row(self, name: str) -> Row:
        """One candidate's."""
        return next(row for row in self.rows if row.name == name)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"noise": self.noise, "disturbed": self.disturbed}


Clock = Callable[[Callable[[], object], int], float]
"""Seconds of one call, of so many in a row."""


def wall_clock(run: Callable[[], object], repeats: int) -> float:
    """What passes until the calls return."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def measure(
    candidates: dict[str, Callable[[], object]],
    rounds: int = 30,
    call_ms: float = 2.0,
    baseline: str = BASELINE,
    clock: Clock = wall_clock,
) -> Measurement:
    """Time candidates in paired rounds, each in an order of its own: whom one comes after is not the same every time.

    Args:
        candidates: by name, compiled on their first call.
        rounds: how many.
        call_ms: a shorter call is repeated to last this long. Any shorter than ``LASTING`` comes after as many that are
            not timed: what ran before it, which may have been anything, has left its own data in the caches.
        baseline: the candidate that the others are compared with; it runs a second time as the noise floor.
        clock: what times a call, and waits until its work is done where that goes on behind it.
    """
    runs = {baseline: candidates[baseline], FLOOR: candidates[baseline]} | candidates
    with torch.no_grad(), progress() as bar:
        task = bar.add_task("compile", total=len(runs) + rounds)
        seconds = {}
        for name, run in runs.items():
            bar.update(task, description=f"compile {name}")
            seconds[name] = _seconds(run, clock, min(rounds, 3))
            bar.advance(task)
        repeats = {name: max(1, math.ceil(call_ms / 1e3 / taken)) for name, taken in seconds.items()}
        bar.update(task, description="measure")
        watch, times = Watch.start(), {name: list[float]() for name in runs}
        for number in range(rounds):
            for name in random.Random(number).sample(list(runs), len(runs)):
                if seconds[name] < LASTING:
                    clock(runs[name], repeats[name])
                times[name].append(clock(runs[name], repeats[name]))
            bar.advance(task)
    rows = [_row(name, taken, times[baseline]) for name, taken in times.items()]
    return Measurement(rows, rounds, watch.others())


def print_promises(shown: Console, promises: Mapping[str, bool]) -> None:
    """Print whether each promise holds."""
    for promise, holds in promises.items():
        shown.print(f"{'[green]holds[/]' if holds else '[red]BROKEN[/]'}: {promise}", highlight=False)


def report(width: int | None = None) -> Console:
    """Where tables go; wide enough for them also when it is a file."""
    return Console(width=width or (None if sys.stdout.isatty() else 160))


def progress() -> Progress:
    """A progress bar on the error stream."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def table(title: str, measurements: dict[str, Measurement]) -> Table:
    """A line for each question, a column for each candidate: milliseconds and ratio to eager."""
    names = list(dict.fromkeys(row.name for m in measurements.values() for row in m.rows if row.name != FLOOR))
    shown = Table(title=title)
    shown.add_column("")
    for name in names:
        shown.add_column(name if name == BASELINE else f"{name} (× eager)", justify="right")
    shown.add_column("noise", justify="right")
    for question, measurement in measurements.items():
        cells = [_cell(measurement, name) for name in names]
        mark = " busy!" if measurement.disturbed else ""
        shown.add_row(question, *cells, f"{measurement.noise:.1%}{mark}")
    return shown


def _cell(measurement: Measurement, name: str) -> str:
    row = next((row for row in measurement.rows if row.name == name), None)
    if row is None:
        return "-"
    return f"{row.milliseconds:.3f} ms" + ("" if name == BASELINE else f" ({row.ratio:.2f})")


def _seconds(run: Callable[[], object], clock: Clock, first: int) -> float:
    for _ in range(first):
        run()
    return max(clock(run, 1), 1e-7)


def _row(name: str, times: list[float], baseline: list[float]) -> Row:
    ratios = [t / b for t, b in zip(times, baseline, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    spread = 1.57 * (quartiles[2] - quartiles[0]) / math.sqrt(len(ratios))  # the notch of a box plot
    return Row(name, statistics.median(times) * 1e3, statistics.median(ratios), spread)
