"""Kernels in Triton's interpreter, on CPU tensors: slow, for tests and debugging."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    ReduceOps,
    ScanOps,
    TensorHandle,
    interpreter_builder,
)

from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.triton.arguments import DescriptorArguments, buffers_by_name, program_count
from fusec.codegen.triton.grids import grids
from fusec.codegen.triton.jit import define
from fusec.codegen.triton.prelude import for_interpreter
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.signature import ASSERTING


class InterpretedKernel:
    """One kernel in Triton's interpreter.

    Args:
        kernel: the tile program.
        edited: a source that was edited; by default the one that is printed.
    """

    def __init__(self, kernel: Kernel, edited: str = "") -> None:
        self.kernel = kernel
        self.source = for_interpreter(edited or print_kernel(kernel))
        self._grids = [
            (grid, program_count(grid), DescriptorArguments(grid), InterpretedFunction(_define(grid, self.source)))
            for grid in grids(kernel)
        ]

    def __call__(self, buffers: Sequence[Tensor], symbols: Sequence[int] = ()) -> None:
        """As ``TritonKernel``; bf16 tensors are converted to f32 copies: the interpreter gets bf16 arithmetic wrong."""
        passed = {name: _flat(buffer) for name, buffer in buffers_by_name(self.kernel, buffers, symbols).items()}
        widened = {name: b.float() if b.dtype == torch.bfloat16 else b for name, b in passed.items()}
        with np.errstate(all="ignore"), _patched_interpreter():
            for grid, count, describe, function in self._grids:
                if programs := count(*symbols):
                    given = [widened[b.name] for b in grid.buffers]
                    try:
                        function[(programs,)](*given, *describe(given, symbols), *symbols)
                    except InterpreterError as reason:
                        raise reason.__cause__ if isinstance(reason.__cause__, IndexError) else reason from None
        for buffer in self.kernel.buffers:
            original, copy = passed[buffer.name], widened[buffer.name]
            if copy is not original and buffer.role in ("output", "update"):
                original.copy_(copy)


def _define(grid: Kernel, source: str) -> Any:
    source = source.replace("@triton.jit", "@device_function").replace("tl.range(", "range(")
    source = source.replace("tl.sort(", "sorted_tile(")
    return define(grid, source, device_function=_device_function, range=_range, sorted_tile=_sorted)


def _device_function(function: Any) -> Any:
    """Set the attribute of a function through which ``tl.reduce`` calls it."""
    function.fn = function
    return function


def _range(*bounds: Any, num_stages: int = 0) -> range:
    """Return Python's range of scalars of the interpreter, whose ``__index__`` fails in Triton 3.6."""
    return range(*(bound.handle.data.item() if isinstance(bound, tl.tensor) else bound for bound in bounds))


def _sorted(tile: Any) -> Any:
    """Return a sorted tile: the interpreter goes through the steps of Triton's sort lane by lane."""
    return tl.tensor(TensorHandle(np.sort(tile.handle.data), tile.dtype.scalar), tile.type)


@contextmanager
def _patched_interpreter() -> Iterator[None]:
    """Correct Triton's interpreter within a ``with`` block."""
    patch, comparing = mock.patch.object, _with_boolean_comparisons(InterpreterBuilder.binary_op)
    with (
        mock.patch.multiple(
            InterpreterBuilder, binary_op=comparing, create_dot=_create_dot, create_assert=_create_assert
        ),
        patch(ReduceOps, "generic_reduce", _by_numpy(ReduceOps.generic_reduce, _REDUCTIONS)),
        patch(ScanOps, "generic_scan", _by_numpy(ScanOps.generic_scan, _SCANS)),
        patch(interpreter_builder, "options", replace(interpreter_builder.options, **ASSERTING)),
    ):
        yield


def _with_boolean_comparisons(binary_op: Callable[..., Any]) -> Callable[..., Any]:
    """Compare to booleans: the interpreter gives results the type of the operands, and broadcasts them as floats."""

    def patched(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        result = binary_op(self, lhs, rhs, op)
        return TensorHandle(result.data, tl.int1) if op in _COMPARISONS else result

    return patched


def _by_numpy(generic: Callable[..., Any], known: dict[str, Any]) -> Callable[..., Any]:
    """Reduce and scan with the functions of the prelude by numpy: the interpreter calls them for each lane."""

    def patched(self: Any, inputs: Any) -> Any:
        function = known.get(self.combine_fn.__name__)
        if function is None or len(inputs) != 1:
            return generic(self, inputs)
        return [self.to_tensor(function(inputs[0].handle.data, axis=self.axis), inputs[0].dtype)]

    return patched


def _create_dot(self: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
    """Sum in float64 and round once: numpy sums in no chip's order, and less exactly than the library of a CPU."""
    total = np.matmul(a.data, b.data, dtype=np.float64) + accumulator.data
    return TensorHandle(total.astype(accumulator.data.dtype), accumulator.dtype.scalar)


def _create_assert(self: Any, condition: Any, message: str) -> None:
    """Raise the error that eager raises on a CPU."""
    if not np.all(condition.data):
        raise IndexError(message)


def _sum(tile: Any, axis: int) -> Any:
    """Add pairwise, as threads do; numpy adds sequentially along outer axes."""
    parts = np.moveaxis(tile, axis, 0)
    while len(parts) > 1:
        parts = parts[: len(parts) // 2] + parts[len(parts) // 2 :]
    return parts[0]


def _scan(combine: Callable[..., Any], tile: Any, axis: int) -> Any:
    """Combine with elements 1, 2, 4, … before, as threads do: no element after another, as numpy's functions."""
    parts, distance = np.moveaxis(tile, axis, 0).copy(), 1
    while distance < len(parts):
        parts[distance:] = combine(parts[:-distance], parts[distance:])
        distance *= 2
    return np.moveaxis(parts, 0, axis)


_COMPARISONS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)
_REDUCTIONS: dict[str, Any] = {"add": _sum, "product": np.prod, "max_or_nan": np.max, "min_or_nan": np.min}
_SCANS: dict[str, Any] = {"add": partial(_scan, np.add), "product": partial(_scan, np.multiply)}


def _flat(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view from the first element of a tensor to its last."""
    length = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((length if tensor.numel() else 0,), (1,))
