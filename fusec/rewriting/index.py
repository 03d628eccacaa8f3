"""The nodes of a graph by operation, so that a pattern is tried only where its root can be."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from fusec.ir.graph import Graph, Node
from fusec.ir.types import DType, TensorType

Kind: TypeAlias = "tuple[str, str | None]"
"""Name of an operation, and of the fusion where it is a region."""


class Index:
    """The nodes of one graph by kind; whatever changes the graph must update it."""

    def __init__(self, graph: Graph) -> None:
        self._nodes: dict[Kind, dict[Node, None]] = {}
        self._dtypes: dict[DType, None] = {}
        self.add(graph.nodes)

    @property
    def float_types(self) -> list[DType]:
        """The float dtypes of results, narrow ones first: their patterns contain the casts to wide ones."""
        return sorted(self._dtypes, key=lambda d: d.bytes)

    def add(self, nodes: Iterable[Node]) -> None:
        """Add nodes that are new in the graph."""
        for node in nodes:
            self._nodes.setdefault(kind_of(node), {})[node] = None
            for r in node.results:
                if isinstance(r.type, TensorType) and r.type.dtype.is_float:
                    self._dtypes[r.type.dtype] = None

    def drop(self, nodes: Iterable[Node]) -> None:
        """Remove nodes that were erased."""
        for node in nodes:
            self._nodes[kind_of(node)].pop(node, None)

    def like(self, node: Node) -> Iterator[Node]:
        """Yield the nodes of the same kind; nodes may be dropped meanwhile."""
        nodes = self._nodes.get(kind_of(node), {})
        yield from (n for n in list(nodes) if n in nodes)

    def holds_all(self, kinds: Iterable[Kind]) -> bool:
        """Return whether the graph has a node of each kind."""
        return all(self._nodes.get(kind) for kind in kinds)


def kind_of(node: Node) -> Kind:
    """Return the kind of a node."""
    return node.op.name, node.attributes.get("fusion")
