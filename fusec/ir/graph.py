"""Graph, Node and Value: the IR itself, and the only methods that change it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, ClassVar

from fusec.errors import GraphError
from fusec.ir.ops import OPS, Op, Trait
from fusec.ir.types import DType, ScalarType, Size, TensorType, Type


@dataclass(frozen=True)
class Source:
    """Where in the model a node comes from."""

    file: str = ""
    line: int = 0
    module: str = ""
    """Path of the module in the model: ``layers.0.self_attn.o_proj``."""
    op: str = ""
    """The operation the model called: ``aten.linear.default``."""
    text: str = ""
    """The source line itself."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else ""
        return ", ".join(part for part in (self.module, place) if part)


class Value:
    """A graph input or one result of a node. Identity is equality."""

    __slots__ = ("frozen", "index", "name", "producer", "type", "users")

    def __init__(self, type: Type, producer: "Node | None", index: int, name: str = "", frozen: bool = False) -> None:
        self.type = type
        self.producer = producer
        """The node that computes it; None for a graph input."""
        self.index = index
        """Position among the results of the producer, or among the graph inputs."""
        self.name = name
        """A hint for the printer."""
        self.frozen = frozen
        """Of an input: whether it is a weight, and what follows from weights alone may be kept until one changes."""
        self.users: dict[Node, None] = {}
        """The nodes that read it, in the order they came (an ordered set)."""

    @property
    def tensor(self) -> TensorType:
        """Its type, which must be a tensor's."""
        if not isinstance(self.type, TensorType):
            raise GraphError(f"a tensor is expected, not {self.type}", where=repr(self))
        return self.type

    @property
    def shape(self) -> tuple[Size, ...]:
        """Shape of the tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> DType:
        """Element type of the tensor."""
        return self.tensor.dtype

    def __repr__(self) -> str:
        origin = self.producer.op.name if self.producer else "input"
        return f"<Value {self.name or self.index}: {self.type} of {origin}>"


class Node:
    """One operation applied to values. Identity is equality."""

    __slots__ = ("attributes", "op", "operands", "results", "sources", "writes")

    def __init__(
        self,
        op: Op,
        operands: Sequence[Value],
        attributes: dict[str, Any],
        types: Sequence[Type],
        sources: tuple[Source, ...],
    ) -> None:
        self.op = op
        self.operands = tuple(operands)
        self.attributes = attributes
        """Frozen values by name; a region has its ``body`` here."""
        self.results = tuple(Value(type, self, i) for i, type in enumerate(types))
        self.sources = sources
        self.writes = _writes(op, attributes)
        """Positions of the operands whose storage it changes; of a region, those that its body writes to."""

    @property
    def result(self) -> Value:
        """Its only result."""
        if len(self.results) != 1:
            raise GraphError(f"{self.op.name} has {len(self.results)} results, not one")
        return self.results[0]

    @property
    def users(self) -> list["Node"]:
        """The nodes that read any of its results, each once."""
        return list(dict.fromkeys(user for r in self.results for user in r.users))

    @property
    def is_alias(self) -> bool:
        """Whether its result is its operand's storage looked at in another way: a view, but no ``concat``."""
        return self.op.has(Trait.VIEW) and self.op.name != "concat"

    @property
    def viewed(self) -> Value | None:
        """The operand whose storage its results have: of a view, be it one that ATen makes."""
        if self.op.has(Trait.OPAQUE):
            return self.operands[self.attributes["views"]] if "views" in self.attributes else None
        return self.operands[0] if self.is_alias else None

    @property
    def body(self) -> "Graph":
        """The body of a region."""
        return self.attributes["body"]

    def has(self, trait: Trait) -> bool:
        """Whether its operation has the trait."""
        return self.op.has(trait)

    def is_op(self, *names: str) -> bool:
        """Whether it applies one of these operations."""
        return self.op.name in names

    @property
    def written(self) -> tuple[Value, ...]:
        """The operands whose storage it changes."""
        return tuple([self.operands[i] for i in self.writes])

    @property
    def has_effect(self) -> bool:
        """Whether it does something besides computing its results."""
        return self.has(Trait.ORDERED) or bool(self.writes)

    def __repr__(self) -> str:
        return f"<Node {self.op.name}>"


class Graph:
    """A list of nodes in an order that respects data flow; inputs and outputs are values.

    Only the methods below change a graph. New nodes are appended at the end; whoever adds nodes that earlier
    ones read calls ``sort`` when the graph is whole again.
    """

    printer: ClassVar[Callable[["Graph"], str]]
    """Returns the text of a graph; set by ``fusec.ir.printer``, which depends on this module."""

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.output_types: list[Type] = []
        """What the caller is promised for each output, strides included."""
        self.updated_outputs: frozenset[int] = frozenset()
        """Positions of outputs that are an input, or a view of one, after a write: they share its storage. Others have
        storage of their own, whatever passes find them to equal."""
        self._nodes: dict[Node, None] = {}

    @property
    def nodes(self) -> list[Node]:
        """The nodes in order (a copy, safe to iterate while the graph changes)."""
        return list(self._nodes)

    def newest(self, count: int) -> list[Node]:
        """The nodes appended last, in order."""
        return list(islice(reversed(self._nodes), count))[::-1]

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def add_input(self, type: Type, name: str = "", frozen: bool = False) -> Value:
        """Append an input."""
        value = Value(type, None, len(self.inputs), name or f"arg{len(self.inputs)}", frozen)
        self.inputs.append(value)
        return value

    def add_node(
        self,
        op: str,
        operands: Sequence[Value] = (),
        attributes: dict[str, Any] | None = None,
        *,
        types: Sequence[Type] | None = None,
        sources: tuple[Source, ...] = (),
    ) -> Node:
        """Append a node; its result types are inferred unless given.

        Raises:
            GraphError: where the operands do not fit the operation.
        """
        definition, attributes = OPS[op], attributes or {}
        if types is None:
            try:
                types = definition.rule(tuple(v.type for v in operands), attributes)
            except (TypeError, ValueError, KeyError) as reason:
                raise GraphError(f"{op} does not fit its operands", where=str(sources[:1]), why=str(reason)) from reason
        node = Node(definition, operands, attributes, types, sources)
        for value in node.operands:
            value.users[node] = None
        self._nodes[node] = None
        return node

    def set_outputs(self, values: Sequence[Value], types: Sequence[Type] | None = None) -> None:
        """Name the outputs; ``types`` is what the caller is promised, by default what the values have."""
        self.outputs = list(values)
        self.output_types = list(types) if types is not None else [v.type for v in values]
        self.updated_outputs = frozenset(i for i, v in enumerate(values) if is_updated_input(v))

    def replace_value(self, old: Value, new: Value) -> None:
        """Let every reader of ``old`` read ``new`` instead (``new``'s own producer excepted).

        Raises:
            GraphError: where the two differ in element type, shape or device.
        """
        if old is new:
            return
        if isinstance(old.type, TensorType) and not old.type.same_values(new.type):
            raise GraphError(f"{new!r} cannot replace {old!r}", why="element type, shape or device differ")
        for user in list(old.users):
            if user is not new.producer:
                self.replace_operands(user, [new if v is old else v for v in user.operands])
        self.outputs = [new if v is old else v for v in self.outputs]
        new.name = new.name or old.name

    def replace_operands(self, node: Node, operands: Sequence[Value]) -> None:
        """Give a node other operands, and keep the use lists true."""
        for value in node.operands:
            value.users.pop(node, None)
        node.operands = tuple(operands)
        for value in node.operands:
            value.users[node] = None

    def erase(self, node: Node) -> None:
        """Remove a node that nobody reads.

        Raises:
            GraphError: where a result has a user or is an output.
        """
        if any(r.users for r in node.results) or any(r in self.outputs for r in node.results):
            raise GraphError(f"{node!r} still has users")
        for value in node.operands:
            value.users.pop(node, None)
        del self._nodes[node]

    def erase_dead(self, nodes: Iterable[Node] | None = None) -> int:
        """Remove the nodes (of ``nodes``, by default all) whose results nobody reads and that have no effect."""
        outputs = set(self.outputs)
        count = 0
        for node in reversed(list(self._nodes if nodes is None else nodes)):
            if node in self._nodes and not any(r.users or r in outputs for r in node.results):
                if not node.has_effect:
                    self.erase(node)
                    count += 1
        return count

    @property
    def written_inputs(self) -> list[int]:
        """Positions of the inputs whose storage it changes, through views and nested regions too."""
        found = {storage(value) for node in self._nodes for value in node.written}
        return [i for i, value in enumerate(self.inputs) if value in found] if found else []

    def order_of_effects(self) -> dict[Node, list[Node]]:
        """What has to come before a node without being read by it.

        Ordered nodes keep their order among each other, and what writes comes behind all nodes that read the old
        value of its destination, be it through views.
        """
        ordered = [n for n in self._nodes if n.has(Trait.ORDERED)]
        earlier = {node: [previous] for previous, node in pairwise(ordered)}
        for node in self._nodes:
            for destination in node.written:
                earlier.setdefault(node, []).extend(_readers(destination, node))
        return earlier

    def sort(self) -> None:
        """Restore an order that respects data flow and effects, as near to the present one as possible.

        Raises:
            GraphError: where the graph has a cycle.
        """
        placed: dict[Node, None] = {}
        earlier = self.order_of_effects()
        for root in self._nodes:
            stack = [(root, False)]
            on_path: set[Node] = set()
            while stack:
                node, done = stack.pop()
                if node in placed:
                    continue
                if done:
                    placed[node] = None
                    on_path.discard(node)
                    continue
                if node in on_path:
                    raise GraphError("the graph has a cycle", where=repr(node))
                on_path.add(node)
                stack.append((node, True))
                before = [v.producer for v in node.operands if v.producer is not None]
                before += earlier.get(node, [])
                stack.extend((p, False) for p in reversed(before) if p in self._nodes and p not in placed)
        self._nodes = placed

    def reorder(self, nodes: Sequence[Node]) -> None:
        """Give the nodes another order; ``sort`` then restores data flow where it was broken.

        Raises:
            GraphError: where ``nodes`` are not the nodes of the graph.
        """
        order = dict.fromkeys(nodes)
        if order.keys() != self._nodes.keys():
            raise GraphError("a new order must hold every node once")
        self._nodes = order

    def constant(self, value: float | int | bool, dtype: DType, device: str = "cpu") -> Value:
        """A 0-d number."""
        return self.add_node("constant", (), {"value": value, "dtype": dtype, "device": device}).result

    def symbols(self) -> list[str]:
        """Names of the size symbols its inputs mention, sorted."""
        sizes: list[Size] = []
        for value in self.inputs:
            if isinstance(value.type, TensorType):
                sizes += [*value.type.shape, *value.type.strides]
            elif isinstance(value.type, ScalarType) and value.type.expr is not None:
                sizes.append(value.type.expr)
        return sorted({str(s) for n in sizes if not isinstance(n, int) for s in n.free_symbols})

    def copy(self) -> "Graph":
        """A deep copy; bodies of regions are shared, as nobody changes them in place."""
        out = Graph(self.name)
        to = {v: out.add_input(v.type, v.name, v.frozen) for v in self.inputs}
        out.splice(self._nodes, to)
        out.set_outputs([to[v] for v in self.outputs], self.output_types)
        out.updated_outputs = self.updated_outputs
        return out

    def become(self, other: "Graph") -> None:
        """Take over the contents of ``other``, which is given up by that."""
        self.inputs, self.outputs, self.output_types = other.inputs, other.outputs, other.output_types
        self._nodes = other._nodes

    def splice(self, nodes: Iterable[Node], to: dict[Value, Value], sources: tuple[Source, ...] = ()) -> None:
        """Add copies of nodes; ``to`` maps the values that they take, and is filled with those that they give."""
        for node in nodes:
            copy = self.add_node(
                node.op.name,
                [to[v] for v in node.operands],
                dict(node.attributes),
                types=[r.type for r in node.results],
                sources=node.sources or sources,
            )
            for old, new in zip(node.results, copy.results, strict=True):
                new.name = old.name
                to[old] = new

    def __str__(self) -> str:
        return Graph.printer(self)


def base(value: Value) -> Value:
    """The value that a chain of views looks at."""
    while value.producer is not None and (of := value.producer.viewed) is not None:
        value = of
    return value


def storage(value: Value) -> Value:
    """The value whose storage this one has: itself, unless it is a view or what a write gives."""
    while (of := viewed_or_written(value)) is not None:
        value = of
    return value


def viewed_or_written(value: Value) -> Value | None:
    """The operand of its producer whose storage a value has; None where it has its own."""
    if (node := value.producer) is None:
        return None
    if (of := node.viewed) is not None:
        return of
    return node.operands[0] if node.has(Trait.WRITE) else updated(node, value.index)


def is_updated_input(value: Value) -> bool:
    """Whether it is an input that was written to, or a view of that."""
    written = False
    while (of := viewed_or_written(value)) is not None:
        value, written = of, written or is_written(value)
    return written and value.producer is None


def readers(value: Value) -> Iterator[Node]:
    """What reads a value, be it through views."""
    for user in value.users:
        yield user
        for view in user.results if user.viewed is value else ():
            yield from readers(view)


def is_written(value: Value) -> bool:
    """Whether it is what a write gives, or a region that ends in one: its operand, changed. A view of such is not."""
    return value.producer is not None and bool(value.producer.written)


def updated(node: Node, index: int) -> Value | None:
    """The operand that a result of a region is, after the region has written to it; None for one of its own."""
    if not node.has(Trait.REGION):
        return None
    body = node.body
    made = body.outputs[index]
    if not is_written(made):
        return None
    inner = storage(made)
    return node.operands[body.inputs.index(inner)] if inner in body.inputs else None


def _writes(op: Op, attributes: dict[str, Any]) -> Sequence[int]:
    """Positions of the operands that a node writes to: found once, as nobody changes the body of a region in place."""
    if op.has(Trait.WRITE):
        return (0,)
    body = attributes.get("body")
    return body.written_inputs if op.has(Trait.REGION) and isinstance(body, Graph) else ()


def _readers(destination: Value, write: Node) -> list[Node]:
    """The other nodes that read what a write replaces: a value, what it is a view of, and all views of that."""
    found, stack = dict[Node, None](), [base(destination)]
    while stack:
        new = [user for user in stack.pop().users if user is not write and user not in found]
        found.update(dict.fromkeys(new))
        stack += [result for node in new if node.viewed is not None for result in node.results]
    return list(found)
