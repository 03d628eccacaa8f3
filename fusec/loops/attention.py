"""Attention in a located region: two products with a softmax over what the second one sums."""

import math
from dataclasses import dataclass, replace

from fusec.errors import ScheduleError
from fusec.ir.graph import Node, Value, base
from fusec.ir.ops import Trait, split_spec
from fusec.ir.types import accumulation
from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr, LoopNest, below, stride

FEW_QUERIES = 16
"""Up to this many queries of one key head, keys and values are read once for all of them."""
_BETWEEN = Trait.POINTWISE | Trait.REDUCTION | Trait.VIEW
_MAX_NODES = 60


@dataclass(frozen=True)
class Attention:
    """The parts of ``Σ_j softmax_j(scores(query·key))·value`` and the axes they run over."""

    product: IndexedExpr
    """query·key."""
    scores: IndexedExpr
    """What the softmax is taken of: ``product``, scaled, masked, capped."""
    largest: IndexedExpr
    """The maximum of a row of scores."""
    maxima: tuple[IndexedExpr, ...]
    """Other maxima, of scores that something has been taken away from; inner ones first."""
    exponential: IndexedExpr
    """``exp(scores - shift)``: as a rule ``shift`` is ``largest``; sinks and the like may stand in it too."""
    total: IndexedExpr | None
    """The sum of a row of exponentials."""
    weights: IndexedExpr
    """What the second product takes: ``exponential``, divided by ``total``."""
    weighted: IndexedExpr
    """The second product."""
    query: IndexedExpr
    factors: tuple[tuple[str, IndexedExpr], ...]
    """Numbers that the keys are multiplied (``mul``) or divided (``div``) by, which the queries take."""
    key: IndexedExpr
    value: IndexedExpr
    keys: Axis
    """The axis of the softmax."""
    depth: Axis
    """The axis that ``product`` sums over."""
    batch: tuple[Axis, ...]
    """Axes that queries and keys share."""
    queries: tuple[Axis, ...]
    """Axes of the queries alone: their positions, and the heads that share one key; the last is the innermost."""
    columns: Axis
    """The axis of the elements of one value."""

    @property
    def is_plain(self) -> bool:
        """Whether the softmax takes exactly the largest score away."""
        difference = self.exponential.operands[0]
        return difference.operands == (self.scores, self.largest) and difference.node.is_op("sub")

    @property
    def rows(self) -> int:
        """Queries that share keys; more than a few where their number is not known."""
        return math.prod(a.size if isinstance(a.size, int) else FEW_QUERIES + 1 for a in self.queries)

    @property
    def fixed(self) -> tuple[IndexedExpr, ...]:
        """The numbers that the exponentials are multiplied or divided by."""
        found: dict[IndexedExpr, None] = {}
        item = self.weights
        while item is not self.exponential:
            moving = [o for o in item.operands if self.keys in o.axes]
            found.update((o, None) for o in item.operands if o not in moving and o.dtype.is_float and o.axes)
            (item,) = moving
        return tuple(found)

    @property
    def loops(self) -> tuple[Axis, ...]:
        """Every axis that the first product runs over."""
        return (*self.batch, *self.queries, self.keys, self.depth)


def find_attention(nest: LoopNest) -> Attention | None:
    """The attention that a region is; None where it holds no product of a product.

    Raises:
        ScheduleError: where it is one that has no schedule.
    """
    contractions = [i for i in nest.walk() if i.kind == "contraction"]
    inner = [c for c in contractions if c in below(contractions)]
    if not inner:
        return None
    if len(contractions) != 2:
        raise _refused(f"it holds {len(contractions)} products")
    (product,) = inner
    (weighted,) = [c for c in contractions if c is not product]
    holders = [o for o in weighted.operands if o is product or product in below([o])]
    if len(holders) != 1:
        raise _refused("both factors of its second product hold the first")
    (weights,) = holders
    (value,) = [o for o in weighted.operands if o is not weights]
    if len(weighted.bound) != 1 or len(product.bound) != 1:
        raise _refused("a product sums over several axes")
    return _parts(nest, product, weighted, weights, value)


def _parts(
    nest: LoopNest, product: IndexedExpr, weighted: IndexedExpr, weights: IndexedExpr, value: IndexedExpr
) -> Attention:
    (keys,), (depth,) = weighted.bound, product.bound
    exponentials = [i for i in below([weighted]) if i.kind == "pointwise" and i.node.is_op("exp") and keys in i.axes]
    if len(exponentials) != 1:
        raise _refused("its weights are no softmax")
    (exponential,) = exponentials
    reductions = [i for i in nest.walk() if i.kind == "reduction"]
    if any(r.bound != (keys,) for r in reductions):
        raise _refused("a reduction runs over something else than the keys")
    maxima = [r for r in reductions if r.node.is_op("max")]
    if not maxima:
        raise _refused("its softmax does not take the largest score away")
    largest = maxima.pop(0)
    scores = largest.operands[0]
    if len({accumulation(item.dtype) for item in (product, scores, weighted)}) > 1:
        raise _refused("its softmax is of another type than its products")
    if not all(is_shifted(i.operands[0], scores, keys) for i in (*maxima, exponential)):
        raise _refused("its softmax does not take the largest score away")
    totals = [r for r in reductions if not r.node.is_op("max")]
    if len(totals) > 1 or any(not r.node.is_op("sum") or r.operands[0] is not exponential for r in totals):
        raise _refused("its softmax divides by something else than the sum")
    if not is_linear(weights, exponential, keys):
        raise _refused("its weights are changed after the softmax")
    query, key = product.operands
    if keys in query.axes:
        query, key = key, query
    key, factors = _unscaled(key)
    value, rest = _unscaled(value)
    if rest or keys in query.axes or keys not in key.axes or value.kind != "load" or key.kind != "load":
        raise _refused("its keys or values are computed in the same kernel")
    batch = key.axes - {keys, depth}
    queries = query.axes - batch - {depth}
    columns = value.axes - batch - {keys}
    if not batch <= product.axes or len(columns) != 1 or columns & (query.axes | key.axes):
        raise _refused("its values have other axes than its keys")
    if product.axes != batch | queries | {keys}:
        raise _refused("its queries and keys have other axes than its scores")
    for axis in (depth, *columns):
        if not isinstance(axis.size, int):
            raise _refused(f"the size {axis.size} is not known when the kernel is made")
    for output in nest.outputs:
        stored = {axis for part in output.index for axis in part.axes}
        if stored != batch | queries | columns or (
            output.root is not weighted and weighted not in below([output.root])
        ):
            raise _refused("it gives something else besides")
    rows = math.prod(a.size if isinstance(a.size, int) else FEW_QUERIES + 1 for a in queries)
    if rows <= FEW_QUERIES and (stride(value, *columns) != 1 or 1 not in (stride(key, depth), stride(key, keys))):
        raise _refused("the elements of its keys or values do not lie side by side")
    order = [a for dim in nest.axes for a in dim]
    known = {a: i for i, a in enumerate(order)}

    def sorted_(axes: frozenset[Axis]) -> tuple[Axis, ...]:
        return tuple(sorted(axes, key=lambda a: (known.get(a, len(known)), a.serial)))

    return Attention(
        product, scores, largest, tuple(maxima), exponential, totals[0] if totals else None, weights, weighted, query,
        factors, key, value, keys, depth, sorted_(batch), sorted_(queries), next(iter(columns)),
    )  # fmt: skip


def _unscaled(item: IndexedExpr) -> tuple[IndexedExpr, tuple[tuple[str, IndexedExpr], ...]]:
    """What an operand is before it is widened, multiplied and divided by numbers, and the numbers."""
    if item.kind == "pointwise" and item.node.is_op("cast"):
        (narrow,) = item.operands
        if narrow.dtype.is_float and item.dtype.is_float and narrow.dtype.bytes <= item.dtype.bytes:
            return _unscaled(narrow)
    elif item.kind == "pointwise" and item.node.is_op("mul", "div") and item.operands[1].kind == "constant":
        inner, factors = _unscaled(item.operands[0])
        return inner, (*factors, (item.node.op.name, item.operands[1]))
    return item, ()


def is_shifted(item: IndexedExpr, scores: IndexedExpr, keys: Axis) -> bool:
    """Whether ``item`` is ``scores`` with something added or taken away that is the same for all keys."""
    if item is scores:
        return True
    if item.kind != "pointwise" or not item.node.is_op("add", "sub", "cast"):
        return False
    if item.node.is_op("cast"):
        narrow = item.operands[0].dtype
        return narrow.is_float and narrow.bytes <= item.dtype.bytes and is_shifted(item.operands[0], scores, keys)
    moving = [o for o in item.operands if keys in o.axes]
    first = not item.node.is_op("sub") or item.operands[0] in moving
    return first and len(moving) == 1 and is_shifted(moving[0], scores, keys)


def is_linear(item: IndexedExpr, exponential: IndexedExpr, keys: Axis) -> bool:
    """Whether ``item`` is ``exponential`` times something that is the same for all keys, roundings aside."""
    if item is exponential:
        return True
    if item.kind != "pointwise":
        return False
    if item.node.is_op("cast"):
        return item.dtype.is_float and is_linear(item.operands[0], exponential, keys)
    if item.node.is_op("div"):
        numerator, denominator = item.operands
        return keys not in denominator.axes and is_linear(numerator, exponential, keys)
    if item.node.is_op("mul"):
        fixed = [o for o in item.operands if keys not in o.axes]
        return len(fixed) == 1 and all(is_linear(o, exponential, keys) for o in item.operands if o is not fixed[0])
    if item.node.is_op("where"):
        condition, *branches = item.operands
        zeros = [o for o in branches if o.kind == "constant" and o.node.attributes.get("value") == 0]
        rest = [o for o in branches if o not in zeros]
        return keys not in condition.axes and all(is_linear(o, exponential, keys) for o in rest)
    return False


def summed(item: IndexedExpr, exponential: IndexedExpr, keys: Axis, total: IndexedExpr) -> IndexedExpr:
    """A linear function of ``exponential`` with ``total``, the sum of exponential·value, in its place."""
    if item is exponential:
        return total
    if keys not in item.axes:
        return item
    if item.node.is_op("cast"):
        return summed(item.operands[0], exponential, keys, total)  # what is rounded is the result
    operands = tuple(summed(o, exponential, keys, total) for o in item.operands)
    return replace(item, operands=operands, axes=frozenset[Axis]().union(*(o.axes for o in operands)))


def at_largest(item: IndexedExpr, scores: IndexedExpr, largest: IndexedExpr, keys: Axis) -> IndexedExpr:
    """What is computed from a score, for the largest one."""
    if item is scores:
        return largest
    if keys not in item.axes:
        return item
    operands = tuple(at_largest(o, scores, largest, keys) for o in item.operands)
    return replace(item, operands=operands, axes=frozenset[Axis]().union(*(o.axes for o in operands)))


def _refused(why: str) -> ScheduleError:
    return ScheduleError("no generated attention", why=why)


def attention_groups(second: Node) -> list[set[Node]]:
    """The nodes from a first product to ``second`` with a softmax between them, for each product it may be."""
    above = _above(second)
    if not any(n.is_op("exp") for n in above):
        return []
    groups: list[set[Node]] = []
    for first in [n for n in above if n.has(Trait.CONTRACTION)]:
        found = [first]
        for node in found:
            found += [user for user in node.users if user in above and user not in found and _is_between(user)]
        softmax = any(n.is_op("exp") for n in found) and any(n.is_op("max") for n in found)
        if softmax and sum(v.producer in found for v in second.operands) == 1:
            groups.append({second, *found})
    return groups


def _above(product: Node) -> dict[Node, None]:
    """What a product reads, up to other products, with nothing but arithmetic and views between."""
    found: dict[Node, None] = {}
    stack = [v.producer for v in reversed(product.operands)]
    while stack and len(found) <= _MAX_NODES:
        node = stack.pop()
        if node is None or node in found:
            continue
        found[node] = None
        if _is_between(node):
            stack += [v.producer for v in reversed(node.operands)]
    return found


def _is_between(node: Node) -> bool:
    return node.has(_BETWEEN) and not node.is_op("concat")


def is_layer(group: set[Node]) -> bool:
    """Whether a product of a group is one with a weight that all rows share, rather than of keys or values."""
    products = [n for n in group if n.has(Trait.CONTRACTION) and not _is_batched(n)]
    return any(_is_given(v) for n in products for v in n.operands)


def _is_given(value: Value) -> bool:
    """Whether a value is an input of the graph, seen through views and casts."""
    value = base(value)
    while value.producer is not None and value.producer.is_op("cast"):
        value = base(value.producer.operands[0])
    return value.producer is None


def _is_batched(node: Node) -> bool:
    (left, right), out = split_spec(node.attributes["spec"])
    return bool(set(left) & set(right) & set(out))
