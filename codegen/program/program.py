"""Compilation of a grouped graph to a program: a straight-line Python function, and its kernels."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from fusec.codegen.program.constant_folding import ConstantFolding, FoldedValues
from fusec.codegen.program.function_builder import FunctionBuilder, Step
from fusec.codegen.program.kernels import ScheduleCache, build_kernels
from fusec.codegen.program.launch_batch import MAX_LAUNCHES
from fusec.codegen.program.lowering import Lowering
from fusec.codegen.target import Target
from fusec.codegen.tile.kernel import Kernel
from fusec.frontend.torch_internals import is_profiling
from fusec.ir.graph import Graph
from fusec.pipeline import Context


@dataclass(frozen=True)
class Program:
    """A compiled graph. A call clears the list of arguments, so that each can be freed after its last use."""

    run: Callable[[list[Any]], list[Any]]
    source: str
    """The source of ``run``."""
    constants: dict[str, Any]
    """The objects that the source refers to, by name."""
    steps: tuple[Step, ...]
    """The operations of a call, in order, without views."""
    kernels: dict[str, Kernel]
    """The generated kernels by name."""
    texts: dict[str, str]
    """Their sources by name."""
    unbatched: Callable[[], FunctionBuilder]
    """Lowers the graph again, with a call for each launch."""
    folded: FoldedValues
    """The values that are computed once, under ``freeze``."""

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run on the inputs of the graph."""
        run = self._named if is_profiling() else self.run
        if torch.is_grad_enabled():
            with torch.no_grad():
                return run(args)
        return run(args)

    @cached_property
    def _named(self) -> Callable[[list[Any]], list[Any]]:
        """The function with an event of torch's profiler for each step, named after its kernel or call."""
        current = threading.local()

        def end() -> None:
            if (event := getattr(current, "event", None)) is not None:
                current.event = None
                event.__exit__(None, None, None)

        def probe(i: int) -> None:
            end()
            if i < len(self.steps):
                current.event = torch.profiler.record_function(f"fusec::{self.steps[i].name}")
                current.event.__enter__()

        run = self.probed(probe).run

        def named(args: list[Any]) -> list[Any]:
            try:
                return run(args)
            finally:
                end()

        return named

    def probed(self, probe: Callable[[int], None]) -> "Program":
        """Return the program with a call of ``probe(i)`` before step ``i``, and with the number of steps at the end."""
        code = self.unbatched()
        *lines, last = code.lines
        for i, step in reversed(list(enumerate(code.steps))):
            lines.insert(step.line, f"probe({i})")
        source = _source(
            [*lines, last.replace("return", "results =", 1), f"probe({len(code.steps)})", "return results"]
        )
        constants = {**code.constants, "probe": probe}
        return replace(self, run=_function(source, constants, "probed"), source=source, constants=constants)


def build_program(graph: Graph, target: Target, context: Context, schedules: ScheduleCache | None = None) -> Program:
    """Schedule, print and build the kernels of a grouped graph, and lower it to the function that runs it."""
    folding = ConstantFolding.of(graph)
    kernels = build_kernels(graph, target, context, folding, schedules)
    launched = {node: kernel for node, (kernel, *_) in kernels.items()}
    folded = FoldedValues(graph, folding, launched, lambda subgraph: build_program(subgraph, target, context))

    def lowered(max_launches: int) -> FunctionBuilder:
        code = FunctionBuilder(graph)
        Lowering(code, kernels, folded, max_launches).run()
        return code

    code = lowered(MAX_LAUNCHES)
    source = _source(code.lines)
    used = {step.name for step in code.steps if step.kind == "kernel"}
    return Program(
        run=_function(source, code.constants, graph.name),
        source=source,
        constants=code.constants,
        steps=tuple(code.steps),
        kernels={k.name: k for k, *_ in kernels.values() if k.name in used},
        texts={k.name: built.source for k, built, _ in kernels.values() if k.name in used},
        unbatched=partial(lowered, 1),
        folded=folded,
    )


def _source(lines: Iterable[str]) -> str:
    return "\n".join(["def run(args):", *(f"    {line}" for line in lines)]) + "\n"


def _function(source: str, constants: dict[str, Any], name: str) -> Callable[[list[Any]], list[Any]]:
    """Return the function that a source defines."""
    namespace = dict(constants)
    exec(compile(source, f"<fusec program {name}>", "exec"), namespace)
    function: Callable[[list[Any]], list[Any]] = namespace["run"]
    return function
