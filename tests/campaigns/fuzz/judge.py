"""A graph as it is compiled, held against the interpreter on the graph as it came."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusec.ir.graph import Graph
from fusec.ir.types import F16, TensorType
from fusec.ir.verifier import verify_graph
from fusec.reference.contract import copy_arguments
from fusec.reference.interpreter import evaluate
from tests.campaigns.fuzz.draws import Program
from tests.campaigns.fuzz.inputs import arguments
from tests.campaigns.fuzz.order import OrderDependent, reversed_reference, run_in_any_order
from tests.campaigns.fuzz.targets import TARGETS, Run
from tests.campaigns.fuzz.wide import wide_graph
from tests.campaigns.op_db.cases import widened
from tests.campaigns.op_db.judge import Values, Verdict, wrong_values


def judge_graph(program: Program, target: str) -> Verdict:
    """Compile the graph of a program for a target, and compare outputs and what becomes of the inputs."""
    graph = wide_graph(program)
    verify_graph(graph)
    given = arguments(graph, program[0][40:])
    try:
        run_in_any_order(graph, given)
    except (RuntimeError, IndexError, OrderDependent) as reason:
        return Verdict("undefined", _line(reason))
    try:
        compiled = TARGETS[target](graph)
        found = wrong_values(lambda moved: _values(graph, compiled.run, moved), given)
    except Exception as reason:
        if "InterpreterError: OverflowError" in _line(reason):  # Triton's interpreter reduces Python's integers
            return Verdict("undefined", _line(reason))
        return Verdict("raised", _line(reason))
    if found:
        return Verdict("wrong", "; ".join(found))
    return Verdict("fallback" if compiled.falls_back else "right")


def original(graph: Graph) -> Run:
    """A graph as it came, node by node."""
    return lambda given: evaluate(graph, given, mutate=True)


def _values(graph: Graph, run: Run, given: Sequence[Any]) -> Values:
    sides = (original(graph), run)
    eager, compiled = (_after(side, given) for side in sides)
    reference = _after(lambda wide: reversed_reference(graph, wide), widened(list(given)))
    rows = list(zip(eager, compiled, reference, strict=True))
    if any(v.dtype == F16 for node in graph for v in node.results if isinstance(v.type, TensorType)):
        rows = [without_overflow(*row) for row in rows]
    return rows


def without_overflow(eager: Tensor, compiled: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Forgive float16 that overflows in eager: kernels compute in float32, and overflow elsewhere (docs/limits.md)."""
    overflown = ~eager.isfinite() & reference.isfinite()
    eager = torch.where(overflown, reference.to(eager.dtype), eager)
    return eager, torch.where(overflown & ~compiled.isfinite(), eager, compiled), reference


def _after(run: Run, given: Sequence[Any]) -> list[Tensor]:
    """The outputs of a call on copies, and these as it leaves them."""
    copies = copy_arguments(given)
    outputs = [x.clone() for x in run(copies)]
    return [*outputs, *(x for x in copies if isinstance(x, Tensor))]


def _line(reason: Exception) -> str:
    return f"{type(reason).__name__}: {' '.join(str(reason).split())}"[:400]
