"""Arguments of a launch: the buffers of each grid, tensor descriptors, and the number of programs.

Tensor descriptors are created on the host (Triton's ``TensorDescriptor``) at each launch and passed by value, so that a
recorded launch keeps its own. Created in a kernel instead, each program would write its own to memory and wait for
that, and Triton would need an allocator for that memory.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.tile.sizes import PYTHON, sizes_text
from fusec.codegen.triton.schedules.descriptors import ALIGNMENT, MAX_DIM
from fusec.codegen.triton.signature import Described, descriptors, launches
from fusec.ir.types import evaluate_size
from fusec.reference.dtypes import torch_dtype


def program_count(kernel: Kernel) -> Callable[..., int]:
    """Return the number of programs of a launch as a function of the kernel's symbols."""
    function: Callable[..., int] = eval(f"lambda {', '.join(kernel.symbols)}: {PYTHON.print(launches(kernel))}")
    return function


def buffers_by_name(kernel: Kernel, buffers: Sequence[Tensor], symbols: Sequence[int]) -> dict[str, Tensor]:
    """Return the buffers of a launch by name, with new memory for those that its grids share."""
    sizes, given = dict(zip(kernel.symbols, symbols, strict=True)), iter(buffers)
    return {
        b.name: torch.empty(evaluate_size(b.numel, sizes), dtype=torch_dtype(b.dtype), device=buffers[0].device)
        if b.role == "shared"
        else next(given)
        for b in kernel.buffers
    }


class DescriptorArguments:
    """Creates the tensor descriptors for launches of one grid of a kernel."""

    def __init__(self, kernel: Kernel) -> None:
        numbers = {buffer.name: i for i, buffer in enumerate(kernel.buffers)}
        self._made = [(numbers[d.buffer], d.start, list(d.block), _layout(kernel, d)) for d in descriptors(kernel)]

    def __call__(self, buffers: Sequence[Tensor], symbols: Sequence[int]) -> list[TensorDescriptor]:
        """Return the descriptors for one launch, in order."""
        found = []
        for number, start, block, layout in self._made:
            shape, strides = layout(*symbols)
            found.append(TensorDescriptor(_from(buffers[number], start), list(shape), list(strides), block))
        return found


def fits(kernel: Kernel) -> Callable[[Sequence[Tensor], Sequence[int]], bool]:
    """Return a function that decides whether descriptors can describe the buffers of a launch.

    The schedule checks what is static. A buffer may be an unaligned view, and a dynamic size may need 64-bit indices.
    """
    numbers = {buffer.name: i for i, buffer in enumerate(kernel.given)}
    found = descriptors(kernel)
    described = sorted({numbers[d.buffer] for d in found})
    dynamic = {n for d in found for n in d.shape if not isinstance(n, int)}
    largest = eval(f"lambda {', '.join(kernel.symbols)}: max(1, {', '.join(map(PYTHON.print, dynamic)) or 1})")

    def fit(buffers: Sequence[Tensor], symbols: Sequence[int]) -> bool:
        if any(buffers[i].data_ptr() % ALIGNMENT for i in described):
            return False
        return not dynamic or largest(*symbols) <= MAX_DIM

    return fit


def _layout(kernel: Kernel, described: Described) -> Callable[..., tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return shape and strides as a function of the kernel's symbols."""
    text = f"lambda {', '.join(kernel.symbols)}: ({sizes_text(described.shape)}, {sizes_text(described.strides)})"
    function: Callable[..., tuple[tuple[int, ...], tuple[int, ...]]] = eval(text)
    return function


def _from(buffer: Tensor, start: int) -> Tensor:
    return buffer if start == 0 else buffer.as_strided((1,), (1,), buffer.storage_offset() + start)
