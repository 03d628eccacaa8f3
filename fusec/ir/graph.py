"""Graph, Node and Value: the IR itself, and the only methods that change it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, ClassVar

from fusec.errors import GraphError
from fusec.ir.ops import OPS, Op, Trait, split_spec
from fusec.ir.types import DType, ScalarType, Size, TensorType, Type


@dataclass(frozen=True)
class Source:
    """Source location of a node in the model."""

    file: str = ""
    line: int = 0
    module: str = ""
    """Path of the module in the model: ``layers.0.self_attn.o_proj``."""
    op: str = ""
    """The operation that the model called: ``aten.linear.default``."""
    text: str = ""
    """The source line."""

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
        """True for an input that is a weight, so that results of weights alone may be kept until one changes."""
        self.users: dict[Node, None] = {}
        """The nodes that read it, in insertion order (an ordered set)."""

    @property
    def tensor(self) -> TensorType:
        """Its type; raises GraphError for a value that is no tensor."""
        if not isinstance(self.type, TensorType):
            raise GraphError(f"a tensor is expected, not {self.type}", where=repr(self))
        return self.type

    @property
    def shape(self) -> tuple[Size, ...]:
        """Shape of the tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> DType:
        """Dtype of the tensor."""
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
        writes: Sequence[int] | None = None,
    ) -> None:
        self.op = op
        self.operands = tuple(operands)
        self.attributes = attributes
        """Immutable values by name; a region has its ``body`` here."""
        self.results = tuple([Value(type, self, i) for i, type in enumerate(types)])
        self.sources = sources
        self.writes = _writes(op, attributes) if writes is None else writes
        """Positions of the operands whose storage the node writes; of a region, those that its body writes."""

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
        """True for a node whose result shares its operand's storage: a view other than ``concat``."""
        return self.op.has(Trait.VIEW) and self.op.name != "concat"

    @property
    def viewed(self) -> Value | None:
        """The operand whose storage the results share, for a view, an opaque one included; otherwise None."""
        if self.op.has(Trait.OPAQUE):
            return self.operands[self.attributes["views"]] if "views" in self.attributes else None
        return self.operands[0] if self.is_alias else None

    @property
    def body(self) -> "Graph":
        """The body of a region."""
        return self.attributes["body"]

    @property
    def label_sizes(self) -> dict[str, Size]:
        """The size of each label of a contraction, in the order in which its operands have them."""
        terms, _ = split_spec(self.attributes["spec"])
        pairs = zip(terms, self.operands, strict=True)
        return {label: n for term, value in pairs for label, n in zip(term, value.shape, strict=True)}

    def has(self, trait: Trait) -> bool:
        """Return whether its operation has the trait."""
        return self.op.has(trait)

    def is_op(self, *names: str) -> bool:
        """Return whether it applies one of these operations."""
        return self.op.name in names

    @property
    def written(self) -> tuple[Value, ...]:
        """The operands whose storage the node writes."""
        return tuple([self.operands[i] for i in self.writes])

    @property
    def has_effect(self) -> bool:
        """True for a node that does more than compute its results."""
        return self.has(Trait.ORDERED) or bool(self.writes)

    def __repr__(self) -> str:
        return f"<Node {self.op.name}>"


class Graph:
    """A list of nodes in an order that respects data flow; inputs and outputs are values.

    Only the methods below change a graph. New nodes are appended at the end; after adding nodes that earlier
    ones read, call ``sort``.
    """

    printer: ClassVar[Callable[["Graph"], str]]
    """Returns the text of a graph; set by ``fusec.ir.printer``, which depends on this module."""

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.output_types: list[Type] = []
        """Declared types of the outputs, strides included."""
        self.updated_outputs: frozenset[int] = frozenset()
        """Positions of outputs that are an input, or a view of one, after a write: they share its storage. All other
        outputs have their own storage, even where passes find them equal."""
        self._nodes: dict[Node, None] = {}
        self.journal: list[Any] | None = None
        """Takes every change while it is set: ``add``, ``erase`` or ``replace``, the node, its operands until then."""

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
        return self._append(Node(definition, operands, attributes, types, sources))

    def _append(self, node: Node) -> Node:
        for value in node.operands:
            value.users[node] = None
        self._nodes[node] = None
        if self.journal is not None:
            self.journal.append(("add", node, ()))
        return node

    def set_outputs(self, values: Sequence[Value], types: Sequence[Type] | None = None) -> None:
        """Set the outputs; ``types`` are their declared types, by default those of the values."""
        self.outputs = list(values)
        self.output_types = list(types) if types is not None else [v.type for v in values]
        self.updated_outputs = frozenset(i for i, v in enumerate(values) if is_updated_input(v))

    def replace_value(self, old: Value, new: Value) -> None:
        """Replace ``old`` by ``new`` in all readers except ``new``'s own producer.

        Raises:
            GraphError: where the two differ in dtype, shape or device.
        """
        if old is new:
            return
        if isinstance(old.type, TensorType) and not old.type.same_values(new.type):
            raise GraphError(f"{new!r} cannot replace {old!r}", why="dtype, shape or device differ")
        for user in list(old.users):
            if user is not new.producer:
                self.replace_operands(user, [new if v is old else v for v in user.operands])
        self.outputs = [new if v is old else v for v in self.outputs]
        new.name = new.name or old.name

    def replace_operands(self, node: Node, operands: Sequence[Value]) -> None:
        """Set the operands of a node and update the use lists."""
        if self.journal is not None:
            self.journal.append(("replace", node, node.operands))
        for value in node.operands:
            value.users.pop(node, None)
        node.operands = tuple(operands)
        for value in node.operands:
            value.users[node] = None

    def erase(self, node: Node) -> None:
        """Remove a node whose results have no users.

        Raises:
            GraphError: where a result has a user or is an output.
        """
        if any(r.users for r in node.results) or any(r in self.outputs for r in node.results):
            raise GraphError(f"{node!r} still has users")
        for value in node.operands:
            value.users.pop(node, None)
        del self._nodes[node]
        if self.journal is not None:
            self.journal.append(("erase", node, node.operands))

    def erase_dead(self, nodes: Iterable[Node] | None = None) -> int:
        """Remove the nodes (of ``nodes``, by default all) that are unused and have no effect; return how many."""
        outputs = set(self.outputs)
        count = 0
        for node in reversed(list(self._nodes if nodes is None else nodes)):
            if node in self._nodes and self.is_dead(node, outputs):
                self.erase(node)
                count += 1
        return count

    def is_dead(self, node: Node, outputs: Collection[Value] | None = None) -> bool:
        """Return whether a node is unused and has no effect, such as a write to storage that nothing else reads."""
        outputs = self.outputs if outputs is None else outputs
        if any(r.users or r in outputs for r in node.results) or node.has(Trait.ORDERED):
            return False
        return all(_is_unread(v, outputs) for v in node.written)

    @property
    def written_inputs(self) -> list[int]:
        """Positions of the inputs whose storage the graph writes, through views and nested regions too."""
        found = {storage(value) for node in self._nodes for value in node.written}
        return [i for i, value in enumerate(self.inputs) if value in found] if found else []

    def order_of_effects(self) -> dict[Node, list[Node]]:
        """Return for each node the nodes that must precede it although it does not read them.

        Ordered nodes keep their order among each other, and a write follows all nodes that read the old
        value of its destination, also through views.
        """
        ordered = [n for n in self._nodes if n.has(Trait.ORDERED)]
        earlier = {node: [previous] for previous, node in pairwise(ordered)}
        for node in self._nodes:
            for destination in node.written:
                earlier.setdefault(node, []).extend(_readers(destination, node))
        return earlier

    def sort(self) -> None:
        """Restore a topological order with respect to data flow and effects, as close to the present one as possible.

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
        """Reorder the nodes; call ``sort`` afterwards where that breaks data flow.

        Raises:
            GraphError: where ``nodes`` are not the nodes of the graph.
        """
        order = dict.fromkeys(nodes)
        if order.keys() != self._nodes.keys():
            raise GraphError("a new order must contain every node once")
        self._nodes = order

    def constant(self, value: float | int | bool, dtype: DType, device: str = "cpu") -> Value:
        """Add a 0-d constant and return its value."""
        return self.add_node("constant", (), {"value": value, "dtype": dtype, "device": device}).result

    def symbols(self) -> list[str]:
        """Return the names of the size symbols in the types of the inputs, sorted."""
        sizes: list[Size] = []
        for value in self.inputs:
            if isinstance(value.type, TensorType):
                sizes += [*value.type.shape, *value.type.strides]
            elif isinstance(value.type, ScalarType) and value.type.expr is not None:
                sizes.append(value.type.expr)
        return sorted({str(s) for n in sizes if not isinstance(n, int) for s in n.free_symbols})

    def copy(self) -> "Graph":
        """Return a deep copy; bodies of regions are shared, as they are never changed in place."""
        out = Graph(self.name)
        to = {v: out.add_input(v.type, v.name, v.frozen) for v in self.inputs}
        out.splice(self._nodes, to)
        out.set_outputs([to[v] for v in self.outputs], self.output_types)
        out.updated_outputs = self.updated_outputs
        return out

    def become(self, other: "Graph") -> None:
        """Take over the contents of ``other``, which must not be used afterwards."""
        self.inputs, self.outputs, self.output_types = other.inputs, other.outputs, other.output_types
        self._nodes = other._nodes

    def splice(self, nodes: Iterable[Node], to: dict[Value, Value], sources: tuple[Source, ...] = ()) -> None:
        """Append copies of nodes; ``to`` maps their operands to values here, and the results are added to it."""
        for node in nodes:
            types = [r.type for r in node.results]
            copy = Node(
                node.op, [to[v] for v in node.operands], dict(node.attributes), types, node.sources or sources,
                node.writes,
            )  # fmt: skip
            for old, new in zip(node.results, self._append(copy).results, strict=True):
                new.name = old.name
                to[old] = new

    def __str__(self) -> str:
        return Graph.printer(self)


def base(value: Value) -> Value:
    """Return the value at the root of a chain of views."""
    while value.producer is not None and (of := value.producer.viewed) is not None:
        value = of
    return value


def _is_unread(destination: Value, outputs: Collection[Value]) -> bool:
    """Return whether only one write uses the destination, and storage that the graph allocates is all that it is."""
    node = destination.producer
    if node is None or len(destination.users) != 1 or destination in outputs:
        return False
    return node.is_op("full") or (node.has(Trait.WRITE) and _is_unread(node.operands[0], outputs))


def storage(value: Value) -> Value:
    """Return the value that owns this value's storage: itself, unless it is a view or the result of a write."""
    while (of := viewed_or_written(value)) is not None:
        value = of
    return value


def viewed_or_written(value: Value) -> Value | None:
    """Return the operand of its producer whose storage a value shares; None where it has its own."""
    if (node := value.producer) is None:
        return None
    if (of := node.viewed) is not None:
        return of
    return node.operands[0] if node.has(Trait.WRITE) else updated(node, value.index)


def is_updated_input(value: Value) -> bool:
    """Return whether a value is an input after a write, or a view of one."""
    written = False
    while (of := viewed_or_written(value)) is not None:
        value, written = of, written or is_written(value)
    return written and value.producer is None


def readers(value: Value) -> Iterator[Node]:
    """Yield the nodes that read a value, also through views."""
    for user in value.users:
        yield user
        for view in user.results if user.viewed is value else ():
            yield from readers(view)


def is_written(value: Value) -> bool:
    """Return whether a value is the result of a write, or of a region that writes; views of such are not."""
    return value.producer is not None and bool(value.producer.written)


def updated(node: Node, index: int) -> Value | None:
    """Return the operand that a region writes and returns as this result; None for a result with its own storage."""
    if not node.has(Trait.REGION):
        return None
    body = node.body
    made = body.outputs[index]
    if not is_written(made):
        return None
    inner = storage(made)
    return node.operands[body.inputs.index(inner)] if inner in body.inputs else None


def _writes(op: Op, attributes: dict[str, Any]) -> Sequence[int]:
    """Return the positions of the operands that a node writes; found once, as bodies are never changed in place."""
    if op.has(Trait.WRITE):
        return (0,)
    body = attributes.get("body")
    return body.written_inputs if op.has(Trait.REGION) and isinstance(body, Graph) else ()


def _readers(destination: Value, write: Node) -> list[Node]:
    """Return the other nodes that read the storage that a write changes, through the value, its base and all views."""
    found, stack = dict[Node, None](), [base(destination)]
    while stack:
        new = [user for user in stack.pop().users if user is not write and user not in found]
        found.update(dict.fromkeys(new))
        stack += [result for node in new if node.viewed is not None for result in node.results]
    return list(found)
