"""Intermediate values: the bytes that one kernel writes and another reads, and why they are two kernels."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fusec.analysis.memory import read_bytes, touched_bytes
from fusec.debug.operations import Operation, operations_of
from fusec.debug.subject import Subject, is_vendor, kind_of, sources_of, usual_reason
from fusec.ir.graph import Graph, Node, Value, storage
from fusec.ir.ops import Trait
from fusec.ir.types import estimate

_LIBRARY = "a library's call computes nothing else"
_IN_TURN = "each matmul sums over whole rows of the one before"


@dataclass(frozen=True)
class Intermediate:
    """A value that one step of a program writes and others read."""

    name: str
    type: str
    writer: str
    """The kernel or call that writes it, as in the table of kernels."""
    readers: tuple[str, ...]
    written_bytes: int
    """0 for a value that is a result of the graph as well, and so has to be written."""
    read_bytes: int
    """By all readers together."""
    place: str
    """Module, file and line of the operation that computes it."""
    reason: str
    """The reason for which its writer and its first reader are not one kernel; "" where nothing is known."""

    @property
    def bytes(self) -> int:
        """Bytes written and read."""
        return self.written_bytes + self.read_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the value as JSON data."""
        return {**vars(self), "readers": list(self.readers), "bytes": self.bytes}


@dataclass(frozen=True)
class Traffic:
    """The bytes that a model moves between its kernels, beside those that it cannot do without."""

    intermediates: tuple[Intermediate, ...] = ()
    """Those that move most first."""
    least_bytes: int = 0
    """Inputs and weights that are read, and results, each once."""

    @property
    def bytes(self) -> int:
        """Bytes of intermediate values, written and read."""
        return sum(value.bytes for value in self.intermediates)

    @property
    def ratio(self) -> float:
        """Bytes of intermediate values for each of the least that any program would move."""
        return self.bytes / self.least_bytes if self.least_bytes else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the traffic as JSON data."""
        values = [value.to_json() for value in self.intermediates]
        return {"bytes": self.bytes, "least_bytes": self.least_bytes, "ratio": self.ratio, "values": values}


def traffic(subjects: Sequence[Subject], sizes: Mapping[str, int]) -> Traffic:
    """Return the intermediate values of all graphs of a model, with sizes for the symbols."""
    found = [value for subject in subjects for value in _Graph(subject, sizes).intermediates()]
    found.sort(key=lambda value: (-value.bytes, value.name))
    return Traffic(tuple(found), sum(least_bytes(subject.final, sizes) for subject in subjects))


def intermediate_bytes(subject: Subject, sizes: Mapping[str, int]) -> dict[Node, int]:
    """Return the bytes of intermediate values that each step of a graph writes and reads."""
    found, returned = dict[Node, int](), _returned(subject.final)
    for value, readers in _between(subject):
        for node, read in readers.items():
            found[node] = found.get(node, 0) + _read_bytes(node, read, sizes)
        assert value.producer is not None
        found[value.producer] = found.get(value.producer, 0) + _written_bytes(value, returned, sizes)
    return found


def least_bytes(graph: Graph, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a graph's inputs that are read, of lookups what they find, and of its results, each once."""
    read = 0
    for value in graph.inputs:
        read += max((_read_bytes(node, seen, sizes) for node, seen in _readers(value).items()), default=0)
    results = dict.fromkeys(v for v in graph.outputs if storage(v).producer is not None)
    return read + sum(estimate(touched_bytes(v), sizes) for v in results)


def _between(subject: Subject) -> Iterator[tuple[Value, dict[Node, Value]]]:
    """Yield the values that are written by one step and read by others, with the readers and what they read."""
    for node in subject.final.nodes:
        if kind_of(node, subject):
            for value in node.results:
                # A cache that is updated is an input, and views of an operation of ATen are no values of their own.
                if storage(value) is value and (readers := _readers(value)):
                    yield value, readers


def _readers(value: Value) -> dict[Node, Value]:
    """Return the nodes that read a value, through views, with the view that each reads."""
    found: dict[Node, Value] = {}
    stack = [value]
    while stack:
        seen = stack.pop()
        for user in seen.users:
            if user.viewed is seen:
                stack += user.results
            else:
                found.setdefault(user, seen)
    return found


def _read_bytes(node: Node, value: Value, sizes: Mapping[str, int]) -> int:
    """Return the bytes that a node reads of an operand: of a lookup's table what is found in it."""
    return estimate(read_bytes(node, value), sizes)


def _multiplies(node: Node) -> bool:
    """Return whether a kernel computes a matmul."""
    return node.has(Trait.REGION) and any(n.has(Trait.CONTRACTION) for n in node.body.nodes)


def _returned(graph: Graph) -> set[Value]:
    """Return the values whose storage a graph returns."""
    return set(map(storage, graph.outputs))


def _written_bytes(value: Value, returned: set[Value], sizes: Mapping[str, int]) -> int:
    return 0 if value in returned else estimate(touched_bytes(value), sizes)


class _Graph:
    """One graph, and the reasons for which its operations are in several kernels."""

    def __init__(self, subject: Subject, sizes: Mapping[str, int]) -> None:
        self.subject, self.sizes = subject, sizes

    def intermediates(self) -> Iterator[Intermediate]:
        """Yield the intermediate values of the graph."""
        returned = _returned(self.subject.final)
        for value, readers in _between(self.subject):
            node = value.producer
            assert node is not None
            first = next(iter(readers))
            computing = self.links.get((node, first), [])
            sources = computing[0][0].node.sources if computing else sources_of(node)
            yield Intermediate(
                value.name,
                str(value.type),
                self.subject.name_of(node),
                tuple(map(self.subject.name_of, readers)),
                _written_bytes(value, returned, self.sizes),
                sum(_read_bytes(reader, seen, self.sizes) for reader, seen in readers.items()),
                str(sources[0]) if sources else "",
                self.reason(node, first, computing),
            )

    @cached_property
    def links(self) -> dict[tuple[Node, Node], list[tuple[Operation, Operation]]]:
        """By writer and reader: the operations that compute a value and read it."""
        found: dict[tuple[Node, Node], list[tuple[Operation, Operation]]] = {}
        for operation in operations_of(self.subject):
            for read in operation.reads:
                if read.home is not operation.home:
                    found.setdefault((read.home, operation.home), []).append((read, operation))
        return found

    def reason(self, writer: Node, reader: Node, links: Sequence[tuple[Operation, Operation]]) -> str:
        """Return why two steps are not one kernel, from the remarks of the compile."""
        for producer, user in links:
            said = f"{producer.node.op.name} and {user.node.op.name} are in two kernels"
            places = {str(s) for s in user.node.sources}
            for remark in self.subject.remarks:
                if remark.message == said and places & {*remark.sources}:
                    return remark.reason
        for node in (reader, writer):
            if kind_of(node, self.subject) == "opaque":
                return usual_reason(node)
        if any(map(is_vendor, (reader, writer))):
            return _LIBRARY
        if any(user.node.has(Trait.CONTRACTION) for _, user in links) and _multiplies(writer):
            return _IN_TURN
        places = {str(s) for node in (writer, reader) for s in sources_of(node)}
        about = (r for r in self.subject.remarks if r.kind == "missed" and r.subject == "attention")
        return next((r.reason for r in about if places & {*r.sources}), "")
