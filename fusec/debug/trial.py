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
SEED = 0
"""Seed of random operations, in each run."""


class Trial:
    """One graph with its inputs and eager's results."""

    def __init__(self, graph: Graph, arguments: Sequence[Any], config: Config, progress: Callable[[str], None]) -> None:
        import torch

        from fusec.reference.interpreter import evaluate

        self.graph, self.arguments, self.config, self.progress = graph, arguments, config, progress
        self.eager = self.run(lambda given: evaluate(graph, given, mutate=True))
        wide = self.run(lambda given: evaluate(graph, given, dtype=torch.float64))
        self.numbered: dict[int, Remark] = {}
        """The applications that were seen without those at fault, made or not."""
        self.reference = [*wide[: len(graph.outputs)], *self.eager[len(graph.outputs) :]]

    def run(self, function: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Return the results, and the inputs after the call."""
        import torch

        from fusec.reference.contract import copy_arguments

        given = copy_arguments(self.arguments)
        torch.manual_seed(SEED)
        return [*function(list(given)), *given]

    def note(self, remarks: Sequence[Remark]) -> None:
        """Note applications by number: those not made depend on the ones before, so later trials know better."""
        for remark in remarks:
            number = remark.application
            if number is not None and getattr(self.numbered.get(number), "kind", "") != "passed":
                self.numbered[number] = remark

    def wrong(self, **changes: Any) -> tuple[str, Sequence[Remark]]:
        """Return how a program is wrong, and the remarks of its compile."""
        from fusec.compiler import compile_graph
        from fusec.reference.contract import compare_outputs

        self.progress(f"{self.graph.name}: {changes or 'everything'}")
        remarks: Sequence[Remark] = ()
        try:
            compiled = compile_graph(self.graph, replace(self.config, **changes))
            remarks = compiled.remarks
            self.note(remarks)
            comparison = compare_outputs(self.eager, self.run(compiled.program), self.reference)
        except OptionError:
            raise
        except Exception as reason:
            return f"{type(reason).__name__}: {reason}", remarks
        return "" if comparison.passed else str(comparison), remarks
