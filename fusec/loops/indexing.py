"""Lowering of a region's body to a loop nest of indexed expressions, with views folded into the indices.

``lower_to_loops`` decides whether a region is one loop nest; schedules turn the nest into a kernel.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from itertools import product as combinations

from fusec.errors import ScheduleError
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait, split_spec
from fusec.ir.types import DType, Size, estimate, same_shape, same_size
from fusec.loops.affine import Affine, Axis, NotAffine, Unaligned, at_least, merged_dims, reindex
from fusec.loops.intervals import interval
from fusec.loops.sorts import sort_of
from fusec.loops.splits import Segment, Splits


@dataclass(frozen=True, eq=False, repr=False)
class IndexedExpr:
    """One operation at one index. Compared by identity; a nest holds each equal expression once."""

    kind: str
    """``load``, ``lookup``, ``constant``, ``index``, ``pointwise``, ``reduction``, ``scan``, ``sort`` or
    ``contraction``."""
    value: Value
    index: tuple[Affine, ...]
    operands: "tuple[IndexedExpr, ...]" = ()
    """For a contraction its ``pairs``, one after another."""
    bound: tuple[Axis, ...] = ()
    """The axes that a reduction or contraction reduces, or that a scan or sort runs along; of a lookup, the axis in
    place of its dynamic index."""
    axes: frozenset[Axis] = frozenset()
    """The axes that its value depends on."""
    depth: int = 0
    """The largest number of reductions, scans, sorts and contractions on a path to its operands, itself included."""
    dynamic_index: "DynamicIndex | None" = None
    """The index of a lookup."""

    @property
    def node(self) -> Node:
        """The node that produces its value; a load has none."""
        assert self.value.producer is not None
        return self.value.producer

    @property
    def dtype(self) -> DType:
        """The dtype of its value."""
        return self.value.dtype

    @property
    def pairs(self) -> "tuple[tuple[IndexedExpr, IndexedExpr], ...]":
        """The left and the right operand of a contraction, for each segment of its summed dims."""
        return tuple(zip(self.operands[::2], self.operands[1::2], strict=True))

    def __repr__(self) -> str:
        name = self.value.producer.op.name if self.value.producer else self.value.name
        return f"<{self.kind} {name} at {list(self.index)}>"


@dataclass(frozen=True)
class DynamicIndex:
    """An index along one dim that is a value computed at run time."""

    node: Node
    """The store or lookup; its first operand has the dim."""
    dim: int
    value: IndexedExpr

    @property
    def length(self) -> Size:
        """The length of the dim: the exclusive bound of the value."""
        return self.node.operands[0].shape[self.dim]

    @property
    def is_bounded(self) -> bool:
        """True if the value is proven to be in range, so that nothing has to check it."""
        values = interval(self.value.value)
        return values is not None and values[0] >= 0 and at_least(self.length, values[1] + 1)


@dataclass(frozen=True)
class Output:
    """A store to one output of the region over one segment of its range."""

    position: int
    """The number of the output in the body."""
    root: IndexedExpr
    """The expression that is stored."""
    index: tuple[Affine, ...]
    """The index of the element in the output; of a write, in the value that is written."""
    destination: Value | None = None
    """The input whose storage a write updates."""
    dynamic_index: DynamicIndex | None = None
    """For a write at dynamic rows, the index in the destination along their dim."""

    @property
    def axes(self) -> frozenset[Axis]:
        """The axes of the loops around the store."""
        return frozenset(axis for part in self.index for axis in part.axes)


@dataclass
class LoopNest:
    """The outputs of a region as indexed expressions over common loops."""

    outputs: list[Output]
    axes: tuple[tuple[Axis, ...], ...]
    """For each dim of the widest output its axes, outer first, of all segments; then the axes of other outputs."""

    def walk(self) -> Iterator[IndexedExpr]:
        """Yield every expression once, operands first."""
        stored_at = [o.dynamic_index.value for o in self.outputs if o.dynamic_index is not None]
        return walk([*(o.root for o in self.outputs), *stored_at])

    def dynamic_indices(self) -> list[DynamicIndex]:
        """Return the dynamic indices that are not proven to be in range; they are checked before anything is stored."""
        stored_at = [o.dynamic_index for o in self.outputs if o.dynamic_index is not None]
        indices = [*stored_at, *(i.dynamic_index for i in self.walk() if i.dynamic_index is not None)]
        return [index for index in indices if not index.is_bounded]


_MAX_SPLITS = 24


def lower_to_loops(body: Graph) -> LoopNest:
    """Lower every output of a region.

    Raises:
        ScheduleError: where the outputs have no common loop nest, or an index is not affine.
    """
    shape = max((stored_value(v).shape for v in body.outputs), key=_extent)
    splits = Splits()
    for _ in range(_MAX_SPLITS):
        try:
            return _Lowering(shape, splits).run(body)
        except Unaligned as split:
            splits.add(split)
        except NotAffine as reason:
            raise ScheduleError("a region has no affine loop nest", why=str(reason)) from reason
    raise ScheduleError("a region needs too many loops", why=f"its axes are split more than {_MAX_SPLITS} times")


def stored_value(output: Value) -> Value:
    """Return what a region computes for an output: of a write, the value that is written."""
    node = output.producer
    return node.operands[1] if node is not None and node.has(Trait.WRITE) else output


def dynamically_indexed(body: Graph) -> list[Node]:
    """Return the nodes of a region's body that store or load at dynamic indices, in order."""
    return [n for n in body.nodes if n.has(Trait.LOOKUP) or (n.has(Trait.WRITE) and "dim" in n.attributes)]


def _extent(shape: tuple[Size, ...]) -> tuple[int, int]:
    return math.prod(map(estimate, shape)), len(shape)


class _Lowering:
    """One attempt to lower a body with a fixed set of splits of axes."""

    def __init__(self, shape: tuple[Size, ...], splits: Splits) -> None:
        self.splits = splits
        self.shape = shape
        self.memo: dict[tuple[Value, tuple[Affine, ...]], IndexedExpr] = {}
        self.pool: list[tuple[list[Segment], Size]] = []
        """Loop variables of reductions, of the dims, of contractions. A reduction takes the last one not in use."""
        self.contracted = 0
        self.made: dict[tuple[str, Size], Axis] = {}
        self.extra: dict[Axis, None] = {}
        """Axes of outputs that are not in the widest one."""
        self.dims = [splits.segments_of(f"d{d}", n, self.made) for d, n in enumerate(shape)]
        self.axes = tuple(tuple(dict.fromkeys(a for p in parts for a in p.axes)) for parts in self.dims)
        for parts, n in zip(self.dims, shape, strict=True):
            if len(parts) == 1 and n != 1:
                self.pool.append((parts, n))

    def run(self, body: Graph) -> LoopNest:
        outputs: list[Output] = []
        values = [stored_value(value) for value in body.outputs]
        for position in sorted(range(len(values)), key=lambda i: _extent(values[i].shape), reverse=True):
            for index in self._segments(values[position]):
                outputs.append(self._output(position, body.outputs[position], values[position], index))
        known = {a for dim in self.axes for a in dim}
        return LoopNest(outputs, (*self.axes, tuple(a for a in self.extra if a not in known)))

    def _output(self, position: int, value: Value, stored: Value, index: tuple[Affine, ...]) -> Output:
        axes = [a for part in index for a in dict.fromkeys(part.axes)]
        if len(set(axes)) != len(axes):
            raise ScheduleError("two dims of an output have one loop", why=f"the loops are {self.shape}")
        root, node = self.at(stored, index), value.producer
        if node is None or stored is value:
            return Output(position, root, index)
        destination, dynamic_index = node.operands[0], None
        if destination.producer is not None:
            raise ScheduleError("a kernel writes to a view")
        if "dim" in node.attributes:
            d = node.attributes["dim"] % len(index)
            at = index if node.is_op("scatter") else (index[d],)
            dynamic_index = DynamicIndex(node, d, self.at(node.operands[2], at))
        return Output(position, root, index, destination, dynamic_index)

    def _segments(self, value: Value) -> list[tuple[Affine, ...]]:
        """Return one index for each segment of an output, its dims aligned with those of the widest output."""
        shape = value.shape
        if groups := merged_dims(self.shape, shape):
            return self._flattened(groups)
        if len(shape) > len(self.shape):
            if any(n != 1 for n in shape[: len(shape) - len(self.shape)]):
                raise ScheduleError("outputs have different shapes", why=f"{shape} and {self.shape}")
            lead = (Affine(),) * (len(shape) - len(self.shape))
            shape = shape[len(lead) :]
        else:
            lead = ()
        segments: list[tuple[Affine, ...]] = [lead]
        offset = len(self.shape) - len(shape)
        equal = [d for d, n in enumerate(shape) if n != 1 and same_size(n, self.shape[d + offset])]
        aligned = {a for d in equal for part in self.dims[d + offset] for a in part.axes}
        for d, n in enumerate(shape):
            if n == 1:
                segments = [(*segment, Affine()) for segment in segments]
            elif d in equal:
                indices = [part.index for part in self.dims[d + offset]]
                segments = [(*segment, part) for segment in segments for part in indices]
            else:
                taken = {a for segment in segments for position in segment for a in position.axes}
                parts = self._bind(n, taken | aligned)
                self.extra.update(dict.fromkeys(a for part in parts for a in part.axes))
                segments = [(*segment, part.index) for segment in segments for part in parts]
        if len(segments) > 16:
            raise ScheduleError("an output has too many segments", why=f"{len(segments)} of at most 16")
        return segments

    def _flattened(self, groups: list[list[int]]) -> list[tuple[Affine, ...]]:
        """Return the indices of an output whose dims each merge neighbouring dims of the widest output."""
        segments: list[tuple[Affine, ...]] = [()]
        for group in groups:
            indices = [Affine()]
            for d in group:
                indices = [outer.scaled(self.shape[d]) + part.index for outer in indices for part in self.dims[d]]
            segments = [(*segment, index) for segment in segments for index in indices]
        return segments

    def at(self, value: Value, index: tuple[Affine, ...]) -> IndexedExpr:
        """Return the expression of ``value`` at ``index``."""
        key = (value, index)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._lower(value, index)
        return found

    def _lower(self, value: Value, index: tuple[Affine, ...]) -> IndexedExpr:
        node = value.producer
        axes = frozenset(axis for part in index for axis in part.axes)
        if node is None:
            return IndexedExpr("load", value, index, axes=axes)
        if node.is_op("constant", "size"):
            return IndexedExpr("constant", value, ())
        if node.is_op("iota"):
            return IndexedExpr("index", value, index, axes=axes)
        if node.has(Trait.VIEW):
            return self._through_view(node, index)
        if node.is_op("write") and "dim" not in node.attributes:
            return self.at(node.operands[1], index)
        if node.has(Trait.POINTWISE):
            operands = tuple(self.at(v, broadcast_index(v.shape, value.shape, index)) for v in node.operands)
            return _expression("pointwise", value, index, operands)
        if node.has(Trait.REDUCTION):
            return self._reduction(node, index)
        if node.has(Trait.SCAN):
            return self._scan(node, index)
        if (sort := sort_of(node)) is not None:
            return self._sort(node, sort, index)
        if node.has(Trait.CONTRACTION):
            return self._contraction(node, index)
        if node.has(Trait.LOOKUP):
            return self._lookup(node, index)
        raise ScheduleError(f"{node.op.name} cannot be part of a kernel")

    def _through_view(self, node: Node, index: tuple[Affine, ...]) -> IndexedExpr:
        shape = node.result.shape
        if node.is_op("concat"):
            return self._concat(node, index)
        (x,) = node.operands
        if node.is_op("permute"):
            inner: list[Affine] = [Affine()] * len(index)
            for position, d in zip(index, node.attributes["dims"], strict=True):
                inner[d] = position
            return self.at(x, tuple(inner))
        if node.is_op("slice"):
            d = node.attributes["dim"]
            moved = list(index)
            moved[d] = index[d].scaled(node.attributes["step"]) + Affine(offset=node.attributes["start"])
            return self.at(x, tuple(moved))
        if node.is_op("window"):
            d, (*outside, within) = node.attributes["dim"], index
            outside[d] = outside[d].scaled(node.attributes["step"]) + within
            return self.at(x, tuple(outside))
        if node.is_op("expand"):
            return self.at(x, broadcast_index(x.shape, shape, index))
        return self.at(x, reindex(index, shape, x.shape))

    def _concat(self, node: Node, index: tuple[Affine, ...]) -> IndexedExpr:
        d = node.attributes["dim"]
        position = index[d]
        low, high = position.offset, position.maximum()
        if not isinstance(low, int) or not isinstance(high, int):
            raise NotAffine("a concatenation is along a symbolic dim")
        start = 0
        for x in node.operands:
            n = x.shape[d]
            if not isinstance(n, int):
                raise NotAffine("a part of a concatenation has a symbolic size")
            if start <= low and high < start + n:
                moved = list(index)
                moved[d] = Affine(position.terms, low - start)
                return self.at(x, tuple(moved))
            if low < start + n <= high:
                self._split_at(position, start + n)
            start += n
        raise NotAffine(f"index {position} is out of bounds of a concatenation of length {start}")

    def _split_at(self, position: Affine, point: int) -> None:
        """Raise Unaligned, so that the axis of ``position`` is split where its value reaches ``point``."""
        axis, coefficient = max(position.terms, key=lambda term: term[1])
        steps, rest = divmod(point - int(position.offset), int(coefficient))
        if rest or (len(position.terms) > 1 and steps >= axis.size):
            raise NotAffine("a part of a concatenation ends within an inner loop")
        raise Unaligned(axis, segment=steps)

    def _reduction(self, node: Node, index: tuple[Affine, ...]) -> IndexedExpr:
        """Return a reduction; a sum over a concatenation of equal parts has an operand for each."""
        (x,) = node.operands
        taken, reduced = {axis for part in index for axis in part.axes}, dict[int, list[Segment]]()
        for d in node.attributes["dims"]:
            if x.shape[d] != 1:
                reduced[d] = self._bind(x.shape[d], taken)
                taken.update(axis for part in reduced[d] for axis in part.axes)
        operands, bounds = list[IndexedExpr](), set[tuple[Axis, ...]]()
        for parts in combinations(*reduced.values()):
            inner = list(index)
            for d, part in zip(reduced, parts, strict=True):
                inner[d] = part.index
            axes = [axis for part in parts for axis in part.axes]
            bounds.add(tuple(a for a in axes if a.size != 1) or tuple(axes))
            operands.append(self.at(x, tuple(inner)))
        if len(bounds) > 1 or (len(operands) > 1 and not node.is_op("sum")):
            raise ScheduleError("a reduction is over a concatenation", why="each part has its own loop")
        return _expression("reduction", node.result, index, tuple(operands), *bounds)

    def _bind(self, n: Size, taken: set[Axis]) -> list[Segment]:
        """Return loop variables over ``n``: existing ones that are not in ``taken``, so that loops are shared."""
        for parts, size in reversed(self.pool):
            if same_size(size, n) and taken.isdisjoint(a for part in parts for a in part.axes):
                return parts
        parts = self.splits.segments_of(f"reduce{len(self.pool)}", n, self.made)
        self.pool.insert(0, (parts, n))
        return parts

    def _scan(self, node: Node, index: tuple[Affine, ...]) -> IndexedExpr:
        operand, position = self.at(node.operands[0], index), index[node.attributes["dim"]]
        if position == Affine():
            return operand  # the first element
        axes = position.axes[:1]
        if position != Affine.of((axis, 1) for axis in axes):
            raise NotAffine("a scan does not begin at the start of its dim")
        return IndexedExpr("scan", node.result, index, (operand,), axes, operand.axes.union(axes), operand.depth + 1)

    def _sort(self, node: Node, sort: Node, index: tuple[Affine, ...]) -> IndexedExpr:
        """Return the order of sorted elements, which ``node`` is, or these elements themselves."""
        (x,) = sort.operands
        *rows, position = index
        part, *others = self._bind(x.shape[-1], {axis for row in rows for axis in row.axes})
        operand = self.at(x, (*rows, part.index))
        if others or len(part.axes) != 1:
            raise NotAffine("a sort is along a part of a dim")
        axes = operand.axes.difference(part.axes) | set(position.axes)
        return IndexedExpr("sort", node.result, index, (operand,), part.axes, axes, operand.depth + 1)

    def _contraction(self, node: Node, index: tuple[Affine, ...]) -> IndexedExpr:
        terms, out = split_spec(node.attributes["spec"])
        at = dict(zip(out, index, strict=True))
        summed: dict[str, list[Segment]] = {}
        taken = {axis for position in index for axis in position.axes}
        for term, x in zip(terms, node.operands, strict=True):
            for label, n in zip(term, x.shape, strict=True):
                if label not in at and label not in summed:
                    # Never an axis of the outputs: its loop is the innermost.
                    summed[label] = self._summed(n, taken)
                    taken |= {axis for part in summed[label] for axis in part.axes}
        operands: list[IndexedExpr] = []
        bounds: set[tuple[Axis, ...]] = set()
        for parts in combinations(*summed.values()):
            bounds.add(tuple(axis for part in parts for axis in part.axes if axis.size != 1))
            here = at | dict(zip(summed, (part.index for part in parts), strict=True))
            operands += [self.at(x, tuple(here[i] for i in term)) for term, x in zip(terms, node.operands, strict=True)]
        if len(bounds) > 1:
            raise ScheduleError("a matmul is over a concatenation", why="its parts have different lengths")
        (bound,) = bounds
        return _expression("contraction", node.result, index, tuple(operands), bound)

    def _lookup(self, node: Node, index: tuple[Affine, ...]) -> IndexedExpr:
        """Return a load at a dynamic index, for which the affine index has an axis of its own."""
        table, indices = node.operands
        d = node.attributes["dim"] % len(table.shape)
        whole = node.is_op("gather")
        behind = d + (1 if whole else len(indices.shape))
        position = DynamicIndex(node, d, self.at(indices, index if whole else index[d:behind]))
        row = Axis(position.length, "row")
        try:
            found = self.at(table, (*index[:d], Affine.of([(row, 1)]), *index[behind:]))
        except Unaligned as split:
            if split.axis is row:
                raise NotAffine("a dynamic index is along two dims merged by a reshape") from split
            raise
        if found.kind != "load":
            raise ScheduleError("a lookup's table is computed in the same kernel")
        axes = found.axes - {row} | position.value.axes
        return IndexedExpr("lookup", found.value, found.index, (position.value,), (row,), axes, 0, position)

    def _summed(self, n: Size, taken: set[Axis]) -> list[Segment]:
        """Return the segments of a contracted dim: contractions over ``n`` share them, unless one is in ``taken``."""
        for nesting in range(_MAX_SPLITS):
            parts = self.splits.segments_of(f"contract{nesting}x{n}", n, self.made)
            if not any(taken.intersection(part.axes) for part in parts):
                break
        if len(parts) == 1 and (parts, n) not in self.pool:
            # After those of earlier contractions, so that a reduction in a prologue takes the variable they sum over.
            self.pool.insert(len(self.pool) - self.contracted, (parts, n))
            self.contracted += 1
        return parts


def walk(
    roots: Iterable[IndexedExpr], where: Callable[[IndexedExpr], bool] = lambda item: True
) -> Iterator[IndexedExpr]:
    """Yield expressions and their operands, each once, operands first, without those that fail the predicate."""
    seen: set[IndexedExpr] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            item, done = stack.pop()
            if done:
                yield item
            elif item not in seen and where(item):
                seen.add(item)
                stack.append((item, True))
                stack.extend((operand, False) for operand in reversed(item.operands))


def below(roots: Iterable[IndexedExpr]) -> set[IndexedExpr]:
    """Return the operands of expressions and all that those depend on."""
    return set(walk(operand for root in roots for operand in root.operands))


def above(nest: LoopNest, roots: Iterable[IndexedExpr]) -> set[IndexedExpr]:
    """Return expressions and all in a nest that depend on them."""
    found = set(roots)
    for item in nest.walk():  # operands come first
        if any(o in found for o in item.operands):
            found.add(item)
    return found


def ordered(nest: LoopNest, axes: frozenset[Axis]) -> tuple[Axis, ...]:
    """Sort axes by the dims of the widest output; any others follow."""
    known = [a for dim in nest.axes for a in dim if a in axes]
    return (*known, *sorted(axes.difference(known), key=lambda a: a.serial))


def stride(item: IndexedExpr, axis: Axis) -> Size:
    """Return the stride of a load along an axis, in elements."""
    out: Size = 0
    for part, step in zip(item.index, item.value.tensor.strides, strict=True):
        out = out + part.coefficient(axis) * step
    return out


def is_even(item: IndexedExpr, axes: tuple[Axis, ...]) -> bool:
    """Return whether these axes of a load, the last innermost, have the strides of one axis."""
    return all(same_size(stride(item, a), stride(item, b) * b.size) for a, b in pairwise(axes))


def broadcast_index(shape: tuple[Size, ...], to: tuple[Size, ...], index: tuple[Affine, ...]) -> tuple[Affine, ...]:
    """Return the index into an operand of ``shape`` for the element at ``index`` of the broadcast result."""
    lead = len(to) - len(shape)
    if lead == 0 and same_shape(shape, to):
        return index
    return tuple(Affine() if n == 1 else part for n, part in zip(shape, index[lead:], strict=True))


def _expression(
    kind: str, value: Value, index: tuple[Affine, ...], operands: tuple[IndexedExpr, ...], bound: tuple[Axis, ...] = ()
) -> IndexedExpr:
    axes = frozenset().union(*(o.axes for o in operands)) - set(bound)
    depth = max((o.depth for o in operands), default=0) + (1 if kind != "pointwise" else 0)
    return IndexedExpr(kind, value, index, operands, bound, axes, depth)
