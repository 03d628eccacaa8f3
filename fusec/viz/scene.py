"""The data of the page: for each state of the graph its groups with their layouts, and the nodes, each kind once."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusec.debug.diff import GraphDiff, diff_graphs
from fusec.debug.subject import sources_of
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.union import union
from fusec.viz import labels
from fusec.viz.descent import descendants
from fusec.viz.layout import Layout, lay_out
from fusec.viz.tree import Edge, Group, Tree, build_tree

NODE_HEIGHT, GROUP_HEIGHT, PILL_HEIGHT = 38.0, 42.0, 20.0

MANY_VALUES = 8
"""More values than this at one border share a box."""

Facts = Callable[[Node], dict[str, Any]]
"""Further data of a node for the page: its kernel, its remarks."""


@dataclass
class Scene:
    """States of one graph through the passes, ready for the page."""

    states: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    """The description of a node; shared by the states in which it is the same."""
    _record_numbers: dict[str, int] = field(default_factory=dict)
    _keys: dict[Node, int] = field(default_factory=dict)
    _next_key: int = 0
    _stands_for: dict[Value, Value] = field(default_factory=dict)
    _last: Graph | None = None
    _diff: GraphDiff = field(default_factory=GraphDiff)
    """The difference of the last two states."""
    _outputs: frozenset[Value] = frozenset()
    """The results of the last state but one."""

    def add_state(self, name: str, graph: Graph, facts: Facts = lambda node: {}, **about: Any) -> None:
        """Append the graph after a pass; nodes that it shares with the last state keep their keys."""
        state = {"name": name, "added": [], "removed": [], **about}
        pairs: dict[Node, Node] = {}
        if self._last is not None:
            diff = self._diff = diff_graphs(self._last, graph)
            pairs, self._outputs = diff.pairs, frozenset(self._last.outputs)
            state["removed"] = [self._keys[n] for n in diff.removed]
        for node in graph.nodes:
            self._give_key(node, pairs)
        if self._last is not None:
            state["added"] = [self._keys[n] for n in diff.added]
            state["rewired"] = [self._keys[n] for n in diff.rewired]
            heirs = descendants(diff.removed, diff.added)
            state["became"] = {self._keys[old]: [self._keys[n] for n in new] for old, new in heirs.items()}
        self._last = graph
        self._draw(state, graph, facts)

    def add_union(self, name: str, facts: Facts = lambda node: {}, **about: Any) -> None:
        """Append the union of the last two states, in which the nodes of either have the keys that they have there."""
        diff, graph, kept = self._diff, self._last, {old: new for new, old in self._diff.pairs.items()}
        assert graph is not None
        same = {a: b for old, new in kept.items() for a, b in zip(old.results, new.results, strict=True)}
        whole, copies = union(graph, diff.removed, same | {old: new for new, old in diff.inputs.items()})
        self._keys |= {copy: self._keys[node] for node, copy in copies.items()}
        lost: list[Edge] = []
        for value in (v for old in diff.removed for v in old.results):
            now = copies[value.producer].results[value.index] if value.producer else value
            lost += [(now, copies[kept[user]]) for user in value.users if user in kept]
            lost += [(now, None)] if value in self._outputs else []
        origins = {copy: node for node, copy in copies.items()}
        changed = {"added": diff.added, "removed": diff.removed, "rewired": diff.rewired}
        state = {"name": name, **{kind: [self._keys[n] for n in nodes] for kind, nodes in changed.items()}, **about}
        self._draw(state, whole, lambda node: facts(origins.get(node, node)), lost)

    def _draw(self, state: dict[str, Any], graph: Graph, facts: Facts, also: Sequence[Edge] = ()) -> None:
        """Append a state with the groups of a graph, their layouts, and its nodes, which have keys."""
        state |= {"nodes": {}, "inputs": {}, "groups": {}, "bodies": {}}
        tree = build_tree(graph, also=also)
        state["root"] = self._add_group(state, tree.root, tree, "root")
        state["order"] = [self._keys[n] for n in graph.nodes]
        self._add_nodes(state, graph, facts)
        self.states.append(state)

    def key(self, node: Node) -> int:
        """The number of a node of the last state."""
        return self._keys[node]

    def to_json(self) -> dict[str, Any]:
        """Return the scene as JSON data."""
        return {"states": self.states, "records": self.records}

    def _give_key(self, node: Node, pairs: dict[Node, Node]) -> None:
        old = pairs.get(node)
        if old is not None:
            self._keys[node] = self._keys[old]
            if node.has(Trait.REGION):
                for inner, before in zip(node.body.nodes, old.body.nodes, strict=False):
                    self._give_key(inner, {inner: before} if before in self._keys else {})
            return
        self._keys[node] = self._next_key
        self._next_key += 1
        if node.has(Trait.REGION):
            for inner in node.body.nodes:
                self._give_key(inner, {})

    def _add_nodes(self, state: dict[str, Any], graph: Graph, facts: Facts, prefix: str = "i") -> None:
        for value in graph.inputs:
            state["inputs"][f"{prefix}{value.index}"] = [self._name(value), str(value.type)]
        for node in graph.nodes:
            key = self._keys[node]
            operands = [self._reference(v, prefix) for v in node.operands]
            state["nodes"][key] = [self._record(node, facts), operands]
            if node.has(Trait.REGION):
                state["bodies"][key] = [self._keys[n] for n in node.body.nodes]
                self._add_nodes(state, node.body, facts, f"r{key}i")

    def _reference(self, value: Value, prefix: str) -> list[Any]:
        return [self._keys[value.producer] if value.producer else f"{prefix}{value.index}", value.index]

    def _record(self, node: Node, facts: Facts) -> int:
        attributes = {k: labels.attribute_text(v) for k, v in node.attributes.items() if not isinstance(v, Graph)}
        record = {
            "op": node.op.name,
            "meaning": node.op.meaning,
            "label": labels.label(node),
            "category": labels.category(node),
            "types": [str(r.type) for r in node.results],
            "attributes": attributes,
            "sources": [[s.module, s.file, s.line, s.op, s.text] for s in sources_of(node)],
            **facts(node),
        }
        text = json.dumps(record, sort_keys=True, default=str)
        if text not in self._record_numbers:
            self._record_numbers[text] = len(self.records)
            self.records.append(record)
        return self._record_numbers[text]

    def _add_group(
        self, state: dict[str, Any], group: Group, tree: Tree, kind: str, key: int | None = None, prefix: str = "i"
    ) -> str:
        ends: list[Any] = [*_merged(group.inputs, _Entry), *group.members, *_merged(group.outputs, _Exit)]
        number: dict[Any, int] = {}
        exits: dict[Value, int] = {}
        for i, end in enumerate(ends):
            places = exits if isinstance(end, _Exit) else number
            places.update(dict.fromkeys(end.values if isinstance(end, _Exit | _Entry) else (end,), i))
        boxes = [self._box(state, end, tree, prefix) for end in ends]
        ways = ((number[a], exits[b] if isinstance(b, Value) else number[b]) for a, b in group.edges)
        edges = list(dict.fromkeys(ways))
        layout = lay_out([(box["w"], box["h"]) for box in boxes], edges)
        identity = f"r{key}" if key is not None else f"m{group.path}"
        count = len(group.members) if key is not None else group.nodes()
        state["groups"][identity] = {
            "name": group.name, "kind": kind, "count": count, "key": key, "boxes": boxes, **_plain(layout, len(boxes)),
        }  # fmt: skip
        return identity

    def _box(self, state: dict[str, Any], end: Any, tree: Tree, prefix: str) -> dict[str, Any]:
        if isinstance(end, Group):
            identity = self._add_group(state, end, tree, "layers" if end.layers else "module", prefix=prefix)
            box = {"t": "g", "g": identity, "l": labels.shorten(end.name)}
            size = f"{end.nodes()} nodes" + (f" in {end.layers} equal layers" if end.layers else "")
            return _sized(box, size, GROUP_HEIGHT)
        if isinstance(end, Node):
            return self._node_box(state, end, tree)
        kind, values = "o" if isinstance(end, _Exit) else "i", end.values
        names = f"{len(values)} {'results' if kind == 'o' else 'inputs'}" if len(values) > 1 else self._name(values[0])
        return _sized({"t": kind, "v": self._reference(values[0], prefix), "l": names}, "", PILL_HEIGHT)

    def _name(self, value: Value) -> str:
        """Return the name of a value; an unnamed input of a body has the name of the region's operand."""
        while value.producer is None and value in self._stands_for and re.fullmatch(r"(arg)?\d*", value.name):
            value = self._stands_for[value]
        return labels.value_name(value)

    def _node_box(self, state: dict[str, Any], node: Node, tree: Tree) -> dict[str, Any]:
        key, text = self._keys[node], labels.label(node)
        hint = tree.hints.get(node, "")
        box: dict[str, Any] = {"t": "n", "k": key, "l": labels.shorten(f"{hint}: {text}" if hint else text)}
        if node.has(Trait.REGION):
            self._stands_for.update(zip(node.body.inputs, node.operands, strict=True))
            body = build_tree(node.body, path=f"r{key}", modules=False)
            body.root.name = text
            box["g"] = self._add_group(state, body.root, body, "region", key, f"r{key}i")
        kinds = ", ".join(labels.type_text(r) for r in node.results)
        return _sized(box, labels.shorten(kinds), NODE_HEIGHT)


@dataclass(frozen=True, eq=False)
class _Entry:
    """A box at the border for values from outside."""

    values: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class _Exit:
    """A box at the border for values that are read outside."""

    values: tuple[Value, ...]


def _merged(values: Sequence[Value], kind: type[_Entry] | type[_Exit]) -> list[_Entry | _Exit]:
    """A box for each value, or one for all where there are many: the caches of all layers."""
    return [kind(tuple(values))] if len(values) > MANY_VALUES else [kind((value,)) for value in values]


def _sized(box: dict[str, Any], below: str, height: float) -> dict[str, Any]:
    """Add the second line and the size; widths are estimates for the font of the page."""
    room = 40.0 if "g" in box else 26.0
    least = 176.0 if height == GROUP_HEIGHT else 92.0
    width = max(len(box["l"]) * 7.5 + room, len(below) * 6.5 + room, least)
    if height == PILL_HEIGHT:
        width = len(box["l"]) * 6.4 + 20
    return {**box, "s": below, "w": round(width), "h": height}


def _plain(layout: Layout, boxes: int) -> dict[str, Any]:
    """Return a layout as numbers; the page turns rows into coordinates when groups open."""
    return {
        "row": [s.row for s in layout.slots],
        "x": [round(s.x) for s in layout.slots],
        "heights": list(layout.heights),
        "w": round(layout.width),
        "edges": [[e.start, list(e.bends), e.stop, int(e.far)] for e in layout.edges],
        "n": boxes,
    }
