"""The time of each step of a program, which runs many times on inputs from the model."""

import itertools
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fusec.config import Config
from fusec.ir.graph import Graph, Node
from fusec.ir.types import TensorType, Type

if TYPE_CHECKING:
    from fusec.codegen.program.program import Program
    from fusec.compiler import Compiled
    from fusec.debug.node_errors import NodeError

_WARM_UP, _LEAST, _MOST = 3, 5, 1000


@dataclass(frozen=True)
class Timing:
    """Medians over many calls of one program."""

    seconds: dict[Node, float]
    """By node of the final graph that the program has steps for, with copies and views made for it."""
    rest: float
    """The time of no node: reading inputs, copying outputs."""
    total: float
    """The time of whole calls without probes, which alternated with the others."""
    probe: float
    """Time that reading the clock adds to each step."""
    calls: int
    sizes: dict[str, int]
    """Values of the size symbols."""


class Stopwatch:
    """Compiles as usual and records each program's first arguments, to time it or find errors on them afterwards."""

    def __init__(self) -> None:
        self._kept: dict[Graph, tuple[Compiled, list[Any]]] = {}

    def compile(self, graph: Graph, config: Config) -> "Compiled":
        """Return the result of ``fusec.compiler.compile_graph``, with a program that records its arguments."""
        from fusec.compiler import compile_graph

        compiled = compile_graph(graph, config)
        run, given = compiled.program.run, list[Any]()
        self._kept[compiled.graph] = compiled, given

        def noted(args: list[Any]) -> list[Any]:
            given[:] = given or args
            return run(args)

        return replace(compiled, program=replace(compiled.program, run=noted))

    def timing(self, graph: Graph, seconds: float = 1.0) -> Timing | None:
        """Return the timing of a compiled graph; None where its program was never called."""
        compiled, given = self._kept[graph]
        if graph.inputs and not given:
            return None
        return time_program(compiled.program, graph, given, seconds)

    def errors(self, graph: Graph, config: Config) -> "dict[Node, NodeError]":
        """Return the errors of the nodes of a compiled graph; none where its program was never called."""
        from fusec.debug.node_errors import node_errors

        compiled, given = self._kept[graph]
        return {} if graph.inputs and not given else node_errors(compiled, config, given)


def time_program(program: "Program", graph: Graph, inputs: Sequence[Any], seconds: float = 1.0) -> Timing:
    """Run a program over and over for some seconds. It writes to copies; of counters it gets new ones each time.

    Args:
        program: of the graph.
        graph: the final one.
        inputs: of the graph.
        seconds: after which no other call starts, beyond the first few.
    """
    from fusec.reference.interpreter import bind_symbols

    written = graph.written_inputs
    counters = {i for i in written if not inputs[i].is_floating_point()}

    def fresh(given: Sequence[Any], which: Collection[int]) -> list[Any]:
        return [x.clone() if i in which else x for i, x in enumerate(given)]

    inputs = fresh(inputs, written)
    clock = clock_of(inputs)
    stamps = [0.0] * (len(program.steps) + 1)

    def probe(i: int) -> None:
        stamps[i] = clock()

    probed = program.probed(probe)
    steps: list[list[float]] = []
    totals: list[float] = []
    for _ in range(_WARM_UP):
        probed(fresh(inputs, counters))
    end = time.perf_counter() + seconds
    while len(totals) < _LEAST or (len(totals) < _MOST and time.perf_counter() < end):
        given = fresh(inputs, counters)
        start = clock()
        program(given)
        totals.append(clock() - start)
        given = fresh(inputs, counters)
        start = clock()
        probed(given)
        marks = [start, *stamps]
        steps.append([after - before for before, after in itertools.pairwise(marks)])
    by_node, rest = _by_node(program, [statistics.median(taken) for taken in zip(*steps, strict=True)])
    return Timing(by_node, rest, statistics.median(totals), _cost_of(probe), len(totals), bind_symbols(graph, inputs))


def _by_node(program: "Program", intervals: Sequence[float]) -> tuple[dict[Node, float], float]:
    """Return seconds by node, and those that belong to none, of the time before the first step and of each step."""
    by_node: dict[Node, float] = {}
    rest = intervals[0]
    for step, taken in zip(program.steps, intervals[1:], strict=True):
        if step.node is None:
            rest += taken
        else:
            by_node[step.node] = by_node.get(step.node, 0.0) + taken
    return by_node, rest


def sample_inputs(graph: Graph, symbols: dict[str, int]) -> list[Any]:
    """Return random inputs of a graph."""
    from fusec.reference.dtypes import torch_dtype
    from fusec.reference.layout import laid_out
    from fusec.verify.samples import float_inputs

    def as_declared(x: Any, type: Type) -> Any:
        if not isinstance(type, TensorType):
            return x
        return laid_out(x.to(type.device, torch_dtype(type.dtype)), type, symbols)

    drawn = float_inputs(graph, symbols, "normal", seed=0)
    return [as_declared(x, v.type) for v, x in zip(graph.inputs, drawn, strict=True)]


def clock_of(inputs: Sequence[Any]) -> Callable[[], float]:
    """Return a clock for calls with these inputs; on a GPU it waits until all that was launched is done."""
    import torch

    if not any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs):
        return time.perf_counter

    def synchronized() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return synchronized


def _cost_of(probe: Callable[[int], None], times: int = 1000) -> float:
    """Return the seconds that one probe takes."""
    start = time.perf_counter()
    for _ in range(times):
        probe(0)
    return (time.perf_counter() - start) / times
