"""Results of split reductions: one grid stores them, the next one loads those of all splits."""

import sympy

from fusec.codegen.tile.emitter import Emitter
from fusec.codegen.tile.kernel import Operand, Store
from fusec.ir.types import DType, Size, TensorType, contiguous_strides
from fusec.loops.affine import Affine, Axis


class PartialResults:
    """One result of every split, over some axes; the elements of a split are contiguous."""

    def __init__(self, emitter: Emitter, dtype: DType, axes: tuple[Axis, ...], splits: int, name: str) -> None:
        sizes = tuple(axis.size for axis in axes)
        self.emitter, self.axes = emitter, axes
        self.type = TensorType(dtype, sizes, contiguous_strides(sizes))
        self.buffer = emitter.add_scratch(dtype, self.type.numel * splits, name, "shared").name

    def store(self, split: Size, value: Operand) -> None:
        """Append the store of a split's result."""
        self.emitter.inner.append(Store(self.buffer, self._offset(split), value))

    def load(self, split: Size) -> str:
        """Append the load of a split's result."""
        return self.emitter.load(self.buffer, self._offset(split))

    def _offset(self, split: Size) -> sympy.Expr:
        index = tuple(Affine.of([(axis, 1)]) for axis in self.axes)
        return sympy.expand(split * self.type.numel + self.emitter.offset(index, self.type))
