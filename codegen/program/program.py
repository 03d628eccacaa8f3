"""A graph of kernels as something that runs: one straight Python function that allocates, launches and frees."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fusec.codegen.program.freezing import Decided, Keeping
from fusec.codegen.program.launch_batches import LONGEST
from fusec.codegen.program.launchables import Schedules, build_kernels
from fusec.codegen.program.text import ProgramText, Step
from fusec.codegen.program.writer import ProgramWriter
from fusec.codegen.target import Target
from fusec.codegen.tile.kernel import Kernel
from fusec.ir.graph import Graph
from fusec.pipeline import Context


@dataclass(frozen=True)
class Program:
    """What a compiled graph runs. Calling it clears the list of arguments, so that they can be freed on the way."""

    run: Callable[[list[Any]], list[Any]]
    source: str
    """Text of the function behind ``run``."""
    constants: dict[str, Any]
    """What it mentions by name."""
    steps: tuple[Step, ...]
    """What one call does, in order; views are left out."""
    kernels: dict[str, Kernel]
    """The generated kernels by name."""
    texts: dict[str, str]
    """Their sources by name."""
    one_by_one: Callable[[], ProgramText]
    """Writes the function anew, with a call for each launch."""
    keeping: Keeping
    """What is kept from call to call."""

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run on the inputs of the graph."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.run(args)
        return self.run(args)

    def probed(self, probe: Callable[[int], None]) -> "Program":
        """The same steps one by one: ``probe(i)`` is called ahead of step ``i``, and with their number at the end."""
        text = self.one_by_one()
        *lines, last = text.lines
        for i, step in reversed(list(enumerate(text.steps))):
            lines.insert(step.line, f"probe({i})")
        source = _source(
            [*lines, last.replace("return", "results =", 1), f"probe({len(text.steps)})", "return results"]
        )
        constants = {**text.constants, "probe": probe}
        return replace(self, run=_function(source, constants, "probed"), source=source, constants=constants)


def build_program(graph: Graph, target: Target, context: Context, schedules: Schedules | None = None) -> Program:
    """Schedule, print and build the kernels of a grouped graph, and write the function that runs it."""
    decided = Decided.by_weights(graph)
    built = build_kernels(graph, target, context, decided, schedules)
    keeping = Keeping(graph, decided, built, lambda piece: build_program(piece, target, context))

    def written(longest: int) -> ProgramText:
        text = ProgramText(graph)
        ProgramWriter(text, built, keeping, longest).write()
        return text

    text = written(LONGEST)
    source = _source(text.lines)
    used = {step.name for step in text.steps if step.kind == "kernel"}
    return Program(
        run=_function(source, text.constants, graph.name),
        source=source,
        constants=text.constants,
        steps=tuple(text.steps),
        kernels={k.name: k for k, _ in built.values() if k.name in used},
        texts={k.name: launch.source for k, launch in built.values() if k.name in used},
        one_by_one=partial(written, 1),
        keeping=keeping,
    )


def _source(lines: Iterable[str]) -> str:
    return "\n".join(["def run(args):", *(f"    {line}" for line in lines)]) + "\n"


def _function(source: str, constants: dict[str, Any], name: str) -> Callable[[list[Any]], list[Any]]:
    """The function ``run`` of a source that mentions constants."""
    namespace = dict(constants)
    exec(compile(source, f"<fusec program {name}>", "exec"), namespace)
    made: Callable[[list[Any]], list[Any]] = namespace["run"]
    return made
