"""The operations of a compile one by one, in whatever region: who runs each, and whose result it reads."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fusec.debug.subject import Subject, kind_of
from fusec.ir.graph import Node, Value
from fusec.ir.ops import Trait


@dataclass(eq=False)
class Operation:
    """A node that computes, in the final graph or inside a region of it."""

    node: Node
    home: Node
    """The node of the final graph that it is in: one kernel, one product, one call."""
    kind: str
    """The executor: ``generated``, ``vendor`` or ``opaque``."""
    reads: dict["Operation", Value] = field(default_factory=dict)
    """The operations whose results it reads, through views, each with the result."""
    readers: list["Operation"] = field(default_factory=list)

    @property
    def modules(self) -> list[str]:
        """The modules it comes from."""
        return [s.module for s in self.node.sources]


def operations_of(subject: Subject) -> list[Operation]:
    """Every operation of the final graph, in order."""
    return list(_Walk(subject).run())


class _Walk:
    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.made: dict[Value, Operation] = {}

    def run(self) -> Iterator[Operation]:
        for node in self.subject.final.nodes:
            kind = kind_of(node, self.subject)
            if kind:
                yield from self.within(node, node, kind, {})

    def within(self, node: Node, home: Node, kind: str, given: dict[Value, Operation]) -> Iterator[Operation]:
        """Yield the operations of a node; ``given`` are the producers of its body's inputs."""
        if node.has(Trait.REGION):
            taken = {inner: found for inner, outer in zip(node.body.inputs, node.operands, strict=True)
                     if (found := self.origin(outer, given)) is not None}  # fmt: skip
            for inside in node.body.nodes:
                if not inside.has(Trait.SOURCE) and not inside.is_alias:
                    yield from self.within(inside, home, kind, taken)
            for outer, inner in zip(node.results, node.body.outputs, strict=True):
                found = self.origin(inner, taken)
                if found is not None:
                    self.made[outer] = found
            return
        operation = Operation(node, home, kind)
        for value in node.operands:
            found = self.origin(value, given)
            if found is not None:
                operation.reads.setdefault(found, value)
        for read in operation.reads:
            read.readers.append(operation)
        for result in node.results:
            self.made[result] = operation
        yield operation

    def origin(self, value: Value, given: dict[Value, Operation]) -> Operation | None:
        """The operation that computes a value, through views; None for inputs and numbers."""
        while value not in given and value not in self.made:
            producer = value.producer
            if producer is None or not producer.operands or not producer.has(Trait.VIEW):
                return None
            value = producer.operands[0]
        return given.get(value) or self.made.get(value)
