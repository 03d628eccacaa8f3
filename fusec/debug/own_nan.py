"""NaN that a graph has in eager, too: the operation that it is from."""

from collections.abc import Sequence
from typing import Any

from fusec.ir.graph import Graph, Node
from fusec.ir.sources import short_source


def own_nan(graph: Graph, arguments: Sequence[Any], results: Sequence[Any]) -> str:
    """Return which results of eager have NaN, and from which operation or input; "" where none has.

    Args:
        graph: as captured.
        arguments: of the graph; they are not changed.
        results: of the graph on these arguments.
    """
    found = [(i, count) for i, count in enumerate(map(_count, results[: len(graph.outputs)])) if count]
    if not found:
        return ""
    given = [value.name for value, x in zip(graph.inputs, arguments, strict=True) if _count(x)]
    cause = f"in input {given[0]}" if given else _first(graph, arguments)
    counts = ", ".join(f"output {i} has {count} NaN of {results[i].numel()}" for i, count in found[:3])
    return f"{counts} in eager, too" + (f"; the first are {cause}" if cause else "")


def _count(x: Any) -> int:
    import torch

    return int(x.isnan().sum()) if isinstance(x, torch.Tensor) and x.is_floating_point() else 0


def _first(graph: Graph, arguments: Sequence[Any]) -> str:
    """Return the first operation with NaN in its results; no input has any."""
    from fusec.reference.contract import copy_arguments
    from fusec.reference.interpreter import Machine, bind_symbols

    found: list[Node] = []

    class Watch(Machine):
        def node(self, node: Node, operands: list[Any]) -> list[Any]:
            results = super().node(node, operands)
            if not found and any(map(_count, results)):
                found.append(node)
            return results

    Watch(bind_symbols(graph, arguments), None, True).evaluate(graph, copy_arguments(arguments))
    if not found:
        return ""
    place = f" at {short_source(found[0].sources[0])}" if found[0].sources else ""
    return f"of `{found[0].op.name}`{place}"
