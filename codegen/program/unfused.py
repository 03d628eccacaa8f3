"""The operations of a kernel one by one, through ATen: what it is timed against, and what runs where it cannot."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fusec.codegen.program.runtime import interpret
from fusec.ir.graph import Graph, Value, is_written
from fusec.ir.types import evaluate_sizes


class Unfused:
    """The operations one by one, matrix products and calls of attention by the vendor's library.

    Args:
        name: of the kernel.
        body: of a region that it serves.
        symbols: of the kernel.
    """

    source = "# the operations one by one, through ATen\n"

    def __init__(self, name: str, body: Graph, symbols: Sequence[str] = ()) -> None:
        self.name, self.body, self.symbols = name, body, tuple(symbols)

    def __call__(self, buffers: Sequence[Any], symbols: Sequence[int] = ()) -> None:
        """As a ``Launchable``."""
        sizes = dict(zip(self.symbols, symbols, strict=True))
        inputs = as_typed(buffers, self.body.inputs, sizes)
        results = interpret(self.body, inputs, sizes)
        own = [v for v in self.body.outputs if not is_written(v)]
        made = (x for x, v in zip(results, self.body.outputs, strict=True) if not is_written(v))
        for buffer, result in zip(as_typed(buffers[len(inputs) :], own, sizes), made, strict=True):
            buffer.copy_(result)

    def prepare(self, buffers: Sequence[Any]) -> None:
        """There is nothing to build."""


def as_typed(buffers: Sequence[Tensor], values: Sequence[Value], symbols: Mapping[str, int] = {}) -> list[Tensor]:
    """Memory as the tensors that these values are: regions of other shapes may share a kernel."""
    sizes = [(evaluate_sizes(v.tensor.shape, symbols), evaluate_sizes(v.tensor.strides, symbols)) for v in values]
    return [buffer.as_strided(*size) for buffer, size in zip(buffers, sizes, strict=False)]
