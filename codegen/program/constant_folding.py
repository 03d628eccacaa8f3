"""Constant folding and weight prepacking under ``freeze``: nodes that depend on weights alone leave the program."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor

from fusec.codegen.program.weight_cache import CachedTensor, WeightCache
from fusec.codegen.tile.kernel import Kernel
from fusec.ir.graph import Graph, Node, Value, storage
from fusec.ir.ops import Trait
from fusec.ir.structure import structure
from fusec.ir.types import I8, I16, I32, U8, TensorType, estimate
from fusec.pipeline import Context
from fusec.rewriting.driver import cut
from fusec.rewriting.match import cone

PASS_NAME = "freeze"
_PACKED = (I8, U8, I16, I32)
"""Dtypes of packed weights; indices are I64."""


@dataclass(frozen=True)
class ConstantFolding:
    """The part of a graph that can be folded."""

    values: frozenset[Value] = frozenset()
    """Frozen weights, and the values that depend on nothing else."""
    nodes: frozenset[Node] = frozenset()
    """Nodes to evaluate once instead of at every call; views that remain in the program are not among them."""

    @classmethod
    def of(cls, graph: Graph) -> "ConstantFolding":
        """Find what depends on frozen inputs alone."""
        written = {storage(v) for node in graph.nodes for v in node.written}
        values = {v for v in graph.inputs if v.frozen and v not in written}
        known = {r for node in graph.nodes if node.has(Trait.SOURCE) and not _symbolic(node) for r in node.results}
        nodes = set[Node]()
        for node in graph.nodes if values else ():
            alone = not values.isdisjoint(node.operands) and values.union(known).issuperset(node.operands)
            if alone and not (node.has_effect or _symbolic(node) or written.intersection(map(storage, node.results))):
                if _expands(node):
                    continue
                values.update(node.results)
                nodes.add(node)
        read = set(graph.outputs)
        for node in reversed(graph.nodes):
            if node.is_alias and node.result in read:
                nodes.discard(node)
            if node not in nodes:
                read.update(node.operands)
        return cls(frozenset(values), frozenset(nodes))


NO_FOLDING = ConstantFolding()


class FoldedValues:
    """The folded values that a program reads, the layout of each, and the cache that computes them.

    Args:
        graph: the whole graph.
        folding: which of its nodes are folded.
        kernels: the kernels of the nodes that are not folded.
        build: compiles a graph.
    """

    def __init__(
        self,
        graph: Graph,
        folding: ConstantFolding,
        kernels: Mapping[Node, Kernel],
        build: Callable[[Graph], Callable[[list[Any]], list[Any]]],
    ) -> None:
        self.nodes = folding.nodes
        read = [v for node in graph.nodes if node not in self.nodes for v in _unpacked_operands(node, kernels)]
        folded = [v for v in (*read, *graph.outputs) if v.producer in self.nodes]
        self.values: dict[tuple[Value, int], None] = dict.fromkeys((v, 0) for v in folded)
        """Each with the rows of its blocks if it is prepacked, else with 0."""
        for node, kernel in kernels.items():
            pairs = zip(node.operands, kernel.buffers, strict=False)
            self.values.update(dict.fromkeys((v, b.packed) for v, b in pairs if b.packed))
        subgraphs = {v: _subgraph(graph, v) for v, _ in self.values}
        needed = {w for _, weights in subgraphs.values() for w in weights}
        self.weights = [v for v in graph.inputs if v in needed]
        """The inputs that the folded values depend on."""
        programs: dict[Any, Callable[[list[Any]], list[Any]]] = {}
        tensors = []
        for value, rows in self.values:
            subgraph, weights = subgraphs[value]
            key = structure(subgraph)
            if len(subgraph) and key not in programs:
                programs[key] = build(subgraph)
            positions = tuple(map(self.weights.index, weights))
            tensors.append(CachedTensor(positions, partial(_compute, programs.get(key), rows)))
        self.cache = WeightCache(tensors)

    def remark(self, graph: Graph, context: Context) -> None:
        """Report how many values are folded and prepacked, and how many bytes they take."""
        if not any(v.frozen for v in graph.inputs):
            why = "no input is a module's parameter or buffer, or gradients may be asked for"
            fix = "call the model under torch.no_grad()"
            context.remarks.add("analysis", PASS_NAME, "nothing is frozen", reason=why, suggestion=fix)
            return
        nbytes = sum(estimate(v.tensor.nbytes) for v, _ in self.values)
        packed, steps = sum(rows > 0 for _, rows in self.values), sum(not n.is_alias for n in self.nodes)
        message = f"{packed} weights are prepacked, {steps} steps are folded: {nbytes / 1e6:.1f} MB"
        figures: dict[str, float | int | str] = {"bytes": nbytes, "prepacked": packed, "steps": steps}
        sources = tuple(dict.fromkeys(str(s) for n in graph.nodes if n in self.nodes for s in n.sources))
        context.remarks.add("analysis", PASS_NAME, message, sources=sources[:8], figures=figures)


def _expands(node: Node) -> bool:
    """Return whether a node makes more bytes of packed integers: memory, and not time, is what they were packed for."""
    packed = any(v.dtype in _PACKED for v in node.operands)
    return packed and not node.is_alias and _bytes(node.results) > _bytes(node.operands)


def _bytes(values: Iterable[Value]) -> int:
    return sum(estimate(v.tensor.nbytes) for v in values)


def prepack(weight: Tensor, rows: int) -> Tensor:
    """Store a matrix as transposed blocks of ``rows`` rows, the last one shorter; bfloat16 in pairs along a row."""
    words = weight.contiguous().view(torch.int32)
    whole = len(words) // rows * rows
    out = torch.empty_like(words)
    out[:whole].view(-1, words.shape[1], rows).copy_(words[:whole].view(-1, rows, words.shape[1]).mT)
    out[whole:].view(words.shape[1], -1).copy_(words[whole:].mT)
    return out.view(weight.dtype)


def _unpacked_operands(node: Node, kernels: Mapping[Node, Kernel]) -> Iterator[Value]:
    """Yield the operands that a node does not read prepacked."""
    kernel = kernels.get(node)
    for i, value in enumerate(node.operands):
        if kernel is None or not kernel.buffers[i].packed:
            yield value


def _compute(program: Callable[[list[Any]], list[Any]] | None, rows: int, weights: list[Any]) -> Any:
    (value,) = weights if program is None else program(weights)
    return prepack(value, rows) if rows else value


def _subgraph(graph: Graph, value: Value) -> tuple[Graph, list[Value]]:
    """Return the graph that computes a folded value, and the weights that are its inputs."""
    nodes = cone(value)
    read = {value, *(v for node in nodes for v in node.operands)}
    weights = [v for v in graph.inputs if v in read]
    return cut(weights, [node for node in graph.nodes if node in nodes], [value], PASS_NAME), weights


def mark_frozen(region: Node, values: Iterable[Value]) -> None:
    """Mark the inputs of a region's body whose operands are among the foldable values."""
    values = set(values)
    if values.isdisjoint(region.operands):
        return
    body = region.body.copy()
    for value, inner in zip(region.operands, body.inputs, strict=True):
        inner.frozen = value in values
    region.attributes["body"] = body


def _symbolic(node: Node) -> bool:
    """Return whether a node depends on dynamic sizes."""
    inside = node.body.nodes if node.has(Trait.REGION) else []
    types = [t for r in node.results if isinstance(t := r.type, TensorType)]
    sizes = [n for type in types for n in (*type.shape, *type.strides)]
    return _has_symbols([*sizes, *node.attributes.values()]) or any(map(_symbolic, inside))


def _has_symbols(attribute: Any) -> bool:
    if isinstance(attribute, (tuple, list)):
        return any(map(_has_symbols, attribute))
    return isinstance(attribute, sympy.Basic) and bool(attribute.free_symbols)
