"""The difference of two graphs: what a pass added, removed and rewired.

Near-linear, so that it can run after every pass: nodes are paired by what they compute from the inputs down,
then by operation and operands, then by operation.
"""

import difflib
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.printer import name_values, print_graph


@dataclass
class GraphDiff:
    """The difference of two graphs at their top level."""

    pairs: dict[Node, Node] = field(default_factory=dict)
    """Nodes of the second graph to those of the first that they continue."""
    added: list[Node] = field(default_factory=list)
    """Only in the second."""
    removed: list[Node] = field(default_factory=list)
    """Only in the first."""
    rewired: list[Node] = field(default_factory=list)
    """Nodes of the second that do the same as before to other operands."""
    inputs: dict[Value, Value] = field(default_factory=dict)
    """Inputs of the second graph to those of the first."""

    def __bool__(self) -> bool:
        """Return whether anything differs."""
        return bool(self.added or self.removed or self.rewired)

    def summary(self) -> str:
        """``+3 -5 ~1``."""
        counts = (("+", self.added), ("-", self.removed), ("~", self.rewired))
        return " ".join(f"{sign}{len(nodes)}" for sign, nodes in counts if nodes) or "unchanged"


def diff_graphs(before: Graph, after: Graph) -> GraphDiff:
    """Pair the nodes of two graphs."""
    diff = GraphDiff(inputs=_same_inputs(before, after))
    here, there = _what(before), _what(after)
    named = {v: v for v in before.inputs} | {old: new for new, old in diff.inputs.items()}
    old_meaning, new_meaning = _meaning(before, here, named), _meaning(after, there, {v: v for v in after.inputs})
    _pair(diff, before, after, old_meaning.__getitem__, new_meaning.__getitem__)
    partner = {old: new for new, old in diff.pairs.items()}

    def reads(node: Node, old: bool) -> Hashable:
        known = partner.get if old else lambda n: n if n in diff.pairs else None
        ends = tuple((known(v.producer), v.index) if v.producer else named.get(v, v) for v in node.operands)
        return (here if old else there)[node], ends

    _pair(diff, before, after, lambda n: reads(n, True), lambda n: reads(n, False))
    _pair(diff, before, after, here.__getitem__, there.__getitem__)
    return _classify(diff, before, after)


def diff_of_pairs(before: Graph, after: Graph, pairs: dict[Node, Node]) -> GraphDiff:
    """Return the difference where it is known which nodes of ``before`` those of ``after`` continue."""
    return _classify(GraphDiff(pairs, inputs=_same_inputs(before, after)), before, after)


def _same_inputs(before: Graph, after: Graph) -> dict[Value, Value]:
    """Pair inputs by name, as another version of a model may have fewer; by position where names are not unique."""
    known, now = ({v.name: v for v in graph.inputs} for graph in (before, after))
    if len(known) < len(before.inputs) or len(now) < len(after.inputs):
        return dict(zip(after.inputs, before.inputs, strict=False))
    return {v: known[name] for name, v in now.items() if name in known and known[name].type == v.type}


def _classify(diff: GraphDiff, before: Graph, after: Graph) -> GraphDiff:
    kept = set(diff.pairs.values())
    diff.removed = [n for n in before.nodes if n not in kept]
    for node in after.nodes:
        old = diff.pairs.get(node)
        if old is None:
            diff.added.append(node)
        elif not all(_continues(diff, a, b) for a, b in zip(node.operands, old.operands, strict=True)):
            diff.rewired.append(node)
    return diff


def _continues(diff: GraphDiff, new: Value, old: Value) -> bool:
    if new.producer is None or old.producer is None:
        return diff.inputs.get(new) is old
    return diff.pairs.get(new.producer) is old.producer and new.index == old.index


def _pair(
    diff: GraphDiff,
    before: Graph,
    after: Graph,
    old_key: Callable[[Node], Hashable],
    new_key: Callable[[Node], Hashable],
) -> None:
    """Pair the remaining nodes with equal keys, in the order of the graphs."""
    kept = set(diff.pairs.values())
    waiting: defaultdict[Hashable, list[Node]] = defaultdict(list)
    for node in reversed([n for n in before.nodes if n not in kept]):
        waiting[old_key(node)].append(node)
    fresh = [(n, new_key(n)) for n in after.nodes if n not in diff.pairs]
    for node, key in fresh:
        if waiting.get(key):
            diff.pairs[node] = waiting[key].pop()


def _what(graph: Graph) -> dict[Node, Hashable]:
    """Return a key of a node without its operands, and without the label of a kernel, which has a number."""
    return {
        node: (
            node.op.name,
            len(node.operands),
            tuple(sorted((k, _plain(v)) for k, v in node.attributes.items() if k != "label")),
            tuple(str(r.type) for r in node.results),
            # A line's number moves when a model is edited; what layers share has as many sources as there are layers;
            # the text of a graph has none of a constant.
            tuple((s.module, s.op, s.text) for s in node.sources[:1] if not node.is_op("constant")),
        )
        for node in graph.nodes
    }


def _plain(value: Any) -> Hashable:
    if isinstance(value, Graph):
        return fingerprint(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple) else str(value)


def fingerprint(graph: Graph) -> int:
    """Return a key that is equal for graphs with the same computation, whatever their values are called."""
    meaning = _meaning(graph, _what(graph))
    return hash((*map(str, (v.type for v in graph.inputs)), *(_end(v, meaning, {}) for v in graph.outputs)))


def _meaning(
    graph: Graph, what: dict[Node, Hashable], inputs: Mapping[Value, Hashable] | None = None
) -> dict[Node, Hashable]:
    """Return a key of what a node computes from the inputs of the graph, which have keys of their own or positions."""
    meaning: dict[Node, Hashable] = {}
    inputs = inputs or {}
    for node in graph.nodes:
        meaning[node] = hash((what[node], *(_end(v, meaning, inputs) for v in node.operands)))
    return meaning


def _end(value: Value, meaning: Mapping[Node, Hashable], inputs: Mapping[Value, Hashable]) -> Hashable:
    return (meaning[value.producer], value.index) if value.producer else inputs.get(value, ("input", value.index))


def diff_lines(before: Graph, after: Graph, sources: bool = True, context: int = 2) -> list[str]:
    """Return a unified diff of two graphs; a node that is in both has one name in both, also inside of regions."""
    alike: dict[Graph, dict[Value, str]] = {}
    _name_alike(before, after, alike)
    one = print_graph(before, sources=sources)
    other = print_graph(after, sources=sources, names_of=lambda graph: alike.get(graph) or name_values(graph))
    lines, others = one.splitlines(), other.splitlines()
    return list(difflib.unified_diff(lines, others, "before", "after", n=context, lineterm=""))


def _name_alike(before: Graph, after: Graph, alike: dict[Graph, dict[Value, str]]) -> None:
    """Name the values of a graph, and of the bodies in it, as those that they continue; new ones get new names."""
    pairs, old, own = diff_graphs(before, after).pairs, name_values(before), name_values(after)
    pairs |= _changed_regions(before, after, pairs)
    same = [(b, a) for b, a in zip(before.inputs, after.inputs, strict=False) if b.type == a.type]
    same += [(b, a) for new, kept in pairs.items() for b, a in zip(kept.results, new.results, strict=False)]
    names = alike[after] = {a: old[b] for b, a in same if a in own and b in old}
    taken, numbers = {*names.values(), *filter(str.isdigit, old.values())}, itertools.count(len(old))
    for value, name in own.items():
        if value not in names:
            names[value] = name if name not in taken else next(n for n in map(str, numbers) if n not in taken)
            taken.add(names[value])
    for new, kept in pairs.items():
        if new.is_op("region"):
            _name_alike(kept.body, new.body, alike)


def _changed_regions(before: Graph, after: Graph, pairs: dict[Node, Node]) -> dict[Node, Node]:
    """Pair the regions that differ in their bodies alone, in order."""
    kept, waiting = set(pairs.values()), defaultdict[Hashable, list[Node]](list)
    for node in reversed(before.nodes):
        if node.is_op("region") and node not in kept:
            waiting[_frame(node)].append(node)
    rest = (n for n in after.nodes if n.is_op("region") and n not in pairs)
    return {node: waiting[_frame(node)].pop() for node in rest if waiting[_frame(node)]}


def _frame(region: Node) -> Hashable:
    attributes = tuple(sorted((k, str(v)) for k, v in region.attributes.items() if k != "body"))
    return attributes, tuple(str(r.type) for r in region.results)
