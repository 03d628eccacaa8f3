"""The nodes of a graph by what they compute: a pattern looks only where its root may stand."""

from collections.abc import Iterable, Iterator
from typing import Any

from fusec.ir.graph import Graph, Node
from fusec.ir.types import DType, TensorType


class Index:
    """Made once for a graph, and kept true by whoever changes the graph."""

    def __init__(self, graph: Graph) -> None:
        self.within: set[str] = set()
        """Names of the operations and fusions that were ever in the graph or in the body of a region."""
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
            self.within |= _names(node)
            for r in node.results:
                if isinstance(r.type, TensorType) and r.type.dtype.is_float:
                    self._dtypes[r.type.dtype] = None

    def drop(self, nodes: Iterable[Node]) -> None:
        """Forget nodes that were erased."""
        for node in nodes:
            self._nodes[_kind(node)].pop(node, None)

    def like(self, node: Node) -> Iterator[Node]:
        """The nodes of the same operation (and fusion, where it is a region); some may be dropped on the way."""
        nodes = self._nodes.get(_kind(node), {})
        yield from (n for n in list(nodes) if n in nodes)

    def holds_all(self, nodes: Iterable[Node]) -> bool:
        """Whether for each of the nodes there is one that computes the same."""
        return all(self._nodes.get(_kind(node)) for node in nodes)


def _kind(node: Node) -> tuple[str, Any]:
    return node.op.name, node.attributes.get("fusion")


def _names(node: Node) -> set[str]:
    found = {name for name in _kind(node) if name}
    return found.union(*map(_names, node.body.nodes)) if node.is_op("region") else found
