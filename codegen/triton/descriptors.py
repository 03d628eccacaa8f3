"""Tensor descriptors as arguments of a launch: made anew each time, for wherever memory lies then.

They are made on the host (Triton's ``TensorDescriptor``) and go along by value, so that a recorded launch keeps its
own. Made in a kernel instead, each program would write its own to memory and wait for that, and Triton would ask
whoever launches for that memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusec.codegen.tile.kernel import Kernel
from fusec.codegen.tile.sizes import PYTHON, sizes_text
from fusec.codegen.triton.schedules.descriptors import ALIGNMENT, MAX_DIM
from fusec.codegen.triton.signature import Described, descriptors


class Descriptors:
    """What makes the descriptors of one kernel.

    Args:
        kernel: what is launched, one grid of it.
    """

    def __init__(self, kernel: Kernel) -> None:
        numbers = {buffer.name: i for i, buffer in enumerate(kernel.buffers)}
        self._made = [(numbers[d.buffer], d.start, list(d.block), _layout(kernel, d)) for d in descriptors(kernel)]

    def __call__(self, buffers: Sequence[Tensor], symbols: Sequence[int]) -> list[TensorDescriptor]:
        """Those for one launch, in order."""
        found = []
        for number, start, block, layout in self._made:
            shape, strides = layout(*symbols)
            found.append(TensorDescriptor(_from(buffers[number], start), list(shape), list(strides), block))
        return found


def fits(kernel: Kernel) -> Callable[[Sequence[Tensor], Sequence[int]], bool]:
    """Whether memory and sizes of a launch are such as descriptors can tell of; what the schedule knows is.

    Memory may be a view that begins anywhere, and a size that is not known may be too large for places of 32 bits.
    """
    numbers = {buffer.name: i for i, buffer in enumerate(kernel.given)}
    found = descriptors(kernel)
    described = sorted({numbers[d.buffer] for d in found})
    unknown = {n for d in found for n in d.shape if not isinstance(n, int)}
    most = eval(f"lambda {', '.join(kernel.symbols)}: max(1, {', '.join(map(PYTHON.print, unknown)) or 1})")

    def fit(buffers: Sequence[Tensor], symbols: Sequence[int]) -> bool:
        if any(buffers[i].data_ptr() % ALIGNMENT for i in described):
            return False
        return not unknown or most(*symbols) <= MAX_DIM

    return fit


def without(kernel: Kernel) -> Kernel:
    """The same kernel with loads that go by address."""
    return replace(kernel, config=replace(kernel.config, descriptors=False))


def _layout(kernel: Kernel, described: Described) -> Callable[..., tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shape and strides as a function of the kernel's symbols."""
    text = f"lambda {', '.join(kernel.symbols)}: ({sizes_text(described.shape)}, {sizes_text(described.strides)})"
    function: Callable[..., tuple[tuple[int, ...], tuple[int, ...]]] = eval(text)
    return function


def _from(buffer: Tensor, start: int) -> Tensor:
    return buffer if start == 0 else buffer.as_strided((1,), (1,), buffer.storage_offset() + start)
