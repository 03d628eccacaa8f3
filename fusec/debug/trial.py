"""One graph and its inputs, compiled in several ways and compared with eager and float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fusec.config import Config
from fusec.errors import OptionError
from fusec.ir.graph import Graph
from fusec.remarks import Remark

BEFORE_GROUPING = "canonicalize,raise,fuse,attention,bias"
"""The passes that are disabled for the body of a kernel region, which has been through them."""
MOST = 8
"""Faults that are searched for in one graph."""
SEED = 0
"""Seed of random operations, in each run."""


class Trial:
    """One graph with its inputs and eager's results."""

    def __init__(self, graph: Graph, arguments: Sequence[Any], config: Config, progress: Callable[[str], None]) -> None:
        import torch

        from fusec.reference.interpreter import evaluate

        self.graph, self.arguments, self.config, self.progress = graph, arguments, config, progress
        self.eager = self.run(lambda given: evaluate(graph, given, mutate=True))
        wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
        self.reference = _called(lambda given: evaluate(graph, given, dtype=torch.float64, mutate=True), wide)
        self.numbered: dict[int, Remark] = {}
        """The applications that were seen without those at fault, made or not."""
        self.as_eager = ""
        """The distance of eager itself from float64, where the last program was right and yet differs from eager."""

    def run(self, function: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Return the results, and the inputs after the call."""
        return _called(function, self.arguments)

    def note(self, remarks: Sequence[Remark]) -> None:
        """Note applications by number: those not made depend on the ones before, so later trials know better."""
        for remark in remarks:
            number = remark.application
            if number is not None and getattr(self.numbered.get(number), "kind", "") != "passed":
                self.numbered[number] = remark

    def wrong(self, **changes: Any) -> tuple[str, Sequence[Remark]]:
        """Return how a program is wrong, and the remarks of its compile."""
        from fusec.compiler import compile_graph

        self.progress(f"{self.graph.name}: {changes or 'everything'}")
        remarks: Sequence[Remark] = ()
        try:
            config = replace(self.config, **changes)
            compiled = compile_graph(self.graph if config.freeze else _thawed(self.graph), config)
            remarks = compiled.remarks
            self.note(remarks)
            return self.difference(compiled.program), remarks
        except OptionError:
            raise
        except Exception as reason:
            return f"{type(reason).__name__}: {reason}", remarks

    def difference(self, program: Callable[[list[Any]], list[Any]]) -> str:
        """Return how the results of a program are wrong; empty where none is farther from float64 than eager."""
        from fusec.reference.contract import as_far_as_eager, compare_outputs

        found = self.run(program)
        comparison = compare_outputs(self.eager, found, self.reference)
        self.as_eager = "" if comparison.message else as_far_as_eager(self.eager, found, self.reference)
        return "" if comparison.passed or self.as_eager else str(comparison)


def _thawed(graph: Graph) -> Graph:
    """Return a graph none of whose inputs is frozen."""
    graph = graph.copy()
    for value in graph.inputs:
        value.frozen = False
    return graph


def _called(function: Callable[[list[Any]], list[Any]], arguments: Sequence[Any]) -> list[Any]:
    import torch

    from fusec.reference.contract import copy_arguments

    given = copy_arguments(arguments)
    torch.manual_seed(SEED)
    return [*function(list(given)), *given]
