"""A graph as a tree of boxes: modules of the model, regions, nodes; and in each group the edges between its boxes."""

import functools
import re
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import takewhile
from typing import TypeAlias

from fusec.debug.subject import sources_of
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.viz.labels import is_number, label

_INDEXED = re.compile(r"(?P<stem>.*\D)?(?P<index>\d+)")
_LEAST_FOLDED = 3
"""Fewer equal layers than this are not folded."""
MANY_INPUTS = 24
"""Up to here the body of a region shows every input."""
Edge: TypeAlias = tuple[Value, Node | None]
"""A value and a node that reads it; None for a result of the graph."""


@dataclass(eq=False)
class Group:
    """A module of the model, the body of a region, or the whole graph."""

    path: str
    """The module path: ``layers.0.self_attn``; unique among the groups of one graph."""
    name: str
    parent: "Group | None" = None
    members: "list[Group | Node]" = field(default_factory=list)
    """In the order of the graph."""
    inputs: list[Value] = field(default_factory=list)
    """Values from outside that are drawn at its border."""
    outputs: list[Value] = field(default_factory=list)
    """Values of its own that are read outside."""
    edges: "dict[tuple[Group | Node | Value, Group | Node | Value], None]" = field(default_factory=dict)
    """Between members; a border input or output is itself a member."""

    layers: int = 0
    """The number of equal layers that it is made up of; 0 for a module."""

    def nodes(self) -> int:
        """Number of nodes in it, at any depth of modules."""
        return sum(m.nodes() if isinstance(m, Group) else 1 for m in self.members)


@dataclass
class Tree:
    """The groups of one graph."""

    root: Group
    home: dict[Node, Group]
    """The group that shows a node."""
    hints: dict[Node, str]
    """Module name of a node that is alone in its module."""


def build_tree(graph: Graph, path: str = "", modules: bool = True, also: Sequence[Edge] = ()) -> Tree:
    """Group the nodes by module path (or keep them flat), and find the edges inside each group.

    Args:
        graph: the graph.
        path: the prefix of the paths of groups.
        modules: whether modules are groups.
        also: further edges to draw.
    """
    paths = _module_paths(graph) if modules else {}
    root = Group(path, graph.name)
    by_path: dict[tuple[str, ...], Group] = {(): root}
    outputs = set(graph.outputs)
    for node in graph.nodes:
        if node.is_op("constant", "size") and not outputs.intersection(node.results):
            continue
        _group_at(by_path, paths.get(node, ())).members.append(node)
    while len(root.members) == 1 and isinstance(root.members[0], Group):
        root.members = root.members[0].members
    for member in root.members:
        if isinstance(member, Group):
            member.parent = root
    tree = Tree(root, {}, {})
    _compress(root, tree)
    _fold(root)
    few = not modules and len(graph.inputs) <= MANY_INPUTS
    chains = _connect(graph, tree, set(graph.inputs) if few else _shown_inputs(graph))
    for value, reader in also:
        if value.producer in tree.home:
            _thread(tree, chains, value, reader)
    return tree


@functools.cache
def segments(module: str) -> tuple[str, ...]:
    """The levels of a module path; an index belongs to its list: ``layers.0.mlp`` has two, ``layers.0`` and ``mlp``."""
    out: list[str] = []
    for part in module.split(".") if module else []:
        if part.isdigit() and out:
            out[-1] += "." + part
        else:
            out.append(part)
    return tuple(out)


def _module_paths(graph: Graph) -> dict[Node, tuple[str, ...]]:
    paths: dict[Node, tuple[str, ...]] = {}
    for node in reversed(graph.nodes):
        if found := _modules_of(node):
            paths[node] = _home(found)
        elif not node.sources:
            # A node that a pass added without a source belongs where it is first read.
            paths[node] = next((paths[u] for u in node.users if u in paths), ())
    return paths


def _modules_of(node: Node) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return the modules of each source of a node's operations; equal operations of several modules were merged."""
    inside = (n for n in node.body.nodes if not n.has(Trait.SOURCE)) if node.has(Trait.REGION) else ()
    operations = dict.fromkeys(n.sources for n in inside) or {sources_of(node): None}
    modules = (tuple(segments(s.module) for s in sources if s.module) for sources in operations)
    return tuple(filter(None, modules))


@functools.lru_cache(1 << 16)
def _home(operations: Sequence[Sequence[tuple[str, ...]]]) -> tuple[str, ...]:
    """Return the innermost module that more than half of a node's operations are in.

    A kernel may reach from one layer into the next, or compute a rotation again in every layer.
    """
    shares: defaultdict[tuple[str, ...], Fraction] = defaultdict(Fraction)
    for modules in operations:
        for module in modules:
            shares[module] += Fraction(1, len(modules))
    home: tuple[str, ...] = ()
    while True:
        inner: defaultdict[tuple[str, ...], Fraction] = defaultdict(Fraction)
        for module, share in shares.items():
            if module[: len(home)] == home and module != home:
                inner[module[: len(home) + 1]] += share
        best = max(inner, key=inner.__getitem__, default=home)
        if 2 * inner[best] <= len(operations):
            return home
        home = best


def _group_at(by_path: dict[tuple[str, ...], Group], path: tuple[str, ...]) -> Group:
    if path not in by_path:
        parent = _group_at(by_path, path[:-1])
        prefix = by_path[()].path
        by_path[path] = Group(".".join((prefix, *path) if prefix else path), path[-1], parent)
        parent.members.append(by_path[path])
    return by_path[path]


def _compress(group: Group, tree: Tree) -> None:
    """Merge a group with its only subgroup, and move a single node into the parent."""
    for i, member in enumerate(group.members):
        name = ""
        while isinstance(member, Group) and len(member.members) == 1:
            name = f"{name}.{member.name}" if name else member.name
            member = member.members[0]
        group.members[i] = member
        if isinstance(member, Group):
            member.parent = group
            member.name = f"{name}.{member.name}" if name else member.name
            _compress(member, tree)
        else:
            tree.home[member] = group
            if name:
                tree.hints[member] = name


def _fold(group: Group) -> None:
    """Put runs of equal neighbouring layers into groups of their own: ``layers.1–30``."""
    for member in group.members:
        if isinstance(member, Group):
            _fold(member)
    members: list[Group | Node] = []
    for run in _runs(group.members):
        first, last = run[0], run[-1]
        if len(run) < _LEAST_FOLDED or not isinstance(first, Group) or not isinstance(last, Group):
            members += run
            continue
        folded = Group(f"{first.path}–{last.path}", f"{first.name}–{_index(last.name)}", group, layers=len(run))
        for layer in run:
            assert isinstance(layer, Group)
            layer.parent = folded
            folded.members.append(layer)
        members.append(folded)
    group.members = members


def _runs(members: "list[Group | Node]") -> "list[list[Group | Node]]":
    """Split members into the longest runs of layers with successive indices and equal contents."""
    runs: list[list[Group | Node]] = []
    keys: list[Hashable] = []
    for member in members:
        key = _contents(member) if isinstance(member, Group) and _index(member.name) is not None else None
        before = runs[-1][-1] if runs else None
        follows = isinstance(member, Group) and isinstance(before, Group) and _follows(before.name, member.name)
        if follows and key is not None and keys[-1] == key:
            runs[-1].append(member)
        else:
            runs.append([member])
        keys.append(key)
    return runs


def _index(name: str) -> int | None:
    found = _INDEXED.fullmatch(name)
    return int(found["index"]) if found else None


def _follows(before: str, after: str) -> bool:
    first, second = _INDEXED.fullmatch(before), _INDEXED.fullmatch(after)
    if first is None or second is None:
        return False
    return first["stem"] == second["stem"] and int(second["index"]) == int(first["index"]) + 1


def _contents(member: "Group | Node") -> Hashable:
    """Return a key of the operations of a member, in order."""
    if isinstance(member, Group):
        return tuple((m.name if isinstance(m, Group) else "", _contents(m)) for m in member.members)
    return member.op.name, label(member), tuple(str(r.type) for r in member.results)


def _connect(graph: Graph, tree: Tree, shown: set[Value]) -> dict[Group, tuple[Group, ...]]:
    """Route all edges; return the groups around each group, as far as they were needed."""
    chains: dict[Group, tuple[Group, ...]] = {}
    for value in graph.inputs:
        if value in shown:
            tree.root.inputs.append(value)
    for node in graph.nodes:
        if node not in tree.home:
            continue
        for value in node.operands:
            if is_number(value) or (value.producer is None and value not in shown):
                continue
            _thread(tree, chains, value, node)
    for value in graph.outputs:
        if value.producer in tree.home or value in shown:
            _thread(tree, chains, value, None)
    return chains


def _shown_inputs(graph: Graph) -> set[Value]:
    """Inputs that get a box: a weight does not, as its readers have another operand to hang from."""
    return {
        v for v in graph.inputs
        if not v.users or any(all(o is v or o.producer is None or is_number(o) for o in u.operands) for u in v.users)
    }  # fmt: skip


def _chain(chains: dict[Group, tuple[Group, ...]], group: Group) -> tuple[Group, ...]:
    if group not in chains:
        chains[group] = (*(_chain(chains, group.parent) if group.parent else ()), group)
    return chains[group]


def _thread(tree: Tree, chains: dict[Group, tuple[Group, ...]], value: Value, reader: Node | None) -> None:
    """Route a value from its producer, out of its groups and into those of its reader."""
    start, producer = tree.root, value.producer
    if producer is not None:
        start = tree.home[producer]
    up = _chain(chains, start)
    down = _chain(chains, tree.home[reader]) if reader is not None else (tree.root,)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(up, down, strict=False)))
    end: Group | Node | Value = value if producer is None else producer
    for group in reversed(up[shared:]):
        if value not in group.outputs:
            group.outputs.append(value)
        group.edges[end, value] = None
        end = group
    for group, inner in zip(down[shared - 1 :], (*down[shared:], reader or value), strict=True):
        if group is not down[shared - 1]:
            if value not in group.inputs:
                group.inputs.append(value)
            end = value
        if end is not inner:
            group.edges[end, inner] = None
    if reader is None and value not in tree.root.outputs:
        tree.root.outputs.append(value)
