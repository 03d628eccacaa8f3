"""Attention in a loop nest: two matmuls with a softmax over the dim that the second one sums."""

import math
from dataclasses import dataclass, replace

from fusec.errors import ScheduleError
from fusec.ir.graph import Node, Value, base
from fusec.ir.ops import Trait, split_spec
from fusec.ir.types import I8, U8, Size, accumulation, estimate, product
from fusec.loops.affine import Axis
from fusec.loops.casts import uncast
from fusec.loops.indexing import IndexedExpr, LoopNest, below, is_even, ordered, stride, walk

NO_ATTENTION = "no generated attention"
"""The beginning of each reason why a matmul and another that reads its result are not one attention kernel."""
FEW_QUERIES = 16
"""Up to this many queries of one key head, keys and values are read once for all of them."""
_NORMALIZING = ("sigmoid", "tanh", "maximum", "sum")
"""Functions that models compute weights of values with, instead of a softmax."""
_HEADS_RANK = 4
"""Rank of queries, keys and values: batch, heads, rows and columns."""
_READ = ("load", "lookup")
_FUSIBLE = Trait.POINTWISE | Trait.REDUCTION | Trait.VIEW
_MAX_NODES = 60


@dataclass(frozen=True)
class Elements:
    """The elements of one key or value: loops over these axes, outer first, in each of some segments.

    One axis and one segment, unless codes have scales for groups of elements, or share bytes.
    """

    axes: tuple[Axis, ...]
    segments: int = 1

    @property
    def count(self) -> int:
        """Number of elements; a schedule is legal only where it is known."""
        return self.segments * math.prod(int(axis.size) for axis in self.axes)


@dataclass(frozen=True)
class Softmax:
    """The expressions of ``softmax(scores)`` as attention takes it, and the axes that it and the scores sum over."""

    product: IndexedExpr
    """The matmul query·key."""
    scores: IndexedExpr
    """The operand of the softmax: ``product``, scaled, masked, capped."""
    largest: IndexedExpr
    """The maximum of a row of scores."""
    maxima: tuple[IndexedExpr, ...]
    """Other maxima, of scores minus something; inner ones first."""
    exponential: IndexedExpr
    """``exp(scores - shift)``: usually ``shift`` is ``largest``; with sinks, for example, it is more."""
    total: IndexedExpr | None
    """The sum of a row of exponentials."""
    weights: IndexedExpr
    """The operand of the second matmul: ``exponential``, divided by ``total``."""
    weighted: tuple[IndexedExpr, ...]
    """The second matmul, for each segment of its columns."""
    keys: tuple[Axis, ...]
    """The axes of the softmax, outer first: one, or those of pages and of the keys in each. Schedules join them."""
    depth: Elements
    """The elements that ``product`` sums over."""

    @property
    def key_count(self) -> Size:
        """Number of keys."""
        return product(tuple(axis.size for axis in self.keys))


@dataclass(frozen=True)
class Attention(Softmax):
    """The parts of ``Σ_j softmax_j(scores(query·key))·value``, and the axes they run over."""

    query: tuple[IndexedExpr, ...]
    """For each segment of ``depth``, as ``key``."""
    key: tuple[IndexedExpr, ...]
    factors: tuple[tuple[str, IndexedExpr], ...]
    """Constants that the keys are multiplied (``mul``) or divided (``div``) by; schedules apply them to queries."""
    value: tuple[IndexedExpr, ...]
    """For each segment of ``columns``."""
    batch: tuple[Axis, ...]
    """Axes that queries and keys share."""
    queries: tuple[Axis, ...]
    """Axes of the queries alone: their positions, and the heads that share one key head; the last is the innermost."""
    columns: Elements
    """The elements of one value."""

    @property
    def is_plain(self) -> bool:
        """True if the softmax subtracts exactly the maximum."""
        difference = self.exponential.operands[0]
        return difference.operands == (self.scores, self.largest) and difference.node.is_op("sub")

    @property
    def rows(self) -> int:
        """Number of queries that share a key head; more than ``FEW_QUERIES`` where it is not known."""
        return math.prod(a.size if isinstance(a.size, int) else FEW_QUERIES + 1 for a in self.queries)

    @property
    def fixed(self) -> tuple[IndexedExpr, ...]:
        """The values, one for each query, that the exponentials are multiplied or divided by."""
        found: dict[IndexedExpr, None] = {}
        item = self.weights
        while item is not self.exponential:
            varying = [o for o in item.operands if differs(o, self.keys)]
            found.update((o, None) for o in item.operands if o not in varying and o.dtype.is_float and o.axes)
            (item,) = varying
        return tuple(found)

    @property
    def loops(self) -> tuple[Axis, ...]:
        """Every axis of the loops around the first matmul."""
        return (*self.batch, *self.queries, *self.keys, *self.depth.axes)


def find_attention(nest: LoopNest) -> Attention | None:
    """Return the attention that a loop nest computes; None where no matmul reads the result of another.

    Raises:
        ScheduleError: where one does, and the nest is no attention that has a schedule.
    """
    contractions = [i for i in nest.walk() if i.kind == "contraction"]
    inner = [c for c in contractions if c in below(contractions)]
    if not inner:
        return None
    if len(matmuls := {c.value for c in contractions}) > 2:
        raise _refused(f"it has {len(matmuls)} matmuls")
    if len(inner) > 1:
        raise _refused("its first matmul is read at several indices")
    (product,) = inner
    if not product.bound:
        raise _refused("its keys have one element")
    weighted = tuple(c for c in contractions if c is not product)
    if not all(matmul.bound and len(matmul.pairs) == 1 for matmul in weighted):
        raise _refused("its second matmul sums over one element, or over a concatenation")
    dependent = [[o for o in c.operands if o is product or product in below([o])] for c in weighted]
    if any(len(found) != 1 for found in dependent):
        raise _refused("both operands of its second matmul depend on the first")
    ((weights, *others),) = zip(*dependent, strict=True)
    if any(other is not weights for other in others):
        raise _refused("its weights differ along its columns")
    values = tuple(next(o for o in c.operands if o is not weights) for c in weighted)
    attention = _operands(nest, _softmax(nest, product, weighted, weights), values)
    _check_axes(nest, attention)
    _check_strides(attention)
    return attention


def _softmax(nest: LoopNest, product: IndexedExpr, weighted: tuple[IndexedExpr, ...], weights: IndexedExpr) -> Softmax:
    """Return the parts of the softmax that makes ``weights`` of ``product``, or raise ScheduleError."""
    keys, depth = weighted[0].bound, Elements(product.bound, len(product.pairs))
    items = [i for i in below(weighted) if i.kind == "pointwise" and differs(i, keys)]
    exponentials = [i for i in items if i.node.is_op("exp")]
    if len(exponentials) != 1:
        raise _refused("its weights are not a softmax")
    (exponential,) = exponentials
    reductions = [i for i in nest.walk() if i.kind == "reduction"]
    if any(r.bound != keys for r in reductions):
        raise _refused("a reduction is not over the keys")
    maxima = [r for r in reductions if r.node.is_op("max")]
    if not maxima:
        raise _refused("its softmax does not subtract the maximum")
    largest, *further = maxima
    scores = largest.operands[0]
    if len({accumulation(item.dtype) for item in (product, scores, *weighted)}) > 1:
        raise _refused("its softmax and its matmuls accumulate in different types")
    if not all(_is_shifted(i.operands[0], scores, keys) for i in (*further, exponential)):
        raise _refused("its softmax does not subtract the maximum")
    totals = [r for r in reductions if not r.node.is_op("max")]
    again = [r for r in totals if r.node.is_op("sum") and r.operands[0] is not exponential]
    if 0 < len(again) < len(totals) and all(_is_linear(r.operands[0], exponential, keys) for r in again):
        raise _refused("its weights are divided by their sum again after the softmax")
    if len(totals) > 1 or any(not r.node.is_op("sum") or r.operands[0] is not exponential for r in totals):
        raise _refused("its softmax does not divide by the sum of the exponentials")
    if not _is_linear(weights, exponential, keys):
        raise _refused("its weights are changed after the softmax")
    total = totals[0] if totals else None
    return Softmax(product, scores, largest, tuple(further), exponential, total, weights, weighted, keys, depth)


def _operands(nest: LoopNest, softmax: Softmax, values: tuple[IndexedExpr, ...]) -> Attention:
    """Return an attention with its operands and their axes.

    Raises:
        ScheduleError: where keys or values are neither loaded nor unpacked.
    """
    keys, product = softmax.keys, softmax.product
    query, key = zip(*(pair[::-1] if differs(pair[0], keys) else pair for pair in product.pairs), strict=True)
    plain, factors = zip(*map(_plain_operand, key), strict=True)
    if all(other == factors[0] for other in factors):
        key = plain
    else:
        factors = ((),)
    values = tuple(item if found else plain for item in values for plain, found in [_plain_operand(item)])
    readable = all(item.kind in _READ or is_unpacked(item) for item in (*key, *values))
    if not readable or any(differs(q, keys) for q in query) or not all(differs(k, keys) for k in key):
        raise _refused("its keys or values are computed in the same kernel")
    batch = key[0].axes.difference(keys, softmax.depth.axes)
    queries = query[0].axes - batch - {*softmax.depth.axes}
    columns = values[0].axes.difference(batch, keys)
    same = all(value.axes.difference(batch, keys) == columns for value in values)
    if not same or not batch <= product.axes or not columns or any(columns & o.axes for o in product.operands):
        raise _refused("its values have other axes than its keys")
    return Attention(
        **vars(softmax), query=query, key=key, factors=factors[0], value=values, batch=ordered(nest, batch),
        queries=ordered(nest, queries), columns=Elements(ordered(nest, columns), len(values)),
    )  # fmt: skip


def _check_axes(nest: LoopNest, attention: Attention) -> None:
    """Raise ScheduleError where the loops of matmuls, sizes or outputs are none that a schedule has."""
    batch, queries = frozenset(attention.batch), frozenset(attention.queries)
    if attention.product.axes != batch | queries | {*attention.keys}:
        raise _refused("its queries and keys have other axes than its scores")
    for axis in (*attention.depth.axes, *attention.columns.axes):
        if not isinstance(axis.size, int):
            raise _refused(f"the size {axis.size} is not known at compile time")
    for output in nest.outputs:
        is_result = not below([output.root]).union([output.root]).isdisjoint(attention.weighted)
        if output.axes != batch | queries | {*attention.columns.axes} or not is_result:
            raise _refused("an output is not computed from its result")


def _check_strides(attention: Attention) -> None:
    """Raise ScheduleError where the schedules cannot load vectors of keys or values."""
    for items, elements in ((attention.key, attention.depth), (attention.value, attention.columns)):
        loads = [item for item in items if item.kind == "load"]
        if loads and (elements.segments > 1 or not is_even(loads[0], elements.axes)):
            raise _refused("the elements of its keys or values are not one dim in memory")
    (key, *_), (value, *_) = attention.key, attention.value
    contiguous = value.kind != "load" or has_rows(value, *attention.columns.axes[-1:])
    contiguous &= key.kind != "load" or has_rows(key, *attention.depth.axes[-1:], *attention.keys[-1:])
    if attention.rows <= FEW_QUERIES and not contiguous:
        raise _refused("its keys or values are not contiguous")


def is_in_place(item: IndexedExpr, keys: tuple[Axis, ...]) -> bool:
    """Return whether keys or values are loaded from where they are, with one stride between them."""
    return item.kind == "load" and is_even(item, keys)


def has_rows(item: IndexedExpr, *axes: Axis) -> bool:
    """Return whether a load is contiguous along one of these axes."""
    return any(stride(item, axis) == 1 for axis in axes)


def _plain_operand(item: IndexedExpr) -> tuple[IndexedExpr, tuple[tuple[str, IndexedExpr], ...]]:
    """Return an operand without casts and factors; one that is computed keeps the type that the matmul sums in."""
    plain, factors = _without_factors(item)
    same = plain.kind in _READ or accumulation(plain.dtype) == accumulation(item.dtype)
    return (plain, factors) if same else (item, ())


def _without_factors(item: IndexedExpr) -> tuple[IndexedExpr, tuple[tuple[str, IndexedExpr], ...]]:
    """Return an operand without widening casts and constant factors, and those factors (``mul`` or ``div``)."""
    if item.kind == "pointwise" and item.node.is_op("cast"):
        (narrow,) = item.operands
        if narrow.dtype.is_float and item.dtype.is_float and narrow.dtype.bytes <= item.dtype.bytes:
            return _without_factors(narrow)
    elif item.kind == "pointwise" and item.node.is_op("mul", "div") and item.operands[1].kind == "constant":
        inner, factors = _without_factors(item.operands[0])
        return inner, (*factors, (item.node.op.name, item.operands[1]))
    return item, ()


def is_unpacked(item: IndexedExpr) -> bool:
    """Return whether a kernel computes an operand elementwise from fewer bytes than it has, as from int8 and scales."""
    items = list(walk([item]))
    if item.kind != "pointwise" or any(i.kind not in (*_READ, "pointwise", "constant", "index") for i in items):
        return False
    return sum(_bytes(i) for i in items if i.kind in _READ) < _bytes(item)


def scale_behind(
    items: tuple[IndexedExpr, ...], elements: Elements
) -> tuple[tuple[IndexedExpr, ...], IndexedExpr | None]:
    """Return the codes of unpacked keys or values, as loaded, and the scale that may multiply a sum over elements.

    Without one, because it differs between elements or the product is rounded, return the operands and None.
    """
    if len(items) == 1:
        (item,) = items
        found: list[tuple[IndexedExpr | None, IndexedExpr | None]] = [(_loaded_codes(item), None)]
        if item.kind == "pointwise" and item.node.is_op("mul"):
            found += [(_loaded_codes(factor), scale) for factor, scale in (item.operands, item.operands[::-1])]
        for codes, scale in found:
            same = scale is None or scale.axes.isdisjoint(elements.axes)
            if codes is not None and same and is_even(codes, elements.axes):
                return (codes,), scale
    return items, None


def _loaded_codes(item: IndexedExpr) -> IndexedExpr | None:
    """Return the load or lookup of int8 or uint8 that an operand is, but for casts that keep its value."""
    item = uncast(item)
    return item if item.kind in _READ and item.dtype in (I8, U8) else None


def _bytes(item: IndexedExpr) -> int:
    return item.dtype.bytes * estimate(product(tuple(axis.size for axis in item.axes)))


def _is_shifted(item: IndexedExpr, scores: IndexedExpr, keys: tuple[Axis, ...]) -> bool:
    """Return whether ``item`` is ``scores`` plus or minus something that is the same for all keys."""
    if item is scores:
        return True
    if item.kind != "pointwise" or not item.node.is_op("add", "sub", "cast"):
        return False
    if item.node.is_op("cast"):
        narrow = item.operands[0].dtype
        return narrow.is_float and narrow.bytes <= item.dtype.bytes and _is_shifted(item.operands[0], scores, keys)
    varying = [o for o in item.operands if differs(o, keys)]
    first = not item.node.is_op("sub") or item.operands[0] in varying
    return first and len(varying) == 1 and _is_shifted(varying[0], scores, keys)


def _is_linear(item: IndexedExpr, exponential: IndexedExpr, keys: tuple[Axis, ...]) -> bool:
    """Return whether ``item`` is ``exponential`` times something that is the same for all keys, up to rounding."""
    if item is exponential:
        return True
    if item.kind != "pointwise":
        return False
    if item.node.is_op("cast"):
        return item.dtype.is_float and _is_linear(item.operands[0], exponential, keys)
    if item.node.is_op("div"):
        numerator, denominator = item.operands
        return not differs(denominator, keys) and _is_linear(numerator, exponential, keys)
    if item.node.is_op("mul"):
        fixed = [o for o in item.operands if not differs(o, keys)]
        return len(fixed) == 1 and all(_is_linear(o, exponential, keys) for o in item.operands if o is not fixed[0])
    if item.node.is_op("where"):
        condition, *branches = item.operands
        zeros = [o for o in branches if o.kind == "constant" and o.node.attributes.get("value") == 0]
        rest = [o for o in branches if o not in zeros]
        return not differs(condition, keys) and all(_is_linear(o, exponential, keys) for o in rest)
    return False


def differs(item: IndexedExpr, keys: tuple[Axis, ...]) -> bool:
    """Return whether an expression differs between keys."""
    return not item.axes.isdisjoint(keys)


def substituted(
    item: IndexedExpr, part: IndexedExpr, by: IndexedExpr, keys: tuple[Axis, ...], casts: bool = True
) -> IndexedExpr:
    """Return an expression with ``by`` in place of a part that depends on the keys; without its casts, if asked to."""
    if item is part:
        return by
    if not differs(item, keys):
        return item
    if item.node.is_op("cast") and not casts:
        return substituted(item.operands[0], part, by, keys, casts)
    operands = tuple(substituted(o, part, by, keys, casts) for o in item.operands)
    return replace(item, operands=operands, axes=frozenset[Axis]().union(*(o.axes for o in operands)))


def _refused(why: str) -> ScheduleError:
    return ScheduleError(NO_ATTENTION, why=why)


def attention_groups(second: Node) -> list[set[Node]]:
    """Return the nodes from a first matmul through a softmax to ``second``, for each first matmul there may be."""
    above = _producers(second)
    if not any(n.is_op("exp") for n in above):
        return []
    groups: list[set[Node]] = []
    for first in [n for n in above if n.has(Trait.CONTRACTION)]:
        found = [first]
        for node in found:
            found += [user for user in node.users if user in above and user not in found and _is_fusible(user)]
        softmax = any(n.is_op("exp") for n in found) and any(n.is_op("max") for n in found)
        if softmax and sum(v.producer in found for v in second.operands) == 1:
            groups.append({second, *found})
    return groups


def instead_of_softmax(second: Node) -> Node | None:
    """Return the function between two batched matmuls without a softmax, such as a sigmoid; None where there is none.

    Experts multiply by weights twice, with an activation in between, so weights are distinguished from keys and values.
    """
    if not _is_batched(second) or any(map(_is_stack_of_weights, second.operands)):
        return None
    above = _producers(second)
    for first in [n for n in above if n.has(Trait.CONTRACTION) and _is_batched(n)]:
        between = [first]
        for node in between:
            between += [u for u in node.users if u in above and u not in between and _is_fusible(u)]
        is_read_once = sum(v.producer in between for v in second.operands) == 1
        if is_read_once and not any(map(_is_stack_of_weights, first.operands)):
            functions = [n for n in between if n.is_op("exp", *_NORMALIZING)]
            if functions and not any(n.is_op("exp") for n in functions):
                return functions[0]
    return None


def _is_stack_of_weights(value: Value) -> bool:
    """Return whether a value is an input with one batch dim, as weights of experts are; keys have heads too."""
    return _is_input(value) and len(value.shape) < _HEADS_RANK


def _producers(matmul: Node) -> dict[Node, None]:
    """Return the nodes that a matmul depends on through arithmetic and views, up to any other node."""
    found: dict[Node, None] = {}
    stack = [v.producer for v in reversed(matmul.operands)]
    while stack and len(found) <= _MAX_NODES:
        node = stack.pop()
        if node is None or node in found:
            continue
        found[node] = None
        if _is_fusible(node):
            stack += [v.producer for v in reversed(node.operands)]
    return found


def _is_fusible(node: Node) -> bool:
    return node.has(_FUSIBLE) and not node.is_op("concat")


def has_linear_layer(group: set[Node]) -> bool:
    """Return whether a matmul of a group multiplies by a weight that all rows share, rather than by keys or values."""
    matmuls = [n for n in group if n.has(Trait.CONTRACTION) and not _is_batched(n)]
    return any(_is_input(v) for n in matmuls for v in n.operands)


def _is_input(value: Value) -> bool:
    """Return whether a value is an input of the graph, or a view or cast of one."""
    value = base(value)
    while value.producer is not None and value.producer.is_op("cast"):
        value = base(value.producer.operands[0])
    return value.producer is None


def _is_batched(node: Node) -> bool:
    (left, right), out = split_spec(node.attributes["spec"])
    return bool(set(left) & set(right) & set(out))
