"""Printed kernels run: compiled by Triton on a GPU, or by its interpreter on CPU tensors."""

import hashlib
import linecache
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    ReduceOps,
    TensorHandle,
    interpreter_builder,
)

from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.triton.descriptors import Descriptors, fits, without
from fusec.codegen.triton.grids import grids
from fusec.codegen.triton.launcher import Launcher, counting
from fusec.codegen.triton.printer import print_kernel
from fusec.codegen.triton.signature import ASSERTING, identifier, options
from fusec.errors import BuildError, FusecError
from fusec.ir.types import evaluate_size
from fusec.reference.dtypes import torch_dtype


def _sum(tile: Any, axis: int) -> Any:
    """Halves added until one element is left, as threads do it; numpy adds one after the other along outer axes."""
    parts = np.moveaxis(tile, axis, 0)
    while len(parts) > 1:
        parts = parts[: len(parts) // 2] + parts[len(parts) // 2 :]
    return parts[0]


_COMPARISONS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)
_REDUCTIONS: dict[str, Any] = {"add": _sum, "product": np.prod, "max_or_nan": np.max, "min_or_nan": np.min}


class TritonKernel:
    """One kernel: compiled by Triton on its first launch on a GPU; on CPU tensors the interpreter runs it.

    Args:
        kernel: the tile program.
        dependent: whether it starts while the kernel before it ends, and waits for that.
    """

    def __init__(self, kernel: Kernel, dependent: bool = False) -> None:
        self.kernel = kernel
        self.name = kernel.name
        self.source = print_kernel(kernel, dependent=dependent)
        self._with = {"launch_pdl": True} if dependent else {}
        self._launchers: list[tuple[Kernel, Launcher]] = []
        self._interpreted: InterpretedKernel | None = None
        self._fit = fits(kernel)
        self._by_address = TritonKernel(without(kernel), dependent) if kernel.config.descriptors else None
        """What runs where memory does not lie as descriptors need it."""

    def __call__(self, buffers: Sequence[Tensor], symbols: Sequence[int] = ()) -> None:
        """Run on tensors, at each of which a pointer of the kernel starts.

        Args:
            buffers: one for each buffer of the kernel, in order; none for shared memory.
            symbols: their values, in the order of ``kernel.symbols``.

        Raises:
            BuildError: where Triton cannot compile it or the GPU cannot load it; nothing has run then.
        """
        _check_count(self.kernel, buffers, symbols)
        if self._by_address is not None and not self._fit(buffers, symbols):
            return self._by_address(buffers, symbols)
        if buffers[0].device.type == "cpu":
            self._interpreted = self._interpreted or InterpretedKernel(self.kernel)
            return self._interpreted(buffers, symbols)
        launches = self._launches(buffers, symbols)
        for launcher, given in launches[1:]:  # the first runs only where all can
            launcher.prepare(given, symbols)
        for launcher, given in launches:
            launcher(given, symbols)

    def prepare(self, buffers: Sequence[Tensor], symbols: Sequence[int] = ()) -> None:
        """Compile all that a call with these needs, which may be done beside other kernels."""
        if self._by_address is not None and not self._fit(buffers, symbols):
            return self._by_address.prepare(buffers, symbols)
        if buffers[0].device.type == "cpu":
            self._interpreted = self._interpreted or InterpretedKernel(self.kernel)
            return
        for launcher, given in self._launches(buffers, symbols):
            launcher.prepare(given, symbols)

    def _launches(self, buffers: Sequence[Tensor], symbols: Sequence[int]) -> list[tuple[Launcher, Sequence[Tensor]]]:
        """A launch for each grid, and what it is given."""
        if not self._launchers:
            self._launchers = [
                (grid, Launcher(grid, define(grid, self.source), options(grid) | self._with))
                for grid in grids(self.kernel)
            ]
        if len(self._launchers) == 1:
            return [(self._launchers[0][1], buffers)]
        at = _memory(self.kernel, buffers, symbols)
        return [(launcher, [at[b.name] for b in grid.buffers]) for grid, launcher in self._launchers]


class InterpretedKernel:
    """One kernel in Triton's interpreter: slow, on CPU tensors, for tests and debugging."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.name = kernel.name
        self.source = print_kernel(kernel, interpreted=True)
        self._grids = [
            (grid, counting(grid), Descriptors(grid), InterpretedFunction(define(grid, self.source, interpreted=True)))
            for grid in grids(kernel)
        ]

    def __call__(self, buffers: Sequence[Tensor], symbols: Sequence[int] = ()) -> None:
        """As ``TritonKernel``; bf16 tensors go through f32 copies, since the interpreter gets bf16 arithmetic wrong."""
        _check_count(self.kernel, buffers, symbols)
        passed = {name: _flat(buffer) for name, buffer in _memory(self.kernel, buffers, symbols).items()}
        widened = {name: b.float() if b.dtype == torch.bfloat16 else b for name, b in passed.items()}
        with np.errstate(all="ignore"), _repaired_interpreter():
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


def define(kernel: Kernel, text: str, interpreted: bool = False) -> Any:
    """The function that a kernel's text defines.

    Triton reads the source of what it compiles, so the text is entered into ``linecache`` as a file of its own.

    Args:
        kernel: the kernel.
        text: its text.
        interpreted: for Triton's interpreter, which takes plain functions.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    file = f"<fusec kernel {kernel.name} {digest}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": f"fusec_kernel_{digest}"}
    if interpreted:
        names |= {"device_function": _plain, "range": _range}
        text = text.replace("@triton.jit", "@device_function").replace("tl.range(", "range(")
    try:
        exec(compile(text, file, "exec"), names)
    except SyntaxError as reason:
        raise BuildError(f"the text of kernel {kernel.name} is no Python", where=file, why=str(reason)) from reason
    return names[identifier(kernel.name)]


@contextmanager
def _repaired_interpreter() -> Iterator[None]:
    """Triton's interpreter with some of its methods replaced for the time of a launch.

    Comparisons give booleans: it marks them with the type of what was compared, and so a scalar one turns into
    floats where it meets a tile. Reductions with the prelude's functions go to numpy: it calls them lane by lane.
    Products are summed in float64 and rounded once: in which order ``tl.dot`` adds is a chip's own, and numpy's, one
    term after the other, is a worse one than that of the eager library of a CPU, with which results are compared.
    Assertions hold as they do on a GPU, and raise what eager raises on a CPU.
    """

    def asserted(self: Any, condition: Any, message: str) -> None:
        if not np.all(condition.data):
            raise IndexError(message)

    binary_op, generic_reduce = InterpreterBuilder.binary_op, ReduceOps.generic_reduce

    def typed(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        result = binary_op(self, lhs, rhs, op)
        return TensorHandle(result.data, tl.int1) if op in _COMPARISONS else result

    def exact(self: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
        total = np.matmul(a.data, b.data, dtype=np.float64) + accumulator.data
        return TensorHandle(total.astype(accumulator.data.dtype), accumulator.dtype.scalar)

    def whole(self: Any, inputs: Any) -> Any:
        reduce = _REDUCTIONS.get(self.combine_fn.__name__)
        if reduce is None or len(inputs) != 1:
            return generic_reduce(self, inputs)
        return [self.to_tensor(reduce(inputs[0].handle.data, axis=self.axis), inputs[0].dtype)]

    with ExitStack() as stack:
        for owner, name, repaired in (
            (InterpreterBuilder, "binary_op", typed),
            (InterpreterBuilder, "create_dot", exact),
            (InterpreterBuilder, "create_assert", asserted),
            (ReduceOps, "generic_reduce", whole),
            (interpreter_builder, "options", replace(interpreter_builder.options, **ASSERTING)),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, repaired)
        yield


def _plain(function: Any) -> Any:
    """A device function for the interpreter: itself, under the attribute by which ``tl.reduce`` calls it."""
    function.fn = function
    return function


def _range(*bounds: Any, num_stages: int = 0) -> range:
    """Python's, over scalars of the interpreter too: those of Triton 3.6 have no ``__index__`` that works."""
    return range(*(bound.handle.data.item() if isinstance(bound, tl.tensor) else bound for bound in bounds))


def _flat(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last, as one dimension."""
    length = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((length if tensor.numel() else 0,), (1,))


def _memory(kernel: Kernel, buffers: Sequence[Tensor], symbols: Sequence[int]) -> dict[str, Tensor]:
    """The buffers of a kernel by name, new ones where grids share them."""
    sizes, given = dict(zip(kernel.symbols, symbols, strict=True)), iter(buffers)
    return {
        b.name: torch.empty(evaluate_size(b.numel, sizes), dtype=torch_dtype(b.dtype), device=buffers[0].device)
        if b.role == "shared"
        else next(given)
        for b in kernel.buffers
    }


def _check_count(kernel: Kernel, buffers: Sequence[Tensor], symbols: Sequence[int]) -> None:
    wanted = kernel.given
    if len(buffers) != len(wanted) or len(symbols) != len(kernel.symbols):
        raise FusecError(
            f"kernel {kernel.name} takes {len(wanted)} buffers and {len(kernel.symbols)} symbols",
            why=f"{len(buffers)} and {len(symbols)} were passed",
        )
