"""Faults that can be planted in the compiler, which a campaign must find within some programs."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from fusec.ir.graph import Graph, Node
from fusec.ir.ops import OPS
from fusec.passes.grouping import Group
from fusec.pipeline import Context


@dataclass(frozen=True)
class Fault:
    """One fault, and where it shows."""

    name: str
    targets: tuple[str, ...]
    within: int
    """Programs that a campaign may need to find it."""
    plant: Callable[[], Any]
    """A context within which the compiler has it."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Within it, the compiler has the fault."""
        with self.plant():
            yield


def _in_graphs(change: Callable[[Graph, Node], None]) -> Callable[[], Any]:
    """A pass that goes wrong: it changes nodes that it should leave."""
    group = Group.apply

    def apply(self: Group, graph: Graph, context: Context) -> None:
        for node in graph.nodes:
            change(graph, node)
        graph.erase_dead()
        group(self, graph, context)

    return lambda: patch.object(Group, "apply", apply)


def _swap_sub(graph: Graph, node: Node) -> None:
    if node.is_op("sub"):
        graph.replace_operands(node, node.operands[::-1])


def _max_for_min(graph: Graph, node: Node) -> None:
    if node.is_op("minimum", "min"):
        node.op = OPS[node.op.name.replace("min", "max")]


def _lose_write(graph: Graph, node: Node) -> None:
    if node.is_op("write"):
        graph.replace_value(node.result, node.operands[0])
        graph.erase(node)


def _shift_slice(graph: Graph, node: Node) -> None:
    if node.is_op("slice") and isinstance(node.attributes["start"], int) and node.attributes["start"] > 0:
        node.attributes |= {"start": node.attributes["start"] - 1, "stop": node.attributes["stop"] - 1}


def _in_text(module: str, pattern: str, instead: str) -> Callable[[], Any]:
    """A printer that goes wrong."""

    def printing() -> Any:
        from importlib import import_module

        right = import_module(module).print_kernel
        return patch(f"{module}.print_kernel", lambda *a, **k: re.sub(pattern, instead, right(*a, **k)))

    return printing


_ALL = ("interpreter", "cpp", "triton", "backend")
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("operands of sub swapped", _ALL, 100, _in_graphs(_swap_sub)),
        Fault("max for min", _ALL, 100, _in_graphs(_max_for_min)),
        Fault("write lost", _ALL, 60, _in_graphs(_lose_write)),
        Fault("slice shifted", _ALL, 150, _in_graphs(_shift_slice)),
        Fault("last column dropped", ("cpp", "backend"), 60,
              _in_text("fusec.codegen.cpp.target", r"Part\{(\w+) - (\w+)\}", r"Part{\1 - \2 - 1}")),
        Fault("infinity lost", ("triton",), 200,
              _in_text("fusec.codegen.triton.interpreter", r"float\(.-?inf.\)", "0.0")),
    )
}  # fmt: skip
