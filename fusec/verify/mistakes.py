"""Mutants of a graph: graphs that differ in one node, as by mistake."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import TypeAlias

from fusec.errors import GraphError
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait, split_spec
from fusec.ir.types import BF16, F32, TensorType, same_size
from fusec.ir.verifier import verify_graph

Write: TypeAlias = "Callable[[Graph, list[Value]], Value]"
"""Adds a replacement for a node, given its operands, and returns its result."""

_SIBLINGS = (
    ("add", "sub", "mul", "div", "maximum", "minimum"), ("exp", "exp2", "tanh", "sigmoid", "erf", "sin"),
    ("sqrt", "rsqrt", "reciprocal", "abs", "neg"), ("lt", "le", "gt", "ge", "eq", "ne"), ("and", "or", "xor"),
    ("sum", "max", "min", "prod"), ("cumsum", "cumprod"),
)  # fmt: skip
"""Operations that are easily confused."""


def mistakes(graph: Graph) -> Iterator[tuple[str, Graph]]:
    """Yield every mutant with the same inputs and output types, and a description of the difference."""
    for node in graph.nodes:
        for what, write in _wrong(node, graph):
            made = _rebuilt(graph, node, write)
            if made is not None:
                yield f"{node.op.name}, {what}", made


def _rebuilt(graph: Graph, place: Node, write: Write) -> Graph | None:
    """Return the graph with one node replaced; None where the types do not fit."""
    out = Graph(graph.name)
    to = {v: out.add_input(v.type, v.name) for v in graph.inputs}
    try:
        for node in graph.nodes:
            if node is place:
                to[node.result] = write(out, [to[v] for v in node.operands])
                continue
            types = [r.type for r in node.results] if node.has(Trait.REGION | Trait.OPAQUE) else None
            copy = out.add_node(node.op.name, [to[v] for v in node.operands], dict(node.attributes), types=types)
            to.update(zip(node.results, copy.results, strict=True))
        out.set_outputs([to[v] for v in graph.outputs], graph.output_types)
        verify_graph(out)
    except GraphError:
        return None
    same = all(a.tensor.same_values(b.type) for a, b in zip(graph.outputs, out.outputs, strict=True))
    return out if same else None


def _wrong(node: Node, graph: Graph) -> Iterator[tuple[str, Write]]:
    """Yield replacements of a node, with their descriptions."""
    if len(node.results) != 1:
        return
    yield from _other_operations(node)
    yield from _other_attributes(node)
    operands = node.operands
    if len(operands) == 2 and not node.has(Trait.COMMUTATIVE):
        yield "operands swapped", _again(node, lambda graph, given: given[::-1])
    if node.is_op("where"):
        yield "branches swapped", _again(node, lambda graph, given: [given[0], given[2], given[1]])
    for i, value in enumerate(operands):
        for dims in _swaps(value):
            yield f"operand {i} permuted by {dims}", _changed(node, i, "permute", {"dims": dims})
        if isinstance(value.type, TensorType) and value.dtype == F32 and value.shape:
            yield f"operand {i} rounded", _changed(node, i, "cast", {"dtype": BF16}, {"dtype": F32})
        if isinstance(value.type, TensorType) and value.dtype.kind == "bool":
            yield f"operand {i} negated", _changed(node, i, "not", {})
        for other, read in enumerate(graph.inputs):
            if read is not value and isinstance(value.type, TensorType) and value.type.same_values(read.type):
                yield f"operand {i} is {read.name}", _reading(node, i, other)


def _other_operations(node: Node) -> Iterator[tuple[str, Write]]:
    name = node.op.name
    for group in _SIBLINGS:
        if name in group:
            at = group.index(name)
            for other in (group[at - 1], group[(at + 1) % len(group)]):
                yield other, _again(node, op=other)


def _other_attributes(node: Node) -> Iterator[tuple[str, Write]]:
    at = node.attributes
    if node.is_op("constant") and not isinstance(at["value"], bool):
        number = at["value"]
        for other in (-number, number * 1.5 + 1 if abs(number) < 1e300 else 1.0):
            if other != number:
                yield f"not {number} but {other}", _again(node, value=type(number)(other))
    elif node.has(Trait.REDUCTION):
        for d in range(-len(node.operands[0].shape), 0):
            if (d,) != at["dims"]:
                yield f"along {d}", _again(node, dims=(d,))
    elif node.is_op("argsort"):
        yield "in reverse", _again(node, descending=not at["descending"])
    elif node.is_op("slice"):
        for by in (1, -1):
            if isinstance(at["start"], int) and 0 <= at["start"] + by and _within(node, at["stop"] + by):
                yield f"moved by {by}", _again(node, start=at["start"] + by, stop=at["stop"] + by)
    elif node.is_op("concat"):
        yield "parts swapped", _again(node, lambda graph, given: given[::-1])
    elif node.has(Trait.CONTRACTION):
        terms, out = split_spec(at["spec"])
        for i, term in enumerate(terms):
            for a, b in combinations(range(len(term)), 2):
                labels = list(term)
                labels[a], labels[b] = labels[b], labels[a]
                wrong = [*terms[:i], "".join(labels), *terms[i + 1 :]]
                yield f"operand {i} transposed", _again(node, spec=f"{','.join(wrong)}->{out}")


def _within(node: Node, stop: int) -> bool:
    size = node.operands[0].shape[node.attributes["dim"]]
    return isinstance(size, int) and stop <= size


def _swaps(value: Value) -> Iterator[tuple[int, ...]]:
    """Yield the transpositions of two dims that keep a shape."""
    shape = value.shape if isinstance(value.type, TensorType) else ()
    for a, b in combinations(range(len(shape)), 2):
        if same_size(shape[a], shape[b]) and shape[a] != 1:
            dims = list(range(len(shape)))
            dims[a], dims[b] = b, a
            yield tuple(dims)


def _again(
    node: Node,
    order: Callable[[Graph, list[Value]], Sequence[Value]] = lambda graph, given: given,
    op: str = "",
    **attributes: object,
) -> Write:
    """The node with other operands, another operation or other attributes."""

    def write(graph: Graph, given: list[Value]) -> Value:
        return graph.add_node(op or node.op.name, order(graph, given), node.attributes | attributes).result

    return write


def _changed(node: Node, operand: int, op: str, *steps: dict[str, object]) -> Write:
    """The node with something done to an operand."""

    def order(graph: Graph, given: list[Value]) -> Sequence[Value]:
        value = given[operand]
        for attributes in steps:
            value = graph.add_node(op, [value], dict(attributes)).result
        return [*given[:operand], value, *given[operand + 1 :]]

    return _again(node, order)


def _reading(node: Node, operand: int, other: int) -> Write:
    """Return the node with an operand replaced by a graph input."""
    return _again(node, lambda graph, given: [*given[:operand], graph.inputs[other], *given[operand + 1 :]])
