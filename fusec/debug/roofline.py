"""The roofline of every launch: what bounds it, and its predicted and measured time."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import sympy

from fusec.analysis.cost import Cost, compute_bound_from, node_cost, region_cost
from fusec.analysis.machine import Machine
from fusec.analysis.memory import touched_bytes
from fusec.debug.subject import Subject
from fusec.ir.graph import Graph, Node, Value, base
from fusec.ir.types import ASSUMED_SIZE, estimate


@dataclass(frozen=True)
class Roofline:
    """One launch, or the mean of equal ones."""

    bytes: float
    flops: float
    """Operations, repeated ones each time."""
    bound: str
    """The dominant part of the predicted time: ``memory``, ``compute`` or ``launch``."""
    limit_us: float
    """Predicted by the machine's limits alone."""
    predicted_us: float
    measured_us: float | None = None
    turns: dict[str, float] = field(default_factory=dict, hash=False)
    """For each symbolic size, the value from which on arithmetic dominates memory, the others unchanged."""

    @property
    def us(self) -> float:
        """The measured time, or else the predicted one."""
        return self.predicted_us if self.measured_us is None else self.measured_us

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def share(self) -> float:
        """Share of the machine's limit that is reached; 1 is the limit."""
        return self.limit_us / self.us if self.us else 0.0

    @property
    def gb_s(self) -> float:
        """Bytes moved in that time."""
        return self.bytes / self.us / 1e3 if self.us else 0.0

    @property
    def gflop_s(self) -> float:
        """Operations in that time."""
        return self.flops / self.us / 1e3 if self.us else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the roofline as JSON data."""
        derived = {name: getattr(self, name) for name in ("intensity", "share", "gb_s", "gflop_s")}
        return {**self.__dict__, **derived}


@dataclass(frozen=True)
class Totals:
    """All launches of a model together."""

    predicted_us: float
    measured_us: float | None
    """The sum over all steps, with the rest; None where they were not timed."""
    unprobed_us: float | None
    """The time of whole calls without probes."""
    probe_us: float | None
    """Time that reading the clock adds to each step."""
    bound: dict[str, float]
    """Shares of the time by what bounds the launches."""


class Rooflines:
    """Cost and time of the launches of one subject."""

    def __init__(self, subject: Subject, sizes: Mapping[str, int]) -> None:
        self.subject, self.sizes = subject, sizes
        self._cached = residents(subject.final, subject.machine, sizes)
        self._known: dict[Hashable, Any] = {}

    def of(self, node: Node) -> Roofline:
        """Return the roofline of one launch."""
        machine, timing = self.subject.machine, self.subject.timing
        cost = region_cost(node, self.sizes, self._cached, self._known)
        seconds = timing.seconds.get(node) if timing else None
        return Roofline(
            float(cost.bytes),
            float(cost.flops),
            cost.bound(machine),
            float(cost.limit(machine)) * 1e6,
            float(cost.time(machine)) * 1e6,
            None if seconds is None else seconds * 1e6,
            dict(self._turns(node)),
        )

    def _turns(self, node: Node) -> Iterator[tuple[str, float]]:
        cost = node_cost(node)
        free = {s for n in (cost.bytes, *cost.work.values()) if isinstance(n, sympy.Expr) for s in n.free_symbols}
        for size in sorted(free, key=str):
            others = {s: self.sizes.get(s.name, ASSUMED_SIZE) for s in free - {size}}
            alone = Cost(
                sympy.sympify(cost.bytes).subs(others),
                {unit: sympy.sympify(n).subs(others) for unit, n in cost.work.items()},
            )
            if (turn := compute_bound_from(alone, self.subject.machine, size)) is not None:
                yield size.name, turn


def mean(launches: Sequence[Roofline]) -> Roofline:
    """Merge equal launches; the result is bound by what bounds most of them."""
    measured = [r.measured_us for r in launches if r.measured_us is not None]
    return Roofline(
        fmean(r.bytes for r in launches),
        fmean(r.flops for r in launches),
        Counter(r.bound for r in launches).most_common(1)[0][0],
        fmean(r.limit_us for r in launches),
        fmean(r.predicted_us for r in launches),
        fmean(measured) if measured else None,
        launches[0].turns,
    )


def residents(graph: Graph, machine: Machine, sizes: Mapping[str, int]) -> Callable[[Value], bool]:
    """Return the values of a graph that are in the last-level cache when they are used.

    Small intermediates are, as they are read soon. Inputs, mostly weights, are where all
    of them fit together: otherwise each call loads them from memory again.
    """
    fits = machine.holds_all(sum(estimate(touched_bytes(v), sizes) for v in graph.inputs))

    def cached(value: Value) -> bool:
        return fits if base(value).producer is None else machine.holds(estimate(touched_bytes(value), sizes))

    return cached


def totals(rows: Sequence[tuple[Roofline, int]], subjects: Sequence[Subject]) -> Totals:
    """Return the sums over launches, each with its count."""
    timings = [s.timing for s in subjects if s.timing is not None]
    timed = bool(timings) and len(timings) == len(subjects)
    bound = {kind: sum(r.us * n for r, n in rows if r.bound == kind) for kind in ("memory", "compute", "launch")}
    whole = sum(bound.values())
    return Totals(
        sum(r.predicted_us * n for r, n in rows),
        sum(sum(t.seconds.values()) + t.rest for t in timings) * 1e6 if timed else None,
        sum(t.total for t in timings) * 1e6 if timed else None,
        fmean(t.probe for t in timings) * 1e6 if timed else None,
        {kind: us / whole if whole else 0.0 for kind, us in bound.items()},
    )
