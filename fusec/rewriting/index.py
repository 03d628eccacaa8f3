"""The nodes of a graph by what they compute: a pattern looks only where its root may stand."""

from collections.abc import Iterable
from typing import Any

from fusec.ir.graph import Graph, Node
from fusec.ir.types import DType, TensorType


class Index:
    """Made once for a graph, and kept true by whoever changes the graph."""

    def __init__(self, graph: Graph) -> None:
        self.within: set[str] = set()
        """Names of the operations that were ever in the graph or in the body of a region."""
        self._nodes: dict[tuple[str, Any], dict[Node, None]] = {}
        self._dtypes: dict[DType, None] = {}
        self.add(graph.nodes)

    @property
    def float_types(self) -> list[DType]:
        """The float types of results, narrow ones first: their patterns have the casts to wide ones inside."""
        return sorted(self._dtypes, key=lambda d: d.bytes)

    def add(self, nodes: Iterable[Node]) -> None:
        """Take up nodes that are new in the graph."""
        for node in nodes:
            self._nodes.setdefault(_kind(node), {})[node] = None
            self.within |= _ops(node)
            for r in node.results:
                if isinstance(r.type, TensorType) and r.type.dtype.is_float:
                    self._dtypes[r.type.dtype] = None

    def drop(self, nodes: Iterable[Node]) -> None:
        """Forget nodes that were erased."""
        for node in nodes:
            self._nodes[_kind(node)].pop(node, None)

    def like(self, node: Node) -> list[Node]:
        """The nodes of the same operation; those of the same fusion where it is a region."""
        return list(self._nodes.get(_kind(node), ()))

    def holds_all(self, nodes: Iterable[Node]) -> bool:
        """Whether for each of the nodes there is one that computes the same."""
        return all(self._nodes.get(_kind(node)) for node in nodes)


def _kind(node: Node) -> tuple[str, Any]:
    return node.op.name, node.attributes.get("fusion")


def _ops(node: Node) -> set[str]:
    found = {node.op.name}
    return found.union(*map(_ops, node.body.nodes)) if node.is_op("region") else found
