"""Checks the invariants of a graph between passes, so that a broken one is reported where it was broken."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NoReturn
from weakref import WeakSet

import sympy

from fusec.errors import GraphError
from fusec.ir.graph import Graph, Node, Source, Value, updated
from fusec.ir.ops import OPS, Trait
from fusec.ir.printer import name_values, print_node
from fusec.ir.types import DType, OtherType, ScalarType, TensorType, Type, same_shape

_ATTRIBUTE_KINDS = (int, float, str, type(None), sympy.Expr, DType, TensorType, ScalarType, OtherType)
_verified: "WeakSet[Graph]" = WeakSet()
"""Bodies that have been verified: they are shared and never changed in place, so once is enough."""


@lru_cache(maxsize=8192)
def _inferred(op: str, operands: tuple[Type, ...], attributes: tuple[tuple[str, Any], ...]) -> tuple[Type, ...]:
    """Return the result types of the type rule, cached: rules are slow with symbolic sizes, and layers repeat them."""
    return tuple(OPS[op].rule(operands, dict(attributes)))


def verify_graph(graph: Graph) -> None:
    """Check a graph and the bodies of its regions.

    Raises:
        GraphError: that names the first node at fault.
    """
    _Verifier(graph).run()


class _Verifier:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = set(graph.nodes)
        self.defined: set[Value] = set()
        self.roots: dict[Value, Value] = {}
        """The value whose storage a view or a written value has."""
        self.stale: set[Value] = set()
        """Values whose storage has been written since they were defined."""

    def run(self) -> None:
        graph = self.graph
        for i, value in enumerate(graph.inputs):
            if value.producer is not None or value.index != i:
                self.fail("an input has the wrong position", None, f"{value!r} is input {i}")
            self.check_users(value, None)
        self.defined.update(graph.inputs)
        if len(self.defined) != len(graph.inputs):
            self.fail("an input is listed twice", None, "")
        for node in graph.nodes:
            self.check_operands(node)
            self.check_attributes(node)
            self.check_results(node)
            self.check_effects(node)
        self.check_outputs()

    def check_operands(self, node: Node) -> None:
        if node.op is not OPS.get(node.op.name):
            self.fail("an operation is not in the table", node, node.op.name)
        if node.op.arity is not None and len(node.operands) != node.op.arity:
            self.fail("the number of operands is wrong", node, f"{len(node.operands)}, not {node.op.arity}")
        for i, value in enumerate(node.operands):
            if value not in self.defined:
                self.fail_undefined(node, i, value)
            if node not in value.users:
                self.fail("a use list lacks a reader", node, f"operand {i} does not list it as a user")
            if value in self.stale and node is not value.producer:
                self.fail(
                    "a value is read after its storage was written", node, f"operand {i}; read it before the write"
                )

    def fail_undefined(self, node: Node, i: int, value: Value) -> NoReturn:
        if value.producer in self.nodes:
            self.fail("a value is used before it is defined", node, f"operand {i}, {value!r}; call graph.sort()")
        self.fail("a value belongs to another graph", node, f"operand {i}, {value!r}")

    def check_users(self, value: Value, node: Node | None) -> None:
        for user in value.users:
            if user not in self.nodes:
                self.fail("a use list names a node that is not in the graph", node, f"{user!r} of {value!r}")
            if value not in user.operands:
                self.fail("a use list names a node that does not read the value", node, f"{user!r} of {value!r}")

    def check_attributes(self, node: Node) -> None:
        for name, value in node.attributes.items():
            if name == "body" and isinstance(value, Graph):
                continue
            if not _is_allowed(value):
                self.fail("an attribute has a value of a kind that is not allowed", node, f"{name}={value!r}")

    def check_results(self, node: Node) -> None:
        for i, value in enumerate(node.results):
            if value.producer is not node or value.index != i:
                self.fail("a result has the wrong producer", node, repr(value))
            self.check_users(value, node)
        self.defined.update(node.results)
        if node.has(Trait.REGION):
            self.check_region(node)
        elif node.has(Trait.OPAQUE):
            self.check_call(node)
        else:
            self.check_rule(node)

    def check_rule(self, node: Node) -> None:
        try:
            expected = _inferred(node.op.name, tuple([v.type for v in node.operands]), tuple(node.attributes.items()))
        except (TypeError, ValueError, KeyError, AttributeError) as reason:
            raise self.error("the operands do not fit the operation", node, f"{reason or type(reason)}") from reason
        if len(expected) != len(node.results) or not all(map(_agree, expected, (r.type for r in node.results))):
            found = ", ".join(str(r.type) for r in node.results)
            self.fail(
                "a result has not the type of its operation", node, f"{found}, not {', '.join(map(str, expected))}"
            )

    def check_call(self, node: Node) -> None:
        if not isinstance(node.attributes.get("target"), str):
            self.fail("a call names no operation", node, f"target={node.attributes.get('target')!r}")
        for name in ("args", "kwargs"):
            arguments = node.attributes.get(name, ())
            if not isinstance(arguments, tuple):
                self.fail("the arguments of a call are no tuple", node, f"{name}={arguments!r}")
            missing = [index for index in _operands_in(arguments) if index >= len(node.operands)]
            if missing:
                self.fail("a call names an operand that it has not", node, f"operand {missing[0]}")

    def check_region(self, node: Node) -> None:
        body = node.attributes.get("body")
        if not isinstance(body, Graph):
            self.fail("a region has no body", node, "")
        if not isinstance(node.attributes.get("fusion", ""), str) or node.attributes.get("kind") not in (
            "declared",
            "kernel",
            "vendor",
        ):
            self.fail("a region has an unknown kind", node, f"kind={node.attributes.get('kind')!r}")
        for what, outer, inner in (("operand", node.operands, body.inputs), ("result", node.results, body.outputs)):
            if len(outer) != len(inner):
                self.fail(f"the number of {what}s differs from the body's", node, f"{len(outer)} and {len(inner)}")
            for i, (a, b) in enumerate(zip(outer, inner, strict=True)):
                if not _agree(a.type, b.type):
                    self.fail(f"{what} {i} differs from the body's", node, f"{a.type} and {b.type}")
        if body not in _verified:
            try:
                _Verifier(body).run()
            except GraphError as reason:
                raise self.error(f"in its body: {reason.what}", node, f"{reason.where}: {reason.why}") from reason
            _verified.add(body)

    def check_effects(self, node: Node) -> None:
        """Track storage through views; only storage of graph inputs and of ``full`` may be written."""
        if (viewed := node.viewed) is not None:
            self.roots |= dict.fromkeys(node.results, viewed)
        if not node.writes:
            return
        for value in node.written:
            self.check_destination(node, value)
        for result in node.results:
            of = node.operands[0] if node.has(Trait.WRITE) else updated(node, result.index)
            if of is not None:
                self.roots[result] = of
                if node.has(Trait.WRITE) and not result.tensor.same_memory(of.tensor):
                    self.fail("a write has other strides than its destination", node, f"{result!r}, {of!r}")

    def check_destination(self, node: Node, value: Value) -> None:
        while value in self.roots:
            self.stale.add(value)
            value = self.roots[value]
        self.stale.add(value)
        if value.producer is not None and not value.producer.is_op("full"):
            self.fail("the destination of a write is not the storage of a graph input", node, repr(value))

    def check_outputs(self) -> None:
        graph = self.graph
        if len(graph.outputs) != len(graph.output_types):
            self.fail(
                "outputs and their types differ in number", None, f"{len(graph.outputs)}, {len(graph.output_types)}"
            )
        for i, (value, type) in enumerate(zip(graph.outputs, graph.output_types, strict=True)):
            if value not in self.defined:
                self.fail("an output is not defined in the graph", value.producer, f"output {i}, {value!r}")
            if not _agree(value.type, type):
                self.fail(
                    "an output has not the promised type", value.producer, f"output {i} is {value.type}, not {type}"
                )

    def fail(self, what: str, node: Node | None, why: str) -> NoReturn:
        raise self.error(what, node, why)

    def error(self, what: str, node: Node | None, why: str) -> GraphError:
        """Return the error, with the node's text; the printer accepts invalid graphs."""
        return GraphError(what, where=self.describe(node) if node else f"graph {self.graph.name}", why=why)

    def describe(self, node: Node) -> str:
        try:
            return print_node(node, name_values(self.graph)).partition("\n")[0]
        except (AttributeError, TypeError, ValueError):
            return f"{node!r} {_first(node.sources)}"


def _is_allowed(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_allowed, value))
    return isinstance(value, _ATTRIBUTE_KINDS)


def _operands_in(arguments: Any) -> Iterator[int]:
    """Yield the numbers of the operands among the arguments of a call."""
    match arguments:
        case ("%", int(index)):
            yield index
        case tuple(items):
            for item in items:
                yield from _operands_in(item)


def _agree(a: Type, b: Type) -> bool:
    """Return whether two types agree in dtype and shape; layout and device are not compared."""
    if isinstance(a, TensorType) and isinstance(b, TensorType):
        return a is b or (a.dtype == b.dtype and (a.shape == b.shape or same_shape(a.shape, b.shape)))
    return type(a) is type(b) and (not isinstance(a, ScalarType) or a.kind == b.kind)  # type: ignore[union-attr]


def _first(sources: tuple[Source, ...]) -> str:
    return str(sources[0]) if sources else ""
