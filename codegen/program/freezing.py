"""What ``freeze`` takes out of a program's calls: steps that weights alone decide, and turning weights in blocks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy

from fusec.codegen.program.frozen import Frozen, Recipe, packed
from fusec.codegen.tile.kernel import Kernel
from fusec.ir.graph import Graph, Node, Value, storage
from fusec.ir.ops import Trait
from fusec.ir.structure import structure
from fusec.ir.types import TensorType, estimate
from fusec.pipeline import Context

PASS_NAME = "freeze"


@dataclass(frozen=True)
class Decided:
    """What the weights of a graph decide."""

    values: frozenset[Value] = frozenset()
    """The weights, and what follows from nothing else."""
    once: frozenset[Node] = frozenset()
    """The nodes that no call needs to carry out: all of them but views that calls look through."""

    @classmethod
    def by_weights(cls, graph: Graph) -> "Decided":
        """What those inputs decide that are frozen."""
        written = {storage(v) for node in graph.nodes for v in node.written}
        values = {v for v in graph.inputs if v.frozen and v not in written}
        known = {r for node in graph.nodes if node.has(Trait.SOURCE) and not _symbolic(node) for r in node.results}
        once = set[Node]()
        for node in graph.nodes if values else ():
            alone = not values.isdisjoint(node.operands) and values.union(known).issuperset(node.operands)
            if alone and not (node.has_effect or _symbolic(node) or written.intersection(map(storage, node.results))):
                values.update(node.results)
                once.add(node)
        read = set(graph.outputs)
        for node in reversed(graph.nodes):
            if node.is_alias and node.result in read:
                once.discard(node)
            if node not in once:
                read.update(node.operands)
        return cls(frozenset(values), frozenset(once))


NOTHING = Decided()


class Keeping:
    """What a program keeps: which values, in which layouts, and how each follows from weights.

    Args:
        graph: the whole one.
        decided: what its weights decide.
        kernels: of the nodes that every call carries out.
        program: makes what runs a graph.
    """

    def __init__(
        self,
        graph: Graph,
        decided: Decided,
        kernels: Mapping[Node, tuple[Kernel, Any]],
        program: Callable[[Graph], Callable[[list[Any]], list[Any]]],
    ) -> None:
        self.once = decided.once
        read = [v for node in graph.nodes if node not in self.once for v in _read(node, kernels)]
        kept = [v for v in (*read, *graph.outputs) if v.producer in self.once]
        self.values: dict[tuple[Value, int], None] = dict.fromkeys((v, 0) for v in kept)
        """Each with the rows of the blocks in which it lies transposed, or 0."""
        for node, (kernel, _) in kernels.items():
            pairs = zip(node.operands, kernel.buffers, strict=False)
            self.values.update(dict.fromkeys((v, b.packed) for v, b in pairs if b.packed))
        origins = {v: _origin(graph, v) for v, _ in self.values}
        needed = {w for _, weights in origins.values() for w in weights}
        self.weights = [v for v in graph.inputs if v in needed]
        """Those that calls look at."""
        programs: dict[Any, Callable[[list[Any]], list[Any]]] = {}
        recipes = []
        for value, rows in self.values:
            piece, weights = origins[value]
            key = structure(piece)
            if len(piece) and key not in programs:
                programs[key] = program(piece)
            places = tuple(map(self.weights.index, weights))
            recipes.append(Recipe(places, partial(_make, programs.get(key), rows)))
        self.frozen = Frozen(recipes)

    def remark(self, graph: Graph, context: Context) -> None:
        """Say what is kept, and how many bytes that takes."""
        if not any(v.frozen for v in graph.inputs):
            why = "no input is a module's parameter or buffer, or gradients may be asked for"
            fix = "call the model under torch.no_grad()"
            context.remarks.add("analysis", PASS_NAME, "nothing is frozen", reason=why, suggestion=fix)
            return
        nbytes = sum(estimate(v.tensor.nbytes) for v, _ in self.values)
        blocks, steps = sum(rows > 0 for _, rows in self.values), sum(not n.is_alias for n in self.once)
        message = f"{blocks} weights are kept in blocks, {steps} steps are done once: {nbytes / 1e6:.1f} MB"
        figures: dict[str, float | int | str] = {"bytes": nbytes, "blocks": blocks, "steps": steps}
        sources = tuple(dict.fromkeys(str(s) for n in graph.nodes if n in self.once for s in n.sources))
        context.remarks.add("analysis", PASS_NAME, message, sources=sources[:8], figures=figures)


def _read(node: Node, kernels: Mapping[Node, tuple[Kernel, Any]]) -> Iterator[Value]:
    """The operands that a node reads as they lie."""
    kernel = kernels[node][0] if node in kernels else None
    for i, value in enumerate(node.operands):
        if kernel is None or not kernel.buffers[i].packed:
            yield value


def _make(program: Callable[[list[Any]], list[Any]] | None, rows: int, weights: list[Any]) -> Any:
    (value,) = weights if program is None else program(weights)
    return packed(value, rows) if rows else value


def _origin(graph: Graph, value: Value) -> tuple[Graph, list[Value]]:
    """What computes a value from weights, and those."""
    nodes, stack = set[Node](), [value]
    while stack:
        node = stack.pop().producer
        if node is not None and node not in nodes:
            nodes.add(node)
            stack += node.operands
    ordered = [node for node in graph.nodes if node in nodes]
    read = {value, *(v for node in ordered for v in node.operands)}
    weights = [v for v in graph.inputs if v in read]
    piece = Graph(PASS_NAME)
    to = {v: piece.add_input(v.type, v.name) for v in weights}
    piece.splice(ordered, to)
    piece.set_outputs([to[value]])
    return piece, weights


def mark(region: Node, values: Iterable[Value]) -> None:
    """Let the inputs of a region's body say which of its operands are frozen."""
    values = set(values)
    if values.isdisjoint(region.operands):
        return
    body = region.body.copy()
    for value, inner in zip(region.operands, body.inputs, strict=True):
        inner.frozen = value in values
    region.attributes["body"] = body


def _symbolic(node: Node) -> bool:
    """Whether it mentions sizes that only a call knows."""
    inside = node.body.nodes if node.has(Trait.REGION) else []
    types = [t for r in node.results if isinstance(t := r.type, TensorType)]
    sizes = [n for type in types for n in (*type.shape, *type.strides)]
    return _mentions([*sizes, *node.attributes.values()]) or any(map(_symbolic, inside))


def _mentions(thing: Any) -> bool:
    if isinstance(thing, (tuple, list)):
        return any(map(_mentions, thing))
    return isinstance(thing, sympy.Basic) and bool(thing.free_symbols)
