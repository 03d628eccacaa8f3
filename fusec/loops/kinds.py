"""Which kind of kernel a located region is, and whether it is one at all."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fusec.errors import ScheduleError
from fusec.ir.types import BF16, F16, DType, product
from fusec.loops.affine import Axis
from fusec.loops.attention import Attention, find_attention
from fusec.loops.indexing import IndexedExpr, LoopNest, above, below, stride, walk
from fusec.loops.updates import Move, check_updates

FEW_ROWS = 16
"""Rows of a small-M GEMM: up to so many, every thread keeps the whole left operand in its cache."""
SOME_ROWS = 256
"""Rows up to which a vendor call costs more than its arithmetic takes; measured between 32 and 512."""
HALVES = frozenset({BF16, F16})
"""Element types that a GPU's matrix units multiply at full rate."""

Kind = Literal["pointwise", "row", "contraction", "attention"]


def anything(nest: LoopNest, contraction: IndexedExpr) -> Iterator[str]:
    """Operands of a large-M GEMM in any layout are legal."""
    return iter(())


@dataclass(frozen=True)
class Limits:
    """The kernels that a target has schedules for, and the GEMMs that are worth one on a machine."""

    small_m: int = 0
    """Rows up to which a GEMM that has a prologue is legal, of types other than halves; 0 refuses all contractions."""
    many: frozenset[DType] = frozenset()
    """Element types of which a GEMM without a prologue may have any number of rows."""
    some: frozenset[DType] = frozenset()
    """Those of which it may have up to ``SOME_ROWS``, or a number that is not known."""
    few_halves: int = FEW_ROWS
    """Rows of half types up to which a schedule takes all at once; ``FEW_ROWS`` of other types."""
    layouts: Callable[[LoopNest, IndexedExpr], Iterator[str]] = anything
    """Returns what keeps the operands of a large-M GEMM from being loaded as they lie in memory."""
    moves: Callable[[LoopNest, Move], bool] = lambda nest, move: False
    """Returns whether a loop nest may move elements within the storage that it writes; see ``check_updates``."""
    assumed_share: float | None = None
    """The share of the vendor's speed that a large-M GEMM is assumed to reach where it will not be timed. A large-M
    GEMM must then save time by its fusion; None where ``many`` and ``some`` are measured, and decide."""


@dataclass(frozen=True)
class Shape:
    """The loops of a nest, sorted by what they do."""

    kind: Kind
    rows: tuple[Axis, ...]
    """Axes that are the same for a whole reduction, or for all of a contraction's left operand: outer loops."""
    contractions: tuple[IndexedExpr, ...] = ()
    reductions: tuple[IndexedExpr, ...] = ()
    attention: Attention | None = None
    many: bool = False
    """Whether a contraction has so many rows that they are taken in blocks."""


def classify(nest: LoopNest, limits: Limits = Limits()) -> Shape:
    """The kind of a nest, which may be a kernel.

    Raises:
        ScheduleError: where no schedule covers it.
    """
    shape = _shape(nest, limits)
    check_updates(nest, shape.kind, limits.moves)
    return shape


def _shape(nest: LoopNest, limits: Limits) -> Shape:
    items = list(nest.walk())
    reductions = tuple(i for i in items if i.kind == "reduction")
    contractions = tuple(i for i in items if i.kind == "contraction")
    attention = find_attention(nest) if limits.small_m else None
    if attention is not None:
        return Shape("attention", (), contractions, reductions, attention)
    if contractions:
        return _contraction(nest, reductions, contractions, limits)
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


def _contraction(
    nest: LoopNest, reductions: tuple[IndexedExpr, ...], contractions: tuple[IndexedExpr, ...], limits: Limits
) -> Shape:
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
    count = product(tuple(axis.size for axis in rows))
    at_once = rows_at_once(contractions, limits.few_halves)
    most = limits.small_m * at_once // FEW_ROWS
    few = isinstance(count, int) and count <= at_once
    many = limits.many if isinstance(count, int) and count > SOME_ROWS else limits.many | limits.some
    why = next(_objections_to_many(nest, contractions, replace(limits, many=many)), "")
    if not (few or why):
        return Shape("contraction", ordered(nest, rows), contractions, reductions, many=True)
    if not isinstance(count, int) or count > most:
        why = f"; in blocks: {why}" if limits.many | limits.some else ""
        raise ScheduleError("too many rows for a generated matrix product", why=f"{count} of at most {most}{why}")
    return Shape("contraction", ordered(nest, rows), contractions, reductions)


def rows_at_once(contractions: Iterable[IndexedExpr], halves: int) -> int:
    """Rows up to which products have a schedule for few, which of half types are so many."""
    return halves if all(c.operands[1].dtype in HALVES for c in contractions) else FEW_ROWS


def _objections_to_many(nest: LoopNest, contractions: tuple[IndexedExpr, ...], limits: Limits) -> Iterator[str]:
    """Why the rows of a kernel's products cannot be taken in blocks."""
    needy = above(nest, contractions)
    if any(o.root not in needy for o in nest.outputs):
        yield "another result of the kernel needs no product"
    for c in contractions:
        left = c.operands[0]
        if left.dtype not in limits.many:  # the right operand's too, as of any product
            yield f"the machine's library multiplies {left.dtype.name} better"
        if left.kind != "load":
            yield "its left operand is computed in the same kernel"
        else:
            yield from limits.layouts(nest, c)


def _objections(c: IndexedExpr, rows: frozenset[Axis], inside: set[IndexedExpr]) -> Iterator[str]:
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
    unknown = [a for a in (*c.axes - rows, *c.bound) if not isinstance(a.size, int)]
    if unknown:
        yield f"the size {unknown[0].size} is not known when the kernel is made"
    columns = [a for a in right.axes if a not in bound]
    if not any(stride(right, a) == 1 for a in (*c.bound[-1:], *columns)):
        yield "the elements of its weight do not lie side by side"
    if any(stride(right, a) != stride(right, b) * b.size for a, b in zip(c.bound, c.bound[1:], strict=False)):
        yield "its weight is not laid out in the order in which it is summed"


def ordered(nest: LoopNest, axes: frozenset[Axis]) -> tuple[Axis, ...]:
    """Axes in the order of the dims of the widest output, any others behind them."""
    known = [a for dim in nest.axes for a in dim if a in axes]
    return (*known, *sorted(axes.difference(known), key=lambda a: a.serial))
