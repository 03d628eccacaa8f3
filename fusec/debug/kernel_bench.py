"""Times a kernel alone, against the limit of the machine and against other ways to compute the same."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fusec.config import Config
from fusec.debug.explanation import KernelRow
from fusec.debug.roofline import Roofline
from fusec.debug.timing import clock_of, sample_inputs
from fusec.debug.trial import BEFORE_GROUPING
from fusec.ir.graph import Graph

_ALTERNATIVES: Mapping[str, Mapping[str, Any]] = {
    "as it is": {"disable": BEFORE_GROUPING},
    "library for its matmuls": {"disable": BEFORE_GROUPING, "small_m": 0},
    "a kernel for each operation": {"disable": f"{BEFORE_GROUPING},group"},
}
_WARM_UP = 3


@dataclass(frozen=True)
class Alternative:
    """One way to compute a region."""

    name: str
    kernels: int
    """Kernels and calls of one run."""
    us: float
    """Median of runs that alternate with those of the others."""


def alternatives(
    row: KernelRow, sizes: Mapping[str, int], config: Config, seconds: float = 2.0
) -> tuple[list[Alternative], Roofline]:
    """Time the region of a generated kernel in several ways, on random inputs, for some seconds.

    Ways that are the same program are timed once. ``eager`` runs the operations one by one through ATen.
    """
    from fusec.compiler import compile_graph
    from fusec.dynamo import interpreted

    body = row.nodes[0].body
    ways: dict[str, tuple[Callable[[list[Any]], Any], int]] = {}
    seen: set[str] = set()
    for name, options in _ALTERNATIVES.items():
        compiled = compile_graph(body, replace(config, **options))
        if (text := str(compiled.graph)) not in seen:
            seen.add(text)
            steps = sum(step.kind in ("kernel", "vendor", "opaque", "interpreted") for step in compiled.program.steps)
            ways[name] = compiled.program, steps
    ways["eager"] = interpreted(body), len(body.nodes)
    times = _interleaved({name: run for name, (run, _) in ways.items()}, body, dict(sizes), seconds)
    return [Alternative(name, ways[name][1], times[name]) for name in ways], row.roofline


def _interleaved(
    runs: Mapping[str, Callable[[list[Any]], Any]], body: Graph, sizes: dict[str, int], seconds: float
) -> dict[str, float]:
    """Return the median microseconds of each function; they take turns."""
    inputs = sample_inputs(body, sizes)
    written, clock = set(body.written_inputs), clock_of(inputs)

    def fresh() -> list[Any]:
        return [x.clone() if i in written else x for i, x in enumerate(inputs)]

    for run in runs.values():
        for _ in range(_WARM_UP):
            run(fresh())
    taken: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(taken.values()))) < _WARM_UP:
        for name, run in runs.items():
            given = fresh()
            start = clock()
            run(given)
            taken[name].append(clock() - start)
    return {name: statistics.median(values) * 1e6 for name, values in taken.items()}
