"""Classification of loop nests by the kind of schedule they take, and the legality of each kind."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fusec.errors import ScheduleError
from fusec.ir.graph import Node
from fusec.ir.types import BF16, F16, DType, estimate, product
from fusec.loops.affine import Axis
from fusec.loops.attention import Attention, find_attention
from fusec.loops.indexing import IndexedExpr, LoopNest, Output, above, below, is_even, ordered, stride, walk
from fusec.loops.updates import Move, check_updates

FEW_ROWS = 16
"""Rows of a small-M GEMM: up to this many, each thread keeps the whole left operand in its cache."""
SOME_ROWS = 256
"""Rows up to which the overhead of a vendor call exceeds its arithmetic; measured between 32 and 512."""
HALVES = frozenset({BF16, F16})
"""Dtypes that a GPU's matrix units multiply at full rate."""

Kind = Literal["pointwise", "row", "contraction", "attention"]


def any_layout(nest: LoopNest, contraction: IndexedExpr) -> Iterator[str]:
    """Accept operands of a large-M GEMM in any layout."""
    return iter(())


def no_weight_prologue(contraction: IndexedExpr) -> Iterator[str]:
    """Refuse every right operand that is not loaded."""
    yield "its right operand is computed in the same kernel"


def nothing_in_order(nest: LoopNest, shape: "Shape") -> Iterator[str]:
    """Refuse every scan, sort and scatter of a row kernel."""
    yield f"{nodes_in_order(nest, shape.scans)[0].op.name} is in the kernel"


@dataclass(frozen=True)
class Limits:
    """The kernels that a target has schedules for, and the GEMMs that are worth one on a machine."""

    small_m: int = 0
    """Rows up to which a GEMM that has a prologue is legal, of types other than halves; 0 refuses all contractions."""
    many: frozenset[DType] = frozenset()
    """Dtypes of GEMMs that may have any number of rows, as large-M GEMMs without a prologue."""
    some: frozenset[DType] = frozenset()
    """Dtypes of large-M GEMMs with up to ``SOME_ROWS`` rows, or a symbolic number of them."""
    few_halves: int = FEW_ROWS
    """Rows of half types that one block of a small-M GEMM holds; ``FEW_ROWS`` of other types."""
    byte_products: frozenset[DType] = frozenset()
    """Dtypes of bytes that are multiplied, and summed in 32 bits."""
    column_sums: bool = False
    """True if a matmul with a single row, such as one of ones, may be in the kernel of those with more."""
    weight_prologue: Callable[[IndexedExpr], Iterator[str]] = no_weight_prologue
    """Returns why a kernel cannot compute the right operand of a GEMM, such as a packed weight from its integers."""
    unpacked_rows: Callable[[IndexedExpr], int] = lambda contraction: 0
    """Returns the rows of a large-M GEMM up to which it computes its weight even if the vendor's GEMM is faster."""
    layouts: Callable[[LoopNest, IndexedExpr], Iterator[str]] = any_layout
    """Returns why the layouts of a large-M GEMM's operands are not legal."""
    moves: Callable[[LoopNest, Move], bool] = lambda nest, move: False
    """Returns whether a loop nest may move elements within the storage that it writes; see ``check_updates``."""
    in_order: Callable[[LoopNest, "Shape"], Iterator[str]] = nothing_in_order
    """Returns why a row kernel may not scan, sort or scatter along its rows as it does."""
    assumed_share: float | None = None
    """The assumed fraction of the vendor's speed of a large-M GEMM without autotuning. A large-M
    GEMM must then save time by its fusion; None where ``many`` and ``some`` are measured, and decide."""


@dataclass(frozen=True)
class Shape:
    """The kind of a nest, and the expressions and axes that its schedule is built around."""

    kind: Kind
    rows: tuple[Axis, ...]
    """The outer loops: the axes that reductions, or the left operands of contractions, have besides those summed."""
    contractions: tuple[IndexedExpr, ...] = ()
    reductions: tuple[IndexedExpr, ...] = ()
    attention: Attention | None = None
    many: bool = False
    """True if it is a large-M GEMM."""
    scans: tuple[IndexedExpr, ...] = ()
    """The scans and sorts along rows."""


def classify(nest: LoopNest, limits: Limits = Limits()) -> Shape:
    """Classify a nest.

    Raises:
        ScheduleError: where no kind of schedule covers it.
    """
    shape = _shape(nest, limits)
    check_updates(nest, shape.kind, limits.moves)
    return shape


def _shape(nest: LoopNest, limits: Limits) -> Shape:
    items = list(nest.walk())
    reductions = tuple(i for i in items if i.kind == "reduction")
    contractions = tuple(i for i in items if i.kind == "contraction")
    along = tuple(i for i in items if i.kind in ("scan", "sort"))
    scattered = [o for o in nest.outputs if scatter_of(o) is not None]
    in_order = nodes_in_order(nest, along)
    if in_order and contractions:
        raise _not_in_order(f"{in_order[0].op.name} is in the kernel")
    if contractions and any(len(r.operands) > 1 for r in reductions):
        raise ScheduleError("a reduction is over a concatenation", why="each part has its own loop")
    attention = find_attention(nest) if limits.small_m else None
    if attention is not None:
        return Shape("attention", (), contractions, reductions, attention)
    if contractions:
        return _contraction(nest, reductions, contractions, limits)
    over = (*reductions, *along)
    if not over and not scattered:
        return Shape("pointwise", ())
    rows = _rows_of(over[0]) if over else _rows_of_scatter(scattered[0])
    if any(_rows_of_scatter(o) != rows for o in scattered):
        raise ScheduleError("reductions have different rows", why="a scatter has other rows")
    for r in over:
        if _rows_of(r) != rows or rows.intersection(r.bound):
            first = over[0].node.op.name
            own, others = (
                " × ".join(str(a.size) for a in ordered(nest, axes)) or "one" for axes in (_rows_of(r), rows)
            )
            why = f"{r.node.op.name} has {own}, {first} has {others}"
            raise ScheduleError("reductions have different rows", why=why)
    shape = Shape("row", ordered(nest, rows), reductions=reductions, scans=along)
    if in_order and (why := next(limits.in_order(nest, shape), "")):
        raise _not_in_order(why)
    return shape


def nodes_in_order(nest: LoopNest, along: Iterable[IndexedExpr]) -> tuple[Node, ...]:
    """Return the scans, sorts and scatters of a nest.

    Args:
        nest: the nest.
        along: its scans and sorts.
    """
    scatters = [node for node in map(scatter_of, nest.outputs) if node is not None]
    return (*(item.node for item in along), *scatters)


def _not_in_order(why: str) -> ScheduleError:
    return ScheduleError("no generated scan, sort or scatter", why=why)


def _rows_of(item: IndexedExpr) -> frozenset[Axis]:
    """Return the axes that the operand of a reduction, scan or sort has besides those that it runs along."""
    return item.operands[0].axes.difference(item.bound)


def scatter_of(output: Output) -> Node | None:
    """Return the scatter that an output is, if it is one."""
    index = output.dynamic_index
    return index.node if index is not None and index.node.is_op("scatter") else None


def _rows_of_scatter(output: Output) -> frozenset[Axis]:
    """Return the axes of an output besides those of the dim that it is scattered along, which are in order."""
    assert output.dynamic_index is not None
    return output.axes.difference(output.index[output.dynamic_index.dim].axes)


def _contraction(
    nest: LoopNest, reductions: tuple[IndexedExpr, ...], contractions: tuple[IndexedExpr, ...], limits: Limits
) -> Shape:
    rows = max((c.operands[0].axes - set(c.bound) for c in contractions), key=len)
    inside = below(contractions)
    for c in contractions:
        why = next(_objections(c, rows, inside, limits), "")
        if why:
            raise _refused(why)
    for r in reductions:
        if r not in inside:
            raise _refused("a reduction reads its result")
        if r.axes != rows:
            raise _refused("a reduction in its prologue has other rows")
    for output in nest.outputs:
        first, *others = ordered(nest, output.axes - rows) or (None,)
        narrow = {c for c in contractions if c.axes - rows <= {first}} if others else set()
        if narrow.intersection(walk([output.root])):
            raise _refused("its result is broadcast along another dim")
    count = product(tuple(axis.size for axis in rows))
    at_once = rows_at_once(contractions, limits.few_halves)
    most = limits.small_m * at_once // FEW_ROWS
    few = isinstance(count, int) and count <= at_once
    many = limits.many if isinstance(count, int) and count > SOME_ROWS else limits.many | limits.some
    why = next(_large_m_objections(nest, contractions, replace(limits, many=many)), "")
    if not (few or why):
        return Shape("contraction", ordered(nest, rows), contractions, reductions, many=True)
    if not isinstance(count, int) or count > most:
        why = f"; no large-M GEMM: {why}" if limits.many | limits.some else ""
        raise ScheduleError("too many rows for a small-M GEMM", why=f"{count} rows, small_m allows {most}{why}")
    return Shape("contraction", ordered(nest, rows), contractions, reductions)


def _refused(why: str) -> ScheduleError:
    return ScheduleError("no generated GEMM", why=why)


def rows_at_once(contractions: Iterable[IndexedExpr], halves: int) -> int:
    """Return the rows of one block of a small-M GEMM: ``halves`` for half types, else ``FEW_ROWS``."""
    return halves if all(c.operands[1].dtype in HALVES for c in contractions) else FEW_ROWS


def is_computed(contraction: IndexedExpr) -> bool:
    """Return whether a kernel computes the right operand of a matmul, rather than loads it from a matrix."""
    return len(contraction.pairs) > 1 or contraction.operands[1].kind != "load"


def weight_of(contraction: IndexedExpr) -> IndexedExpr:
    """Return the largest load that the right operand of a matmul is, or is computed from."""
    loads = [i for i in walk(right for _, right in contraction.pairs) if i.kind == "load"]
    return max(loads, key=lambda i: estimate(product(tuple(a.size for a in i.axes))))


def stored_bits(contraction: IndexedExpr) -> float:
    """Return the bits in memory for each element of the right operand of a matmul."""
    weight = weight_of(contraction)
    stored = 8 * weight.dtype.bytes * estimate(product(tuple(a.size for a in weight.axes)))
    elements = sum(estimate(product(tuple(a.size for a in right.axes))) for _, right in contraction.pairs)
    return stored / max(1, elements)


def _large_m_objections(nest: LoopNest, contractions: tuple[IndexedExpr, ...], limits: Limits) -> Iterator[str]:
    """Yield why a nest cannot be a large-M GEMM."""
    dependent = above(nest, contractions)
    if len({c.operands[0].axes.difference(c.bound) for c in contractions}) > 1:
        yield "its matmuls have different rows"
    if any(o.root not in dependent for o in nest.outputs):
        yield "an output does not depend on a matmul"
    for c in contractions:
        left = c.operands[0]
        rows = product(tuple(a.size for a in left.axes if a not in c.bound))
        unpacked = is_computed(c) and isinstance(rows, int) and rows <= limits.unpacked_rows(c)
        if left.dtype not in limits.many and not unpacked:  # both operands have one type, or are bytes
            yield f"the vendor's GEMM of {left.dtype.name} is faster on this machine"
        if any(left.kind != "load" for left, _ in c.pairs):
            yield "its left operand is computed in the same kernel"
        else:
            yield from limits.layouts(nest, c)


def _objections(c: IndexedExpr, rows: frozenset[Axis], inside: set[IndexedExpr], limits: Limits) -> Iterator[str]:
    """Yield why a contraction has no generated GEMM."""
    if c.dtype != c.operands[0].dtype and not limits.byte_products.issuperset(o.dtype for o in c.operands):
        yield "it is of bytes"
    if c in inside:
        yield "another matmul of the kernel reads its result"
    bound = set(c.bound)
    for left, right in c.pairs:
        if right.axes & rows:
            yield "it is batched"
        if left.axes - bound != rows and (left.axes - bound or not limits.column_sums):
            yield "another matmul of the kernel has other rows"
        if not bound or not (left.axes >= bound or left.kind == "constant") or not right.axes >= bound:
            yield "an operand lacks the summed dim"
        if right.axes <= bound:
            yield "it has one column"
    unknown = [a for a in (*c.axes - rows, *c.bound) if not isinstance(a.size, int)]
    if unknown:
        yield f"the size {unknown[0].size} is not known at compile time"
    yield from limits.weight_prologue(c) if is_computed(c) else _weight_objections(c)


def prologue_objections(items: Iterable[IndexedExpr], kinds: Collection[str]) -> Iterator[str]:
    """Yield why a right operand is not computed from these expressions, with those of some kinds."""
    items = list(items)
    if others := [i.kind for i in items if i.kind not in kinds]:
        yield f"a {others[0]} is in the prologue of its right operand"
    elif not any(i.kind == "load" for i in items):
        yield "its right operand is computed from indices alone"


def _weight_objections(c: IndexedExpr) -> Iterator[str]:
    """Yield why the right operand of a contraction, which is loaded, is no matrix in memory."""
    ((_, right),) = c.pairs
    columns = [a for a in right.axes if a not in c.bound]
    if not any(stride(right, a) == 1 for a in (*c.bound[-1:], *columns)):
        yield "its weight is not contiguous"
    if not is_even(right, c.bound):
        yield "the summed dims of its weight are not contiguous"
