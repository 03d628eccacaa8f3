"""The worklist driver of simplifications: local rules, looked up by operation, applied until none fits."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fusec.errors import GraphError
from fusec.ir.graph import Graph, Node, Value, base, storage
from fusec.ir.ops import Trait
from fusec.ir.types import same_shape
from fusec.loops.strides import view_layout
from fusec.rewriting.effects import breaks_order, writes_by_storage
from fusec.rewriting.listener import RewriteListener

_ORIGIN = 12
"""Operations that the operands of a conditional simplification are followed over, to where their values are limited."""
_APPLICATIONS = 20
"""A rule does not end if it applies more often to a graph, for each of its operations, and more than _LEAST times."""
_LEAST = 1_000


@dataclass(frozen=True)
class Simplification:
    """A local rule in code: for a node, returns the value that may replace its result, or None."""

    name: str
    ops: tuple[str, ...]
    """The operations it applies to."""
    apply: Callable[[Graph, Node], Value | None]
    exact: bool
    """True where both sides are equal bit for bit (signs of NaN aside)."""
    conditional: bool = False
    """True where both sides are equal for the values that their operands are computed as, but not for any values."""


def simplifies(
    *ops: str, exact: bool = True, conditional: bool = False
) -> Callable[[Callable[[Graph, Node], Value | None]], Simplification]:
    """Declare a function to be the rule of that name for these operations."""

    def declare(function: Callable[[Graph, Node], Value | None]) -> Simplification:
        return Simplification(function.__name__.replace("_", "-"), ops, function, exact, conditional)

    return declare


def simplify_graph(graph: Graph, rules: Sequence[Simplification], listener: RewriteListener | None = None) -> bool:
    """Apply the rules until none applies; return whether any did. Node order is restored and dead nodes are erased."""
    return _Worklist(graph, rules, listener).run()


class _Worklist:
    def __init__(self, graph: Graph, rules: Sequence[Simplification], listener: RewriteListener | None) -> None:
        self.graph, self.listener = graph, listener
        self.rules: dict[str, list[Simplification]] = {}
        for rule in rules:
            for op in rule.ops:
                self.rules.setdefault(op, []).append(rule)
        self.applied, self.most = Counter[str](), max(_LEAST, _APPLICATIONS * len(graph))
        self.queue = deque(graph.nodes)
        self.waiting = set(self.queue)
        self.fresh = {p for v in graph.outputs for of in (base(v), storage(v)) if (p := of.producer) is not None}
        """The nodes that make the storage of graph outputs."""
        self.writes = writes_by_storage(graph)

    def run(self) -> bool:
        changed = False
        while self.queue:
            node = self.queue.popleft()
            self.waiting.discard(node)
            for rule in self.rules.get(node.op.name, ()):
                if node in self.graph and self.apply(rule, node):
                    changed = True
                    break
        if changed:
            self.graph.sort()
            self.graph.erase_dead()
        return changed

    def apply(self, rule: Simplification, node: Node) -> bool:
        if self.listener is not None and not self.listener.enabled(rule.name):
            return False
        size = len(self.graph)
        try:
            if self.applied[rule.name] >= self.most:
                raise GraphError(f"applied {self.most} times without an end", where=rule.name)
            value = rule.apply(self.graph, node)
        except Exception as reason:  # whatever a rule does, the model still compiles
            self.graph.erase_dead(self.graph.newest(len(self.graph) - size))
            if self.listener is None:
                raise
            self.listener.disable(rule.name, str(reason))
            return False
        if value is None:
            self.graph.erase_dead(self.graph.newest(len(self.graph) - size))
            return False
        added = self.graph.newest(len(self.graph) - size)
        if (
            not self.keeps_outputs_fresh(node, value)
            or breaks_order(self.graph, added, {node.result: value}, self.writes)
            or not self.allowed(rule, node, value, added)
        ):
            self.graph.erase_dead(added)
            return False
        self.commit(node, value, added)
        self.applied[rule.name] += 1
        return True

    def keeps_outputs_fresh(self, node: Node, value: Value) -> bool:
        """Return whether an output with its own storage keeps it: it must not become an alias of an input or output."""
        if node not in self.fresh or value.producer is None:
            return node not in self.fresh
        return value.producer not in self.fresh and storage(value).producer is not None

    def allowed(self, rule: Simplification, node: Node, value: Value, added: list[Node]) -> bool:
        if self.listener is None:
            return True
        if not self.listener.application(rule.name, node.sources, rule.name):
            return False
        if not self.listener.verifies:
            return True
        before, after = neighbourhood(node, value, added, rule.conditional)
        return self.listener.agrees(rule.name, before, after, rule.exact)

    def commit(self, node: Node, value: Value, added: list[Node]) -> None:
        for new in added:
            new.sources = new.sources or node.sources
        if node in self.fresh and value.producer is not None:
            self.fresh.add(value.producer)
        touched = [*node.result.users, *added]
        self.graph.replace_value(node.result, value)
        if value.tensor.strides != node.result.tensor.strides:
            propagate_layout(value)
        touched += [] if value.producer is None else [value.producer]
        gone = erase_unread(self.graph, [node])
        for read in dict.fromkeys(v for dead in gone for v in dead.operands):
            # Its operands lost a reader: their producers may be dead, and the last reader may absorb them.
            touched += [read.producer] if read.producer is not None else []
            touched += read.users if len(read.users) == 1 else []
        for other in touched:
            if other not in self.waiting:
                self.waiting.add(other)
                self.queue.append(other)


def propagate_layout(value: Value) -> None:
    """Recompute the layouts of everything computed from a value whose layout has changed."""
    for user in value.users:
        if not user.is_alias and not user.has(Trait.POINTWISE):
            continue
        own, (first, *_) = user.result.tensor, user.operands
        layout = view_layout(user, first.tensor) if user.is_alias else None
        whole = (v.tensor for v in user.operands if same_shape(v.shape, own.shape))
        if not user.is_alias and not all(t.is_contiguous for t in whole):
            continue
        moved = replace(own, strides=layout[0]) if layout else own.with_shape(own.shape)
        if moved.strides != own.strides:
            user.result.type = moved
            propagate_layout(user.result)


def erase_unread(graph: Graph, nodes: Iterable[Node]) -> list[Node]:
    """Erase the nodes that are unused, then those that only they read; return the erased ones."""
    gone, stack = [], list(nodes)
    while stack:
        node = stack.pop()
        if node in graph and graph.is_dead(node):
            graph.erase(node)
            gone.append(node)
            stack += [v.producer for v in node.operands if v.producer is not None]
    return gone


def neighbourhood(
    node: Node, value: Value, added: Sequence[Node], conditional: bool = False, depth: int = 5
) -> tuple[Graph, Graph]:
    """Return both sides of a simplification as graphs, over the values that both sides read.

    Of a conditional one, the operations that these values come from are in both graphs.
    """
    barrier = Trait.OPAQUE | Trait.WRITE | Trait.LOOKUP
    if conditional:
        depth, barrier = 8 * depth, Trait(0)
    # Inline existing views of the new nodes' operands.
    there = {v.producer: None for n in added for v in n.operands if v.producer is not None and v.producer.is_alias}
    added = [*there, *(n for n in added if n not in there)]
    new = set(added)
    edge = {v: None for n in added for v in n.operands if v.producer not in new}
    if value.producer not in new:
        edge[value] = None
    inner: dict[Node, int] = {}

    def collect(at: Node, left: int) -> None:
        if inner.get(at, -1) >= left:
            return
        inner[at] = left
        for v in at.operands:
            if v.producer is None or (v in edge and not v.producer.is_op("constant")):
                continue
            if v.producer.has(barrier) or (left == 0 and v.producer.operands):
                continue
            collect(v.producer, left - 1)

    collect(node, depth)
    for v in edge:
        if v.producer is not None and conditional:
            collect(v.producer, _ORIGIN)
        elif v.producer is not None and v.producer.is_op("constant", "size"):
            inner[v.producer] = 0
    reads = {v: None for n in inner for v in n.operands if v.producer not in inner}
    leaves = list({v: None for v in [*edge, *reads] if v.producer not in inner})
    before = cut(leaves, list(inner), [node.result])
    shared = [n for n in inner if conditional or any(v.producer is n for v in edge)]
    after = cut(leaves, [*shared, *added], [value])
    return before, after


def cut(inputs: Sequence[Value], nodes: Sequence[Node], outputs: Sequence[Value], name: str = "graph") -> Graph:
    """A new graph of copies of these nodes, between these inputs and outputs."""
    graph = Graph(name)
    to = {v: graph.add_input(v.type, v.name) for v in inputs}
    wanted, placed = set(nodes), set()
    stack = [v.producer for v in reversed(outputs) if v.producer is not None]
    while stack:
        node = stack[-1]
        if node in placed or node not in wanted or all(r in to for r in node.results):
            stack.pop()
            continue
        missing = [
            v.producer for v in node.operands if v not in to and v.producer in wanted and v.producer not in placed
        ]
        if missing:
            stack += [n for n in missing if n is not None]
            continue
        stack.pop()
        placed.add(node)
        copy = graph.add_node(
            node.op.name,
            [to[v] for v in node.operands],
            dict(node.attributes),
            types=[r.type for r in node.results],
            sources=node.sources,
        )
        for old, new in zip(node.results, copy.results, strict=True):
            new.name = old.name
            to.setdefault(old, new)
    graph.set_outputs([to[v] for v in outputs])
    return graph
