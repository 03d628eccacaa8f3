"""Descendants of the nodes that a pass removed: nodes that it added for the same operations of the model."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from fusec.ir.graph import Node
from fusec.ir.ops import Trait

MANY = 8
"""At most this many descendants of one node are given."""


def descendants(removed: Sequence[Node], added: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return the descendants of each removed node that has any, and of those in the bodies of removed regions.

    A node that moved into a region has the same operation there; one that was rewritten shares its sources only.
    """
    by_source: defaultdict[str, list[Node]] = defaultdict(list)
    for node in _with_bodies(added):
        if not node.has(Trait.SOURCE):
            for source in node.sources:
                by_source[str(source)].append(node)
    found = {}
    for node in _with_bodies(removed):
        near = list(dict.fromkeys(n for source in node.sources for n in by_source[str(source)]))
        equal = [n for n in near if n.op is node.op and _types(n) == _types(node)]
        if heirs := equal or [n for n in near if not n.has(Trait.REGION)] or near:
            found[node] = heirs[:MANY]
    return found


def _with_bodies(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        if node.has(Trait.REGION):
            yield from _with_bodies(node.body.nodes)


def _types(node: Node) -> list[str]:
    return [str(r.type) for r in node.results]
