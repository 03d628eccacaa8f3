"""Fallback of one kernel: its operations run through ATen where it cannot be compiled or loaded."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fusec.codegen.program.runtime import interpret
from fusec.codegen.target import Launchable
from fusec.errors import BuildError
from fusec.ir.graph import Graph, Value, is_written
from fusec.ir.types import evaluate_sizes


class UnfusedKernel:
    """The operations of a kernel, one at a time through ATen: the fallback, and what candidates are compared with.

    Args:
        name: of the kernel.
        body: of a region that the kernel serves.
        symbols: of the kernel.
    """

    source = "# the operations one at a time, through ATen\n"

    def __init__(self, name: str, body: Graph, symbols: Sequence[str] = ()) -> None:
        self.name, self.body, self.symbols = name, body, tuple(symbols)

    def __call__(self, buffers: Sequence[Any], symbols: Sequence[int] = ()) -> None:
        """As ``Launchable``."""
        sizes = dict(zip(self.symbols, symbols, strict=False))  # the numbers that shared code takes follow
        inputs = as_typed(buffers, self.body.inputs, sizes)
        results = interpret(self.body, inputs, sizes)
        own = [v for v in self.body.outputs if not is_written(v)]
        made = (x for x, v in zip(results, self.body.outputs, strict=True) if not is_written(v))
        for buffer, result in zip(as_typed(buffers[len(inputs) :], own, sizes), made, strict=True):
            buffer.copy_(result)

    def prepare(self, buffers: Sequence[Any]) -> None:
        """Do nothing: there is nothing to build."""


class KernelWithFallback:
    """A kernel that is compiled at its first launch; if that fails, its operations run through ATen.

    No other failure falls back: a kernel that was launched may have written to its inputs.

    Args:
        kernel: raises ``BuildError`` only before it launches anything.
        unfused: its operations.
        report: called once with the reason; may raise.
    """

    def __init__(self, kernel: Launchable, unfused: UnfusedKernel, report: Callable[[BuildError], None]) -> None:
        self.name, self.source = kernel.name, kernel.source
        self._kernel, self._unfused, self._report, self._reported = kernel, unfused, report, False

    def __call__(self, buffers: Sequence[Any], symbols: Sequence[int] = ()) -> int | None:
        """As ``Launchable``."""
        try:
            return self._kernel(buffers, symbols)
        except BuildError as reason:
            if not self._reported:
                self._report(reason)
                self._reported = True
        self._unfused(buffers, symbols)
        return None


def as_typed(buffers: Sequence[Tensor], values: Sequence[Value], symbols: Mapping[str, int] = {}) -> list[Tensor]:
    """Return views of buffers with the shapes and strides of values: regions of other shapes may share a kernel."""
    sizes = [(evaluate_sizes(v.tensor.shape, symbols), evaluate_sizes(v.tensor.strides, symbols)) for v in values]
    return [buffer.as_strided(*size) for buffer, size in zip(buffers, sizes, strict=False)]
