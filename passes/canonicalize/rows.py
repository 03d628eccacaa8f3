"""Computations that treat rows one by one, made again for other rows."""

from collections.abc import Callable, Iterator
from typing import Any

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import Size, product, same_size


class RowsOf:
    """Values with other rows along a dim: each operation that treats rows one by one is applied to other rows."""

    def __init__(self, graph: Graph, count: Size, leaf: Callable[[Value, int], Value | None]) -> None:
        """Make nothing yet.

        Args:
            graph: gets the new nodes.
            count: how many rows there are then.
            leaf: returns what takes the place of a value whose rows no such operation computes; None if nothing can.
        """
        self.graph, self.count, self.leaf = graph, count, leaf
        self.found: dict[tuple[Value, int], Value | None] = {}

    def of(self, value: Value, dim: int) -> Value | None:
        """Return a value with other rows along a dim, counted from the end."""
        if (value, dim) not in self.found:
            dims = self._operand_dims(value, dim)
            self.found[value, dim] = self.leaf(value, dim) if dims is None else self._again(value, dim, dims)
        return self.found[value, dim]

    def _again(self, value: Value, dim: int, dims: list[int | None]) -> Value | None:
        node = value.producer
        assert node is not None
        operands = [x if d is None else self.of(x, d) for x, d in zip(node.operands, dims, strict=True)]
        if any(x is None for x in operands):
            return None
        attributes: dict[str, Any] = dict(node.attributes)
        if "shape" in attributes:
            shape = list(attributes["shape"])
            shape[dim] = self.count
            attributes["shape"] = tuple(shape)
        return self.graph.add_node(node.op.name, [x for x in operands if x is not None], attributes).result

    def _operand_dims(self, value: Value, dim: int) -> list[int | None] | None:
        """Return the dim of each operand that holds the rows, None where it has none; None for any other operation."""
        node, rank = value.producer, value.tensor.rank
        if node is None or len(node.results) != 1:
            return None
        if node.has(Trait.POINTWISE):
            return [dim if _has_rows(x, value, dim) else None for x in node.operands]
        if (node.has(Trait.REDUCTION) and dim not in node.attributes["dims"]) or (
            node.is_op("slice", "concat") and node.attributes["dim"] % rank != dim % rank
        ):
            return [dim] * len(node.operands)
        if node.is_op("expand"):
            return [dim if _has_rows(node.operands[0], value, dim) else None]
        if node.is_op("permute"):
            return [node.attributes["dims"][dim] - rank]
        if node.is_op("reshape"):
            before = dim_before(value, dim, node.operands[0])
            return None if before is None else [before]
        return self._indices_dim(node, dim % rank) if node.is_op("take") else None

    def _indices_dim(self, node: Node, place: int) -> list[int | None] | None:
        """Return the dim of a lookup's indices that is a dim of its result."""
        table, indices = node.operands
        behind = node.attributes["dim"] % table.tensor.rank + indices.tensor.rank - place
        return [None, -behind] if 0 < behind <= indices.tensor.rank else None


def _has_rows(operand: Value, value: Value, dim: int) -> bool:
    """Return whether an operand has the rows of a value, along a dim counted from the end, and is not broadcast."""
    return operand.tensor.rank >= -dim and (operand.shape[dim] != 1 or value.shape[dim] == 1)


def dim_before(value: Value, dim: int, source: Value) -> int | None:
    """Return the dim of a reshape's operand that is a dim of its result, counted from the end; None if it is merged."""
    behind = product(value.shape[value.tensor.rank + dim + 1 :])
    for d, n in enumerate(source.shape):
        if same_size(n, value.shape[dim]) and same_size(product(source.shape[d + 1 :]), behind):
            return d - source.tensor.rank
    return None


def computed_from(value: Value) -> Iterator[Value]:
    """Yield a value and all that its elements are computed from by operations on single elements, inputs included."""
    pending, seen = [value], {value}
    while pending:
        value = pending.pop()
        yield value
        if value.producer is not None and value.producer.has(Trait.POINTWISE | Trait.VIEW | Trait.LOOKUP):
            new = [v for v in value.producer.operands if v not in seen]
            seen.update(new)
            pending += new


def has_uneven_parts(value: Value) -> bool:
    """Return whether a value is computed, element by element, from a concatenation of parts of different lengths."""
    return any(v.producer is not None and joins_uneven_parts(v.producer) for v in computed_from(value))


def joins_uneven_parts(node: Node) -> bool:
    """Return whether a node is a concatenation of parts of different lengths: no sum over these is one loop."""
    if not node.is_op("concat"):
        return False
    first, *others = (x.shape[node.attributes["dim"]] for x in node.operands)
    return not all(same_size(n, first) for n in others)
