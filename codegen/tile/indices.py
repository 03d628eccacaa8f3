"""Loop variables of axes, and index expressions over them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import sympy

from fusec.codegen.tile.kernel import index_symbol
from fusec.ir.types import Size, TensorType, product, same_size
from fusec.loops.affine import Affine, Axis


class Indices:
    """The loop variables of one kernel."""

    def __init__(self) -> None:
        self._names: dict[Axis, str] = {}
        self._joint: dict[tuple[tuple[Axis, ...], bool], Axis] = {}
        self._spelled: list[tuple[tuple[Axis, ...], Axis]] = []
        """Axes that open loops run over as one, and that one."""

    @property
    def sizes(self) -> dict[str, Size]:
        """The sizes of all axes so far, by the names of their loop variables."""
        return {name: axis.size for axis, name in self._names.items()}

    def axis_name(self, axis: Axis) -> str:
        """The loop variable of an axis."""
        return self._names.setdefault(axis, f"i{len(self._names)}")

    def axis_symbol(self, axis: Axis) -> sympy.Symbol:
        """The loop variable in an expression."""
        return index_symbol(self.axis_name(axis))

    def expression(self, index: Affine) -> sympy.Expr:
        """An affine index as an expression over loop variables."""
        return self._over_joint_axes(self._over_axes(index))

    def offset(self, index: tuple[Affine, ...], type: TensorType) -> sympy.Expr:
        """Return the offset of the element at ``index`` in a buffer of ``type``."""
        out: sympy.Expr = sympy.Integer(0)
        for part, stride in zip(index, type.strides, strict=True):
            out = out + self._over_axes(part) * stride
        return self._over_joint_axes(sympy.expand(out))

    def _over_axes(self, index: Affine) -> sympy.Expr:
        out = sympy.sympify(index.offset)
        for axis, coefficient in index.terms:
            out = out + self.axis_symbol(axis) * coefficient
        return sympy.expand(out)

    def _over_joint_axes(self, out: sympy.Expr) -> sympy.Expr:
        """Replace axes that loops run over as one by quotients and remainders of it, where needed."""
        for axes, joint in self._spelled:
            whole, inner = self.axis_symbol(joint), cast(Size, 1)
            runs: list[tuple[Size, Size, Size]] = []  # stride, number of steps, and elements of each
            for axis in reversed(axes):
                slope = out.coeff(self.axis_symbol(axis), 1)
                if runs and same_size(slope, runs[-1][0] * runs[-1][1]):
                    runs[-1] = (runs[-1][0], runs[-1][1] * axis.size, runs[-1][2])
                else:
                    runs.append((slope, axis.size, inner))
                inner = inner * axis.size
            out = out.subs({self.axis_symbol(axis): 0 for axis in axes})
            for i, (slope, n, below) in enumerate(runs, 1):
                place = sympy.floor(whole / below)
                out = out + slope * (place if i == len(runs) else sympy.Mod(place, n))
        return sympy.expand(out)

    def joint(self, axes: tuple[Axis, ...], apart: bool = False) -> Axis:
        """Return one axis for all of these, the last of them innermost.

        Args:
            axes: the axes.
            apart: use an axis of its own, for tiles with another number of lanes.
        """
        if len(axes) == 1 and not apart:
            return axes[0]
        size = product(tuple(axis.size for axis in axes))
        return self._joint.setdefault((axes, apart), Axis(size))

    @contextmanager
    def over(self, axes: tuple[Axis, ...], apart: bool = False) -> Iterator[Axis]:
        """Write offsets over one axis for all of these, which it yields; ``apart`` as for ``joint``."""
        axis = self.joint(axes, apart)
        if axes != (axis,):
            self._spelled.append((axes, axis))
        yield axis
        if axes != (axis,):
            self._spelled.pop()

    def parts_of(self, axis: Axis) -> tuple[Axis, ...]:
        """Return the axes that an open loop runs over as one; for any other axis itself."""
        return next((axes for axes, joint in self._spelled if joint is axis), (axis,))
