"""Sample arguments that declarations are traced with: sizes that identify their dim, and their symbols."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from fusec.ir.graph import Graph
from fusec.ir.types import DTYPES, DType, TensorType, contiguous_strides, symbol
from fusec.rewriting.fusion import Dims, Parameter

PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179)


class Sizes:
    """Sample sizes: a different prime for every name, so that dims are distinguishable."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.names: dict[str, int] = {}
        self._primes = iter(PRIMES)

    def of(self, name: str) -> int:
        """The size of a named dim."""
        if name not in self.names:
            self.names[name] = next(self._primes)
        return self.names[name]

    def shape(self, dims: Dims, first: str) -> tuple[int, ...]:
        """A sample shape; the starred dims of ``first`` have sizes, those of other names are 1."""
        star = dims.variadic
        lead = [self.of(f"*{i}") if star == first else 1 for i in range(self.batch)] if star else []
        return (*lead, *(self.fixed(word) for word in dims.fixed))

    def fixed(self, word: str) -> int:
        """The sample size of a dim that is a name, a number or a multiple."""
        factor, _, name = word.rpartition("*")
        if name.isdigit():
            return int(name)
        return int(factor or 1) * self.of(name)


def sentinel(index: int) -> float:
    """Return the number that represents the scalar parameter at ``index``: no model or arithmetic produces it."""
    return (161 + 2 * index) / 512  # exact in every float type, so that no cast hides it


def sample(parameters: Sequence[Parameter], dtype: DType, present: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """Return arguments to trace with: types with sample sizes, sentinels for numbers, None for absent operands."""
    first = next((p.dims.variadic for p in parameters if p.dims and p.dims.variadic and p.name in present), "")
    found: dict[str, Any] = {}
    for i, p in enumerate(parameters):
        if p.dims is None:
            found[p.name] = sentinel(i)
        elif p.name not in present:
            found[p.name] = None
        else:
            kind = DTYPES[p.dims.dtype] if p.dims.dtype else dtype
            shape = sizes.shape(p.dims, first)
            found[p.name] = TensorType(kind, shape, contiguous_strides(shape))
    return found


def symbolize(graph: Graph, sizes: Sizes) -> None:
    """Turn the sample sizes of a traced graph, and multiples and products of them, into symbols of their names."""
    symbols = {size: symbol(name.replace("*", "batch")) for name, size in sizes.names.items()}

    def symbolic(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(symbolic, value))
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) < PRIMES[0]:
            return value
        return size_of(value)

    @cache
    def size_of(value: int) -> Any:
        for beyond in (0, 1, -1):  # the last element read is one before the end of a slice with a step
            expr, rest = 1, value + beyond
            for prime, name in symbols.items():
                while rest % prime == 0:
                    expr, rest = expr * name, rest // prime
            if expr != 1:
                return expr * rest - beyond
        return value

    for value in [*graph.inputs, *(r for n in graph.nodes for r in n.results)]:
        if isinstance(value.type, TensorType):
            value.type = replace(value.type.with_shape(symbolic(value.type.shape)), device="cpu")
    for node in graph.nodes:
        if "device" in node.attributes:
            node.attributes["device"] = "cpu"
        number = node.attributes.get("value")
        size = (
            int(number) if isinstance(number, int | float) and not isinstance(number, bool) and number % 1 == 0 else 0
        )
        if not node.is_op("constant"):
            node.attributes = {k: symbolic(v) for k, v in node.attributes.items()}
        elif not isinstance(symbolic(size), int):
            expr, dtype = symbolic(size), node.result.dtype
            made = graph.add_node("size", (), {"expr": expr, "dtype": dtype, "device": "cpu"})
            graph.replace_value(node.result, made.result)
    graph.output_types = [v.type for v in graph.outputs]
    graph.sort()
