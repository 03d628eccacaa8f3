"""The error of each node of a compiled graph against float64, on inputs from the model: where precision is lost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusec.config import Config
from fusec.debug.trial import SEED
from fusec.ir.graph import Graph, Node, Value, storage
from fusec.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from fusec.compiler import Compiled


@dataclass(frozen=True)
class NodeError:
    """Errors of a node's results, relative to the largest element of each; the larger where there are several."""

    compiled: float
    """By the kernels of the program."""
    eager: float
    """By one operation of the graph at a time, each rounded to its dtype."""


def node_errors(compiled: "Compiled", config: Config, arguments: Sequence[Any]) -> dict[Node, NodeError]:
    """Run a compiled graph with each value in between as a result: its kernels, the same in float64, and node by node.

    Args:
        compiled: of the graph; its arguments are not changed.
        config: that it was compiled with.
        arguments: of its program.

    Returns:
        The errors of the final graph's nodes that compute floats in storage of their own. An error is that of all
        nodes up to there, as each reads what the ones before it have computed.
    """
    import torch

    from fusec.reference.contract import copy_arguments
    from fusec.reference.interpreter import evaluate

    final = compiled.graph
    values = [v for node in final for v in node.results if _is_compared(v)]
    whole = final.copy()
    to = dict(zip((v for n in final for v in n.results), (v for n in whole for v in n.results), strict=True))
    whole.set_outputs([to[v] for v in values])
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
    sides = [_program(whole, config), lambda given: evaluate(whole, given)]
    torch.manual_seed(SEED)
    reference = evaluate(whole, copy_arguments(wide), dtype=torch.float64)
    found = []
    for run in sides:
        torch.manual_seed(SEED)
        results = run(copy_arguments(arguments))
        found.append([_distance(x, r) for x, r in zip(results, reference, strict=True)])
    errors: dict[Node, NodeError] = {}
    for node, value in _by_node(values, zip(*found, strict=True)):
        known = errors.get(node, NodeError(0.0, 0.0))
        errors[node] = NodeError(max(known.compiled, value[0]), max(known.eager, value[1]))
    return errors


def _by_node(values: Sequence[Value], errors: Any) -> Iterator[tuple[Node, tuple[float, float]]]:
    for value, error in zip(values, errors, strict=True):
        assert value.producer is not None
        yield value.producer, error


def _program(graph: Graph, config: Config) -> Any:
    from fusec.codegen import target_for
    from fusec.codegen.program.program import build_program
    from fusec.compiler import context_for

    target = target_for(graph, config)
    context, schedules = context_for(target, config)
    return build_program(graph, target, context, schedules)


def _is_compared(value: Value) -> bool:
    """Return whether a value is floats that nothing overwrites."""
    node = value.producer
    if not isinstance(value.type, TensorType) or not value.type.dtype.is_float or node is None:
        return False
    own = storage(value) is value and not any(value in user.written for user in value.users)
    return own and not node.is_op("constant", "full")


def _distance(x: "Tensor", reference: "Tensor") -> float:
    """Return the largest error relative to the largest element; at least 1 where other elements are not finite."""
    x, reference = x.double(), reference.double()
    finite = x.isfinite() & reference.isfinite()
    wrong = ~finite & (x != reference) & ~(x.isnan() & reference.isnan())
    x, reference = x[finite], reference[finite]
    largest = float(reference.abs().max()) if reference.numel() else 0.0
    error = float((x - reference).abs().max()) if x.numel() else 0.0
    return max(error / (largest or 1.0), float(bool(wrong.any())))
