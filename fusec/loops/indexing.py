"""Where every element comes from: a region's body, with views resolved, as computations at affine indices.

``lower_to_loops`` turns a body graph into a tree without views: each ``IndexedExpr`` is one operation at one index over
loop axes. It is what decides whether a region is one loop nest, and what schedules turn into a kernel.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from fusec.errors import ScheduleError
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait, split_spec
from fusec.ir.types import DType, Size, estimate, product, same_shape, same_size
from fusec.loops.affine import Affine, Axis, NotAffine, Unaligned, divide, reindex


@dataclass(frozen=True, eq=False, repr=False)
class IndexedExpr:
    """One operation at one index. Identity is equality; equal computations are one object."""

    kind: str
    """``load``, ``lookup``, ``constant``, ``index``, ``pointwise``, ``reduction`` or ``contraction``."""
    value: Value
    index: tuple[Affine, ...]
    operands: "tuple[IndexedExpr, ...]" = ()
    bound: tuple[Axis, ...] = ()
    """The axes that a reduction or contraction sums over; of a lookup, the one that stands for its dynamic index."""
    axes: frozenset[Axis] = frozenset()
    """The axes its value depends on."""
    depth: int = 0
    """How many reductions lie below it, one above the other."""
    dynamic_index: "DynamicIndex | None" = None
    """Of a lookup: where along a dim it loads."""

    @property
    def node(self) -> Node:
        """The node it stands for; not for a load."""
        assert self.value.producer is not None
        return self.value.producer

    @property
    def dtype(self) -> DType:
        """Element type of its value."""
        return self.value.dtype

    def __repr__(self) -> str:
        name = self.value.producer.op.name if self.value.producer else self.value.name
        return f"<{self.kind} {name} at {list(self.index)}>"


@dataclass(frozen=True)
class DynamicIndex:
    """Where along a dim something lies, as a value says that is known only at run time."""

    node: Node
    """What stores or loads there; its first operand has the dim."""
    dim: int
    value: IndexedExpr

    @property
    def length(self) -> Size:
        """The length of the dim, which the value has to stay below."""
        return self.node.operands[0].shape[self.dim]


@dataclass(frozen=True)
class Output:
    """One output of the region over one part of its range; an output cut in segments has several."""

    position: int
    """Which output of the body."""
    root: IndexedExpr
    index: tuple[Affine, ...]
    """Where the element belongs in the output; of a write, in the value that is written."""
    destination: Value | None = None
    """The input whose storage a write changes."""
    dynamic_index: DynamicIndex | None = None
    """Of a write at rows that an index gives: where the element belongs in the destination along that dim."""

    @property
    def axes(self) -> frozenset[Axis]:
        """The axes over which it is stored."""
        return frozenset(axis for part in self.index for axis in part.axes)


@dataclass
class LoopNest:
    """A located region."""

    outputs: list[Output]
    axes: tuple[tuple[Axis, ...], ...]
    """Per dim of the widest output, the axes it is made of, outer first (those of all segments); then any others."""

    def walk(self) -> Iterator[IndexedExpr]:
        """Every computation once, operands first."""
        stored_at = [o.dynamic_index.value for o in self.outputs if o.dynamic_index is not None]
        return walk([*(o.root for o in self.outputs), *stored_at])

    def dynamic_indices(self) -> list[DynamicIndex]:
        """What has to be checked before anything is stored."""
        stored_at = [o.dynamic_index for o in self.outputs if o.dynamic_index is not None]
        return [*stored_at, *(i.dynamic_index for i in self.walk() if i.dynamic_index is not None)]


_MAX_CUTS = 24
_SEGMENT = re.compile(r"@\d+")


def lower_to_loops(body: Graph) -> LoopNest:
    """Locate every output of a region.

    Raises:
        ScheduleError: where the outputs have no common loop nest, or an index is not affine.
    """
    shape = max((made(v).shape for v in body.outputs), key=_extent)
    cuts = _Cuts()
    for _ in range(_MAX_CUTS):
        try:
            return _Lowering(shape, cuts).run(body)
        except Unaligned as cut:
            cuts.add(cut)
        except NotAffine as reason:
            raise ScheduleError("a region has no affine loop nest", why=str(reason)) from reason
    raise ScheduleError("a region needs too many loops", why=f"more than {_MAX_CUTS} cuts of its axes")


def made(output: Value) -> Value:
    """What is computed for an output of a region: of a write, the value that is written."""
    node = output.producer
    return node.operands[1] if node is not None and node.is_op("write") else output


def dynamically_indexed(body: Graph) -> list[Node]:
    """The nodes of a region's body that store or load at dynamic indices, in order."""
    return [n for n in body.nodes if n.has(Trait.LOOKUP) or (n.has(Trait.WRITE) and "dim" in n.attributes)]


def _extent(shape: tuple[Size, ...]) -> tuple[int, int]:
    return math.prod(map(estimate, shape)), len(shape)


@dataclass(frozen=True)
class _Part:
    """One segment of a dim: its index and the axes that is made of, outer first."""

    index: Affine
    axes: tuple[Axis, ...]


@dataclass
class _Cuts:
    """How the axes were cut so far, by the role that made them.

    ``d2`` is a dim of the root, ``d2/i`` the inner part of its factorisation, ``d2@32`` its segment from 32 on.
    """

    factors: dict[str, Size] = field(default_factory=dict)
    segments: dict[str, list[int]] = field(default_factory=dict)
    roles: dict[Axis, str] = field(default_factory=dict)

    def add(self, cut: Unaligned) -> None:
        role = self.roles[cut.axis]
        if cut.factor is not None:
            self.factors[role] = cut.factor
        elif role.startswith("d") and cut.segment is not None:
            self.segments[role] = [cut.segment]
        else:
            raise ScheduleError("a reduction runs over parts that are computed differently")

    def parts(self, role: str, size: Size, made: dict[tuple[str, Size], Axis]) -> list[_Part]:
        """The segments of a range, each over the axes that its factors leave."""
        if role in self.segments:
            assert isinstance(size, int)
            (point,) = self.segments[role]
            low = self.parts(f"{role}@0", point, made)
            high = self.parts(f"{role}@{point}", size - point, made)
            return low + [_Part(p.index + Affine(offset=point), p.axes) for p in high]
        if role in self.factors:
            inner = self.factors[role]
            outer = divide(size, inner)
            assert outer is not None
            return [
                _Part(high.index.scaled(inner) + low.index, (*high.axes, *low.axes))
                for high in self.parts(f"{role}/o", outer, made)
                for low in self.parts(f"{role}/i", inner, made)
            ]
        # Segments of one length share their axis, so that what they have in common is computed once.
        axis = made.setdefault((_SEGMENT.sub("@", role), size), Axis(size, role[0]))
        self.roles[axis] = role
        return [_Part(Affine.of([(axis, 1)]), (axis,))]


class _Lowering:
    """One attempt to lower a body with a fixed set of cuts."""

    def __init__(self, shape: tuple[Size, ...], cuts: _Cuts) -> None:
        self.cuts = cuts
        self.shape = shape
        self.memo: dict[tuple[Value, tuple[Affine, ...]], IndexedExpr] = {}
        self.pool: list[tuple[_Part, Size]] = []
        """The variables there are: of reductions, of the dims, of contractions; the last that is free is taken."""
        self.contracted = 0
        self.made: dict[tuple[str, Size], Axis] = {}
        self.extra: dict[Axis, None] = {}
        """Axes of outputs that the dims of the widest one do not have."""
        self.dims = [cuts.parts(f"d{d}", n, self.made) for d, n in enumerate(shape)]
        self.axes = tuple(tuple(dict.fromkeys(a for p in parts for a in p.axes)) for parts in self.dims)
        for parts, n in zip(self.dims, shape, strict=True):
            if len(parts) == 1 and n != 1:
                self.pool.append((parts[0], n))

    def run(self, body: Graph) -> LoopNest:
        outputs: list[Output] = []
        values = [made(value) for value in body.outputs]
        for position in sorted(range(len(values)), key=lambda i: _extent(values[i].shape), reverse=True):
            for index in self._segments(values[position]):
                outputs.append(self._output(position, body.outputs[position], values[position], index))
        known = {a for dim in self.axes for a in dim}
        return LoopNest(outputs, (*self.axes, tuple(a for a in self.extra if a not in known)))

    def _output(self, position: int, value: Value, what: Value, index: tuple[Affine, ...]) -> Output:
        axes = [a for part in index for a in dict.fromkeys(part.axes)]
        if len(set(axes)) != len(axes):
            raise ScheduleError("an output would lie along a diagonal of the loops", why=f"of {self.shape}")
        root, node = self.at(what, index), value.producer
        if node is None or what is value:
            return Output(position, root, index)
        destination, dynamic_index = node.operands[0], None
        if destination.producer is not None:
            raise ScheduleError("a kernel writes to a view")
        if "dim" in node.attributes:
            d = node.attributes["dim"] % len(index)
            dynamic_index = DynamicIndex(node, d, self.at(node.operands[2], (index[d],)))
        return Output(position, root, index, destination, dynamic_index)

    def _segments(self, value: Value) -> list[tuple[Affine, ...]]:
        """The indices, one per segment, at which an output is computed: its dims aligned with the root's."""
        shape = value.shape
        if groups := _merged(self.shape, shape):
            return self._flattened(groups)
        if len(shape) > len(self.shape):
            if any(n != 1 for n in shape[: len(shape) - len(self.shape)]):
                raise ScheduleError("outputs have different ranges", why=f"{shape} and {self.shape}")
            lead = (Affine(),) * (len(shape) - len(self.shape))
            shape = shape[len(lead) :]
        else:
            lead = ()
        segments: list[tuple[Affine, ...]] = [lead]
        offset = len(self.shape) - len(shape)
        beside = [d for d, n in enumerate(shape) if n != 1 and same_size(n, self.shape[d + offset])]
        aligned = {a for d in beside for part in self.dims[d + offset] for a in part.axes}
        for d, n in enumerate(shape):
            if n == 1:
                segments = [(*segment, Affine()) for segment in segments]
            elif d in beside:
                indices = [part.index for part in self.dims[d + offset]]
                segments = [(*segment, part) for segment in segments for part in indices]
            else:
                taken = {a for segment in segments for position in segment for a in position.axes}
                part = self._bind(n, taken | aligned)
                self.extra.update(dict.fromkeys(part.axes))
                segments = [(*segment, part.index) for segment in segments]
        if len(segments) > 16:
            raise ScheduleError("an output falls into too many segments", why=f"{len(segments)} of them")
        return segments

    def _flattened(self, groups: list[list[int]]) -> list[tuple[Affine, ...]]:
        """The indices of an output whose dims are each several neighbouring dims of the root in one."""
        segments: list[tuple[Affine, ...]] = [()]
        for group in groups:
            indices = [Affine()]
            for d in group:
                indices = [outer.scaled(self.shape[d]) + part.index for outer in indices for part in self.dims[d]]
            segments = [(*segment, index) for segment in segments for index in indices]
        return segments

    def at(self, value: Value, index: tuple[Affine, ...]) -> IndexedExpr:
        """The computation of ``value`` at ``index``."""
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
            return _above("pointwise", value, index, operands)
        if node.has(Trait.REDUCTION):
            return self._reduction(node, index)
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
            raise NotAffine("a concatenation along a dim of unknown size")
        start = 0
        for x in node.operands:
            n = x.shape[d]
            if not isinstance(n, int):
                raise NotAffine("a concatenation of parts of unknown size")
            if start <= low and high < start + n:
                moved = list(index)
                moved[d] = Affine(position.terms, low - start)
                return self.at(x, tuple(moved))
            if low < start + n <= high:
                self._cut(position, start + n)
            start += n
        raise NotAffine(f"index {position} is outside of a concatenation of length {start}")

    def _cut(self, position: Affine, point: int) -> None:
        """Ask for the axis of ``position`` to be cut where its value reaches ``point``."""
        axis, coefficient = max(position.terms, key=lambda term: term[1])
        steps, rest = divmod(point - int(position.offset), int(coefficient))
        if rest or (len(position.terms) > 1 and steps >= axis.size):
            raise NotAffine("a concatenation that cuts across two loops")
        raise Unaligned(axis, segment=steps)

    def _reduction(self, node: Node, index: tuple[Affine, ...]) -> IndexedExpr:
        (x,) = node.operands
        inner, taken = list(index), {axis for part in index for axis in part.axes}
        bound: list[Axis] = []
        for d in node.attributes["dims"]:
            if x.shape[d] != 1:
                part = self._bind(x.shape[d], taken)
                inner[d] = part.index
                taken.update(part.axes)
                bound.extend(part.axes)
        operand = self.at(x, tuple(inner))
        return _above("reduction", node.result, index, (operand,), tuple(bound))

    def _bind(self, n: Size, taken: set[Axis]) -> _Part:
        """A bound variable over ``n``: an earlier one if it is free, so that loops coincide."""
        for part, size in reversed(self.pool):
            if same_size(size, n) and not taken.intersection(part.axes):
                return part
        (part,) = self.cuts.parts(f"reduce{len(self.pool)}", n, self.made)
        self.pool.insert(0, (part, n))
        return part

    def _contraction(self, node: Node, index: tuple[Affine, ...]) -> IndexedExpr:
        terms, out = split_spec(node.attributes["spec"])
        at = dict(zip(out, index, strict=True))
        bound: list[Axis] = []
        for term, x in zip(terms, node.operands, strict=True):
            for label, n in zip(term, x.shape, strict=True):
                if label not in at:
                    # Never an axis of the outputs: the loop over it is the innermost, whatever surrounds it.
                    part = self._summed(n, {a for position in at.values() for a in position.axes})
                    at[label] = part.index
                    bound.extend(part.axes)
        operands = tuple(
            self.at(x, tuple(at[label] for label in term)) for term, x in zip(terms, node.operands, strict=True)
        )
        return _above("contraction", node.result, index, operands, tuple(bound))

    def _lookup(self, node: Node, index: tuple[Affine, ...]) -> IndexedExpr:
        """A load at a computed index, which stands as an axis of its own in the index."""
        table, indices = node.operands
        d = node.attributes["dim"] % len(table.shape)
        whole = node.is_op("gather")
        behind = d + (1 if whole else len(indices.shape))
        position = DynamicIndex(node, d, self.at(indices, index if whole else index[d:behind]))
        row = Axis(position.length, "row")
        try:
            found = self.at(table, (*index[:d], Affine.of([(row, 1)]), *index[behind:]))
        except Unaligned as cut:
            if cut.axis is row:
                raise NotAffine("a dynamic index lies across two dims") from cut
            raise
        if found.kind != "load":
            raise ScheduleError("a kernel looks up what it computes itself")
        axes = found.axes - {row} | position.value.axes
        return IndexedExpr("lookup", found.value, found.index, (position.value,), (row,), axes, 0, position)

    def _summed(self, n: Size, taken: set[Axis]) -> _Part:
        """The variable of a contracted dim: that of every contraction over ``n``, unless the operands' dims use it."""
        for nesting in range(_MAX_CUTS):
            (part,) = self.cuts.parts(f"contract{nesting}x{n}", n, self.made)
            if not taken.intersection(part.axes):
                break
        if (part, n) not in self.pool:
            # Behind those of the contractions around it: a reduction there is over what they sum.
            self.pool.insert(len(self.pool) - self.contracted, (part, n))
            self.contracted += 1
        return part


def walk(
    roots: Iterable[IndexedExpr], where: Callable[[IndexedExpr], bool] = lambda item: True
) -> Iterator[IndexedExpr]:
    """These computations and all they need, each once, operands first; it stops at any that is not ``where``."""
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
    """Everything that the operands of these computations need, themselves excluded."""
    return set(walk(operand for root in roots for operand in root.operands))


def above(nest: LoopNest, roots: Iterable[IndexedExpr]) -> set[IndexedExpr]:
    """Everything in a nest that needs one of these computations, themselves included."""
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
    """What one step along an axis adds to the offset of a loaded element."""
    out: Size = 0
    for part, step in zip(item.index, item.value.tensor.strides, strict=True):
        out = out + part.coefficient(axis) * step
    return out


def _merged(source: tuple[Size, ...], shape: tuple[Size, ...]) -> list[list[int]]:
    """The neighbouring dims of ``source`` that each dim of a shape of fewer dims is made of; none where it is not."""
    groups, rest = list[list[int]](), list(range(len(source)))
    if len(shape) >= len(source) or 1 in source or 1 in shape:
        return []
    for n in shape:
        groups.append([])
        while rest and not (groups[-1] and same_size(product(tuple(source[d] for d in groups[-1])), n)):
            groups[-1].append(rest.pop(0))
        if not same_size(product(tuple(source[d] for d in groups[-1])), n):
            return []
    return [] if rest else groups


def broadcast_index(shape: tuple[Size, ...], to: tuple[Size, ...], index: tuple[Affine, ...]) -> tuple[Affine, ...]:
    """The index into an operand of ``shape`` for the element at ``index`` of the broadcast result."""
    lead = len(to) - len(shape)
    if lead == 0 and same_shape(shape, to):
        return index
    return tuple(Affine() if n == 1 else part for n, part in zip(shape, index[lead:], strict=True))


def _above(
    kind: str, value: Value, index: tuple[Affine, ...], operands: tuple[IndexedExpr, ...], bound: tuple[Axis, ...] = ()
) -> IndexedExpr:
    axes = frozenset().union(*(o.axes for o in operands)) - set(bound)
    depth = max((o.depth for o in operands), default=0) + (1 if kind != "pointwise" else 0)
    return IndexedExpr(kind, value, index, operands, bound, axes, depth)
