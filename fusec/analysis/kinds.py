"""Which kind of kernel a located region is, and whether it is one at all."""

from dataclasses import dataclass
from typing import Literal

from fusec.analysis.affine import Axis
from fusec.analysis.indexing import Located, Nest, below
from fusec.errors import ScheduleError
from fusec.ir.types import Size

Kind = Literal["pointwise", "row", "contraction"]


@dataclass(frozen=True)
class Shape:
    """The loops of a nest, sorted by what they do."""

    kind: Kind
    rows: tuple[Axis, ...]
    """Axes that are the same for a whole reduction, or for all of a contraction's left operand: outer loops."""
    contractions: tuple[Located, ...] = ()
    reductions: tuple[Located, ...] = ()


def classify(nest: Nest, small_m: int = 0) -> Shape:
    """The kind of a nest.

    Args:
        nest: the located region.
        small_m: the largest number of rows of a contraction; 0 refuses all contractions.

    Raises:
        ScheduleError: where no schedule covers it.
    """
    items = list(nest.walk())
    reductions = tuple(i for i in items if i.kind == "reduction")
    contractions = tuple(i for i in items if i.kind == "contraction")
    if contractions:
        return _contraction(nest, reductions, contractions, small_m)
    if not reductions:
        return Shape("pointwise", ())
    rows = reductions[0].axes
    if any(r.axes != rows or rows.intersection(r.bound) for r in reductions):
        raise ScheduleError("reductions run over different rows")
    return Shape("row", ordered(nest, rows), reductions=reductions)


def _contraction(nest: Nest, reductions: tuple[Located, ...], contractions: tuple[Located, ...], small_m: int) -> Shape:
    rows = contractions[0].operands[0].axes - set(contractions[0].bound)
    inside = below(contractions)
    for c in contractions:
        left, right = c.operands
        if right.kind != "load" or left.axes - set(c.bound) != rows or right.axes & rows:
            raise ScheduleError("a contraction whose right operand is not a plain matrix, or with other rows")
        if not c.bound or c in inside or not (left.axes.issuperset(c.bound) and right.axes.issuperset(c.bound)):
            raise ScheduleError("a contraction over nothing, or one below another")
        if right.axes <= set(c.bound):
            raise ScheduleError("a contraction with a single column")
        if any(not isinstance(a.size, int) for a in (*c.axes, *c.bound)):
            raise ScheduleError("a contraction over a range that is not known")
        if not any(stride(right, a) == 1 for a in (c.bound[-1], *(a for a in right.axes if a not in c.bound))):
            raise ScheduleError("a weight whose elements do not lie side by side")
        if any(stride(right, a) != stride(right, b) * b.size for a, b in zip(c.bound, c.bound[1:], strict=False)):
            raise ScheduleError("the rows of a weight do not lie in memory as they are contracted")
    if any(r not in inside or r.axes != rows for r in reductions):
        raise ScheduleError("a reduction of what a contraction made, or over other rows")
    count = 1
    for axis in rows:
        count = count * axis.size if isinstance(axis.size, int) else small_m + 1
    if count > small_m:
        raise ScheduleError("too many rows for a generated matrix product", why=f"{count} of at most {small_m}")
    return Shape("contraction", ordered(nest, rows), contractions, reductions)


def stride(item: Located, axis: Axis) -> Size:
    """What one step along an axis adds to the place of a loaded element."""
    out: Size = 0
    for part, step in zip(item.index, item.value.tensor.strides, strict=True):
        out = out + part.coefficient(axis) * step
    return out


def ordered(nest: Nest, axes: frozenset[Axis]) -> tuple[Axis, ...]:
    """Axes in the order of the dims of the widest output, any others behind them."""
    known = [a for dim in nest.axes for a in dim if a in axes]
    return (*known, *sorted(axes.difference(known), key=lambda a: a.serial))
