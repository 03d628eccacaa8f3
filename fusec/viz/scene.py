"""The data of the page: for each state of the graph its groups with their layouts, and the nodes, each kind once."""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusec.debug.diff import GraphDiff, diff_graphs, diff_of_pairs
from fusec.debug.subject import sources_of
from fusec.history import History
from fusec.ir.graph import Graph, Node, Source, Value
from fusec.ir.ops import OPS, Trait
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
    histories: list[dict[str, Any]] = field(default_factory=list)
    """Passes application by application: all their nodes in one state, each with the steps that it is there."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """The description of a node; shared by the states in which it is the same."""
    _record_numbers: dict[str, int] = field(default_factory=dict)
    _sources: dict[Source, int] = field(default_factory=dict)
    """Numbers of sources, which records refer to."""
    _described: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """For each key what its last description was made from, and its number."""
    _layouts: dict[Any, Layout] = field(default_factory=dict)
    """Layouts by the boxes and edges of a group, as most layers are equal."""
    _bodies: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """The groups of a region by what they are made from, as most regions stay as they are."""
    _keys: dict[Node, int] = field(default_factory=dict)
    _next_key: int = 0
    _stands_for: dict[Value, Value] = field(default_factory=dict)
    _before: Graph | None = None
    _last: Graph | None = None
    _diff: GraphDiff = field(default_factory=GraphDiff)
    """The difference of the last two states."""

    def add_state(
        self,
        name: str,
        graph: Graph,
        facts: Facts = lambda node: {},
        history: History | None = None,
        **about: Any,
    ) -> None:
        """Append the graph after a pass, and after each of its applications; nodes that go on keep their keys."""
        state = {"name": name, "added": [], "removed": [], **about}
        if self._last is None:
            self._give_keys(graph, {})
        else:
            diff = self._diff = _difference(self._last, graph, history)
            state["removed"] = [self._keys[n] for n in diff.removed]
            self._give_keys(graph, diff.pairs)
            state["added"] = [self._keys[n] for n in diff.added]
            state["rewired"] = [self._keys[n] for n in diff.rewired]
            heirs = descendants(diff.removed, diff.added)
            state["became"] = {self._keys[old]: [self._keys[n] for n in new] for old, new in heirs.items()}
        self._before, self._last = self._last, graph
        self.states.append(self._drawn(state, graph, facts))
        if history is not None and self._before is not None:
            self._add_history(history, self._before, graph)

    def _add_history(self, history: History, before: Graph, after: Graph) -> None:
        """Append the graph after each application of a pass; nodes have the keys of its two sides."""
        nodes = history.graph.nodes
        sides = ((before.nodes, history.before), (after.nodes, history.after))
        self._give_keys(history.graph, {n: s[i] for s, at in sides for n, i in zip(nodes, at, strict=True) if i >= 0})
        keys, always = [self._keys[node] for node in nodes], (0, len(history.numbers) + 1)
        lives = {key: life for key, life in zip(keys, history.lives, strict=True) if life != always}
        operands: dict[int, list[Any]] = {}
        also: list[Edge] = []
        for i, until, references in history.operands:
            refs = [[keys[n], index] if n >= 0 else [f"i{index}", index] for n, index in references]
            operands.setdefault(keys[i], []).append([until, refs])
            also += [(nodes[n].results[index], nodes[i]) for n, index in references if n >= 0]
        state = {"lives": lives, "operands": operands}
        self.histories.append(self._drawn(state, history.graph, lambda node: {}, also))

    def add_union(self, name: str, facts: Facts = lambda node: {}, **about: Any) -> None:
        """Append the union of the last two states, in which the nodes of either have the keys that they have there."""
        diff, graph, kept = self._diff, self._last, {old: new for new, old in self._diff.pairs.items()}
        assert graph is not None and self._before is not None
        same = {a: b for old, new in kept.items() for a, b in zip(old.results, new.results, strict=True)}
        whole, copies = union(graph, diff.removed, same | {old: new for new, old in diff.inputs.items()})
        self._keys |= {copy: self._keys[node] for node, copy in copies.items()}
        lost: list[Edge] = []
        for value in (v for old in diff.removed for v in old.results):
            now = copies[value.producer].results[value.index] if value.producer else value
            lost += [(now, copies[kept[user]]) for user in value.users if user in kept]
            lost += [(now, None)] if value in self._before.outputs else []
        origins = {copy: node for node, copy in copies.items()}
        changed = {"added": diff.added, "removed": diff.removed, "rewired": diff.rewired}
        state = {"name": name, **{kind: [self._keys[n] for n in nodes] for kind, nodes in changed.items()}, **about}
        self.states.append(self._drawn(state, whole, lambda node: facts(origins.get(node, node)), lost))

    def _drawn(self, state: dict[str, Any], graph: Graph, facts: Facts, also: Sequence[Edge] = ()) -> dict[str, Any]:
        """Return a state with the groups of a graph, their layouts, and its nodes, which have keys."""
        state |= {"nodes": {}, "inputs": {}, "groups": {}, "bodies": {}}
        tree = build_tree(graph, also=also)
        state["root"] = self._add_group(state, tree.root, tree, "root")
        state["order"] = [self._keys[n] for n in graph.nodes]
        self._add_nodes(state, graph, facts)
        return state

    def key(self, node: Node) -> int:
        """The number of a node of the last state."""
        return self._keys[node]

    def to_json(self) -> dict[str, Any]:
        """Return the scene as JSON data."""
        sources = [[s.module, s.file, s.line, s.op, s.text] for s in self._sources]
        meanings = {name: OPS[name].meaning for name in {record["op"] for record in self.records}}
        return {"states": self.states, "records": self.records, "sources": sources, "meanings": meanings}

    def _give_keys(self, graph: Graph, pairs: Mapping[Node, Node]) -> None:
        for node in graph.nodes:
            self._give_key(node, pairs)

    def _give_key(self, node: Node, pairs: Mapping[Node, Node]) -> None:
        old = pairs.get(node)
        if old is None:
            self._keys[node] = self._next_key
            self._next_key += 1
        else:
            self._keys[node] = self._keys[old]
        if node.has(Trait.REGION):
            known = {} if old is None else dict(zip(*map(_computing, (node.body, old.body)), strict=False))
            known = {inner: before for inner, before in known.items() if before in self._keys}
            for inner in node.body.nodes:
                if inner in known or inner not in self._keys:  # graphs share the bodies of equal regions
                    self._give_key(inner, known)

    def _add_nodes(self, state: dict[str, Any], graph: Graph, facts: Facts, prefix: str = "i") -> None:
        for value in graph.inputs:
            state["inputs"][f"{prefix}{value.index}"] = [self._name(value), _type_text(value.type)]
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
        """Return the number of a node's description; that of an earlier state where it is the same."""
        found, known = facts(node), self._described.get(self._keys[node])
        parts = (node.op, node.attributes, [r.type for r in node.results], node.sources)
        if not found and known is not None and known[0] == parts:
            return known[1]
        number = self._new_record(node, found)
        if not found:
            self._described[self._keys[node]] = parts, number
        return number

    def _new_record(self, node: Node, facts: dict[str, Any]) -> int:
        attributes = {k: labels.attribute_text(v) for k, v in node.attributes.items() if not isinstance(v, Graph)}
        record = {
            "op": node.op.name,
            "label": labels.label(node),
            "category": labels.category(node),
            "types": [_type_text(r.type) for r in node.results],
            "attributes": attributes,
            "sources": [self._sources.setdefault(s, len(self._sources)) for s in sources_of(node)],
            **facts,
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
        shape = (tuple((box["w"], box["h"]) for box in boxes), tuple(edges))
        if shape not in self._layouts:
            self._layouts[shape] = lay_out(*shape)
        layout = self._layouts[shape]
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
            box["g"] = f"r{key}"
            state["groups"] |= self._region(node, key, text)
        kinds = ", ".join(labels.type_text(r) for r in node.results)
        return _sized(box, labels.shorten(kinds), NODE_HEIGHT)

    def _region(self, node: Node, key: int, text: str) -> dict[str, Any]:
        """Return the groups of a region."""
        made_from = (key, node.body, text, *map(self._name, node.operands))
        if made_from not in self._bodies:
            body = build_tree(node.body, path=f"r{key}", modules=False)
            body.root.name = text
            inside: dict[str, Any] = {"groups": {}}
            self._add_group(inside, body.root, body, "region", key, f"r{key}i")
            self._bodies[made_from] = inside["groups"]
        return self._bodies[made_from]


_type_text = functools.cache(str)


@dataclass(frozen=True, eq=False)
class _Entry:
    """A box at the border for values from outside."""

    values: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class _Exit:
    """A box at the border for values that are read outside."""

    values: tuple[Value, ...]


def _difference(before: Graph, after: Graph, history: History | None) -> GraphDiff:
    if history is None:
        return diff_graphs(before, after)
    old, new, both = before.nodes, after.nodes, zip(history.before, history.after, strict=True)
    return diff_of_pairs(before, after, {new[j]: old[i] for i, j in both if i >= 0 and j >= 0})


def _computing(body: Graph) -> list[Node]:
    """Return the nodes but constants, of which text has equal ones once."""
    return [node for node in body.nodes if not node.is_op("constant")]


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
