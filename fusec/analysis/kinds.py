"""Which kind of kernel a located region is, and whether it is one at all."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fusec.analysis.affine import Axis
from fusec.analysis.attention import Attention, find_attention
from fusec.analysis.indexing import Located, Nest, below, stride, walk
from fusec.analysis.updates import check_updates
from fusec.errors import ScheduleError

Kind = Literal["pointwise", "row", "contraction", "attention"]


@dataclass(frozen=True)
class Shape:
    """The loops of a nest, sorted by what they do."""

    kind: Kind
    rows: tuple[Axis, ...]
    """Axes that are the same for a whole reduction, or for all of a contraction's left operand: outer loops."""
    contractions: tuple[Located, ...] = ()
    reductions: tuple[Located, ...] = ()
    attention: Attention | None = None


def classify(nest: Nest, small_m: int = 0) -> Shape:
    """The kind of a nest, which may be a kernel.

    Args:
        nest: the located region.
        small_m: the largest number of rows of a contraction; 0 refuses all contractions.

    Raises:
        ScheduleError: where no schedule covers it.
    """
    shape = _shape(nest, small_m)
    check_updates(nest, shape.kind)
    return shape


def _shape(nest: Nest, small_m: int) -> Shape:
    items = list(nest.walk())
    reductions = tuple(i for i in items if i.kind == "reduction")
    contractions = tuple(i for i in items if i.kind == "contraction")
    attention = find_attention(nest) if small_m else None
    if attention is not None:
        return Shape("attention", (), contractions, reductions, attention)
    if contractions:
        return _contraction(nest, reductions, contractions, small_m)
    if not reductions:
        return Shape("pointwise", ())
    rows = reductions[0].axes
    for r in reductions:
        if r.axes != rows or rows.intersection(r.bound):
            first = reductions[0].node.op.name
            own, others = (" × ".join(str(a.size) for a in ordered(nest, axes)) or "one" for axes in (r.axes, rows))
            why = f"{r.node.op.name} has {own} of them, {first} has {others}"
            raise ScheduleError("reductions run over different rows", why=why)
    return Shape("row", ordered(nest, rows), reductions=reductions)


def _contraction(nest: Nest, reductions: tuple[Located, ...], contractions: tuple[Located, ...], small_m: int) -> Shape:
    rows = contractions[0].operands[0].axes - set(contractions[0].bound)
    inside = below(contractions)
    for c in contractions:
        why = next(_objections(c, rows, inside), "")
        if why:
            raise ScheduleError("no generated matrix product", why=why)
    for r in reductions:
        if r not in inside:
            raise ScheduleError("no generated matrix product", why="a reduction reads its result")
        if r.axes != rows:
            raise ScheduleError("no generated matrix product", why="a reduction before it runs over other rows")
    for output in nest.outputs:
        first, *others = ordered(nest, output.axes - rows) or (None,)
        narrow = {c for c in contractions if c.axes - rows <= {first}} if others else set()
        if narrow.intersection(walk([output.root])):
            raise ScheduleError("no generated matrix product", why="its result is spread over further dims")
    count = 1
    for axis in rows:
        count = count * axis.size if isinstance(axis.size, int) else small_m + 1
    if count > small_m:
        raise ScheduleError("too many rows for a generated matrix product", why=f"{count} of at most {small_m}")
    return Shape("contraction", ordered(nest, rows), contractions, reductions)


def _objections(c: Located, rows: frozenset[Axis], inside: set[Located]) -> Iterator[str]:
    """Why a contraction has no schedule of its own."""
    left, right = c.operands
    bound = set(c.bound)
    if right.kind != "load":
        yield "its right operand is computed in the same kernel"
    if right.axes & rows:
        yield "it is a batch of products"
    if left.axes - bound != rows:
        yield "another product of the kernel has other rows"
    if c in inside:
        yield "another product of the kernel reads its result"
    if not bound or not left.axes >= bound or not right.axes >= bound:
        yield "an operand lacks the dim that is summed"
    if right.axes <= bound:
        yield "it has a single column"
    unknown = [a for a in (*c.axes, *c.bound) if not isinstance(a.size, int)]
    if unknown:
        yield f"the size {unknown[0].size} is not known when the kernel is made"
    columns = [a for a in right.axes if a not in bound]
    if not any(stride(right, a) == 1 for a in (*c.bound[-1:], *columns)):
        yield "the elements of its weight do not lie side by side"
    if any(stride(right, a) != stride(right, b) * b.size for a, b in zip(c.bound, c.bound[1:], strict=False)):
        yield "its weight is not laid out in the order in which it is summed"


def ordered(nest: Nest, axes: frozenset[Axis]) -> tuple[Axis, ...]:
    """Axes in the order of the dims of the widest output, any others behind them."""
    known = [a for dim in nest.axes for a in dim if a in axes]
    return (*known, *sorted(axes.difference(known), key=lambda a: a.serial))
