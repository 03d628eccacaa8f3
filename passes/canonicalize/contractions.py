"""Contractions: canonical labels, transposes folded into the spec, flattened rows unflattened."""

from collections.abc import Iterator
from itertools import islice, pairwise

from fusec.ir.graph import Graph, Node, Value, base
from fusec.ir.ops import Trait, split_spec
from fusec.ir.types import DType, Size, accumulation, broadcast, product, same_shape, same_size
from fusec.passes.canonicalize.numbers import number_of
from fusec.passes.canonicalize.rows import joins_uneven_parts
from fusec.passes.canonicalize.views import kept_dims
from fusec.rewriting.driver import simplifies

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def canonical_spec(spec: str) -> str:
    """Result labels a, b, c… in order; contracted ones z, y, … in the order in which they are first met."""
    terms, out = split_spec(spec)
    names = {label: _LETTERS[i] for i, label in enumerate(out)}
    for label in "".join(terms):
        if label not in names:
            names[label] = _LETTERS[25 - (len(names) - len(out))]
    rename = ["".join(names[label] for label in term) for term in [*terms, out]]
    return ",".join(rename[:-1]) + "->" + rename[-1]


def _contraction(graph: Graph, node: Node, operands: list[Value], terms: list[str], out: str) -> Value:
    spec = canonical_spec(",".join(terms) + "->" + out)
    return graph.add_node("contraction", operands, dict(node.attributes) | {"spec": spec}).result


@simplifies("contraction")
def canonical_labels(graph: Graph, node: Node) -> Value | None:
    """The labels of a contraction have one order."""
    spec = canonical_spec(node.attributes["spec"])
    if spec == node.attributes["spec"]:
        return None
    return graph.add_node("contraction", node.operands, dict(node.attributes) | {"spec": spec}).result


@simplifies("contraction")
def single_terms(graph: Graph, node: Node) -> Value | None:
    """A contraction that sums single terms is a product."""
    terms, out = split_spec(node.attributes["spec"])
    sizes = node.label_sizes
    if any(n != 1 for label, n in sizes.items() if label not in out):
        return None
    operands = _cast(graph, node, node.result.dtype)
    x, y = (aligned(graph, v, term, out, sizes) for v, term in zip(operands, terms, strict=True))
    return graph.add_node("mul", [x, y]).result


@simplifies("contraction", exact=False)
def single_columns(graph: Graph, node: Node) -> Value | None:
    """A batch of products whose results have one column, as scores of a single key, is one of sums of products.

    So is a dot product, whatever dims of length 1 its result has: libraries multiply a matrix of one row by one column
    with a single accumulator.
    """
    terms, out = split_spec(node.attributes["spec"])
    sizes, batch, last = node.label_sizes, set(out).intersection(*terms), out[-1:]
    if last in batch or (not batch and any(sizes[label] != 1 for label in out)) or _sums_uneven_parts(node):
        return None
    columns = set(out).difference(batch, *(term for term in terms if last not in term))
    if any(sizes[label] != 1 for label in columns):
        return None
    return _sum_of_products(graph, node, "".join(label for label in out if label not in columns))


@simplifies("contraction", exact=False)
def looked_up_matrices(graph: Graph, node: Node) -> Value | None:
    """Products of rows, each with a matrix that is looked up, are sums of products: no copy of the matrices is made."""
    terms, out = split_spec(node.attributes["spec"])
    sizes, batch = node.label_sizes, set(out).intersection(*terms)
    if not batch or _sums_uneven_parts(node):
        return None
    for matrix, value, row in ((terms[0], node.operands[0], terms[1]), (terms[1], node.operands[1], terms[0])):
        own = set(out).intersection(row) - batch
        kept = "".join(label for label in out if label not in own)
        if _is_looked_up(value) and all(sizes[label] == 1 for label in own) and set(kept) <= set(matrix):
            return _sum_of_products(graph, node, kept)
    return None


def _sums_uneven_parts(node: Node) -> bool:
    """Return whether looked-up matrices are computed from parts of different lengths, each summed in its own loop."""
    computing = [_computing(value) for value in node.operands if _is_looked_up(value)]
    return any(joins_uneven_parts(n) for nodes in computing for n in nodes)


def _is_looked_up(value: Value) -> bool:
    """Return whether a value is computed, element by element, from matrices that are looked up in a stack of them."""
    return any(map(_chooses_matrices, _computing(value)))


def _computing(value: Value) -> list[Node]:
    """Return the operations that compute a value element by element; not those of what chooses matrices."""
    found, pending = dict[Node, None](), [value]
    while pending:
        node = pending.pop().producer
        if node is not None and node not in found and node.has(Trait.POINTWISE | Trait.VIEW | Trait.LOOKUP):
            found[node] = None
            pending += node.operands[:1] if _chooses_matrices(node) else node.operands
    return list(found)


def _chooses_matrices(node: Node) -> bool:
    return node.is_op("take") and node.operands[0].tensor.rank >= 3


def _sum_of_products(graph: Graph, node: Node, kept: str) -> Value:
    """Return a contraction as products that are summed; its other labels have size 1."""
    terms, out = split_spec(node.attributes["spec"])
    sizes, dtype = node.label_sizes, node.result.dtype
    bound = "".join(label for label in sizes if label not in out)
    operands = _cast(graph, node, accumulation(dtype))
    x, y = (aligned(graph, v, term, kept + bound, sizes) for v, term in zip(operands, terms, strict=True))
    product = graph.add_node("mul", [x, y]).result
    total = graph.add_node("sum", [product], {"dims": tuple(range(-len(bound), 0))}).result
    if total.dtype != dtype:
        total = graph.add_node("cast", [total], {"dtype": dtype}).result
    return graph.add_node("reshape", [total], {"shape": node.result.shape}).result


def _cast(graph: Graph, node: Node, dtype: DType) -> list[Value]:
    """The operands of a contraction in another dtype."""
    return [v if v.dtype == dtype else graph.add_node("cast", [v], {"dtype": dtype}).result for v in node.operands]


def aligned(graph: Graph, value: Value, term: str, labels: str, sizes: dict[str, Size]) -> Value:
    """An operand with a dim for each of these labels, of size 1 where it has none; those that it loses have size 1."""
    kept = [d for d in range(len(term)) if term[d] in labels]
    order = sorted(kept, key=lambda d: labels.index(term[d]))
    if order != kept:
        dropped = [d for d in range(len(term)) if d not in kept]
        value = graph.add_node("permute", [value], {"dims": (*order, *dropped)}).result
    shape = tuple(sizes[label] if label in term else 1 for label in labels)
    return value if same_shape(value.shape, shape) else graph.add_node("reshape", [value], {"shape": shape}).result


def _views_among(node: Node, op: str) -> Iterator[tuple[int, Node]]:
    """The operands that are such views, by position."""
    for i, value in enumerate(node.operands):
        if value.producer is not None and value.producer.is_op(op):
            yield i, value.producer


@simplifies("contraction")
def permuted_operand(graph: Graph, node: Node) -> Value | None:
    """A contraction reads a permuted operand by permuted labels."""
    terms, out = split_spec(node.attributes["spec"])
    operands, found = list(node.operands), False
    for i, view in _views_among(node, "permute"):
        dims = view.attributes["dims"]
        terms[i] = "".join(terms[i][dims.index(d)] for d in range(len(dims)))
        operands[i], found = view.operands[0], True
    return _contraction(graph, node, operands, terms, out) if found else None


@simplifies("contraction")
def scaled_operand(graph: Graph, node: Node) -> Value | None:
    """Scale a contraction's operand before it is permuted, so that the labels absorb the permutation."""
    operands = list(node.operands)
    for i, value in enumerate(operands):
        scale = value.producer
        if scale is None or not scale.is_op("mul", "div") or len(value.users) != 1 or value in graph.outputs:
            continue
        x, number = scale.operands
        view = x.producer
        if view is not None and view.is_op("permute") and number_of(number) is not None:
            scaled = graph.add_node(scale.op.name, [view.operands[0], number]).result
            operands[i] = graph.add_node("permute", [scaled], dict(view.attributes)).result
            return graph.add_node("contraction", operands, dict(node.attributes)).result
    return None


@simplifies("contraction")
def rows_first(graph: Graph, node: Node) -> Value | None:
    """x·y = y·x: first comes the operand whose own labels come first in the result."""
    (x, y), out = split_spec(node.attributes["spec"])
    first = next((label for label in out if (label in x) != (label in y)), "")
    if not first or first in x:
        return None
    return _contraction(graph, node, list(node.operands[::-1]), [y, x], out)


@simplifies("contraction")
def single_row(graph: Graph, node: Node) -> Value | None:
    """A length-1 dim that a computed operand brings to a matmul with a weight is a row, not a column."""
    terms, out = split_spec(node.attributes["spec"])
    if not out or node.result.shape[-1] != 1 or set(out).intersection(*terms):
        return None
    one, own = out[-1], 0 if out[-1] in terms[0] else 1
    rows, weight = node.operands[own], node.operands[1 - own]
    before = [label for label in out[:-1] if label in terms[own]]
    place = out.index(before[-1]) + 1 if before else 0
    if place == len(out) - 1 or base(rows).producer is None or base(weight).producer is not None:
        return None
    rest = terms[own].replace(one, "")
    inner = next((d for d, label in enumerate(rest) if label not in out), len(rest))
    operands, sizes = list(node.operands), dict(zip(terms[own], rows.shape, strict=True))
    terms[own] = rest[:inner] + one + rest[inner:]
    operands[own] = graph.add_node("reshape", [rows], {"shape": tuple(sizes[n] for n in terms[own])}).result
    result = _contraction(graph, node, operands, terms, out[:place] + one + out[place:-1])
    return graph.add_node("reshape", [result], {"shape": node.result.shape}).result


@simplifies("permute")
def permuted_result(graph: Graph, node: Node) -> Value | None:
    """A permuted product is the product with permuted labels, where those are batches, then rows, then columns."""
    (value,) = node.operands
    product_ = value.producer
    if product_ is None or not product_.is_op("contraction") or len(value.users) != 1 or value in graph.outputs:
        return None
    terms, out = split_spec(product_.attributes["spec"])
    transposed = "".join(out[d] for d in node.attributes["dims"])
    shared = [label for label in out if all(label in term for term in terms)]
    owners = ["both" if label in shared else "left" if label in terms[0] else "right" for label in transposed]
    order = list(dict.fromkeys(owners))
    if owners != sorted(owners, key=order.index) or ("both" in order and order[0] != "both"):
        return None
    return _contraction(graph, product_, list(product_.operands), terms, transposed)


@simplifies("contraction")
def broadcast_operand(graph: Graph, node: Node) -> Value | None:
    """An operand that is broadcast along a kept dim of the other needs no such dim: x(a…)·expand(y)(a…) = x·y.

    A summed dim is kept: a library may sum one operand by itself, which may overflow or round.
    """
    terms, out = split_spec(node.attributes["spec"])
    for i, view in _views_among(node, "expand"):
        (inner,), value = view.operands, view.result
        shape = (1,) * (len(value.shape) - len(inner.shape)) + inner.shape
        needless = [
            d
            for d, label in enumerate(terms[i])
            if shape[d] == 1
            and label in terms[1 - i]
            and label in out
            and (d < len(shape) - len(inner.shape) or value.shape[d] != 1)
        ]
        if not needless:
            continue
        kept = [d for d in range(len(shape)) if d not in needless]
        narrow = graph.add_node("reshape", [inner], {"shape": tuple(shape[d] for d in kept)}).result
        wide = tuple(value.shape[d] for d in kept)
        if not same_shape(narrow.shape, wide):
            narrow = graph.add_node("expand", [narrow], {"shape": wide}).result
        operands = list(node.operands)
        operands[i], terms[i] = narrow, "".join(terms[i][d] for d in kept)
        return _contraction(graph, node, operands, terms, out)
    return None


@simplifies("contraction")
def inserted_ones(graph: Graph, node: Node) -> Value | None:
    """A contraction needs no length-1 dims that a reshape has added to an operand."""
    terms, out = split_spec(node.attributes["spec"])
    for i, view in _views_among(node, "reshape"):
        (inner,), value = view.operands, view.result
        kept = kept_dims(inner.shape, value.shape)
        if kept is None or len(kept) == len(value.shape):
            continue
        operands, terms[i] = list(node.operands), "".join(terms[i][d] for d in kept)
        operands[i] = inner
        result = _contraction(graph, node, operands, terms, "".join(n for n in out if n in terms[0] + terms[1]))
        return graph.add_node("reshape", [result], {"shape": node.result.shape}).result
    return None


@simplifies("contraction")
def flattened_rows(graph: Graph, node: Node) -> Value | None:
    """Rows that were flattened before the product are flattened after it, where the reshape can cancel."""
    terms, out = split_spec(node.attributes["spec"])
    batched = bool(set(out).intersection(*terms))
    merged = [None if not batched and _moves_elements(v) else merged_dims(v) for v in node.operands]
    whole = [own or [(n,) for n in v.shape] for own, v in zip(merged, node.operands, strict=True)]
    groups = [[group or (1,) for group in own] for own in whole]
    found: dict[str, list[tuple[Size, ...]]] = {}
    for term, own in zip(terms, groups, strict=True):
        for label, group in zip(term, own, strict=True):
            found.setdefault(label, []).append(group)
    splits: dict[str, tuple[Size, ...]] = {}
    for label, all_groups in found.items():
        agreed = _agreed(all_groups, label in out)
        if agreed is not None and batched and label not in terms[0]:
            agreed = tuple(n for n in agreed if n != 1) or (1,)
        if agreed is None or (len(agreed) > 1 and batched and label not in terms[0]):
            return None  # a softmax over keys has one loop
        splits[label] = agreed
    if all(len(group) == 1 for group in splits.values()):
        return None
    spare = [letter for letter in _LETTERS if letter not in "".join(terms)]
    if len(spare) < sum(len(g) - 1 for g in splits.values()):
        return None
    names = {label: label + "".join(spare.pop() for _ in group[1:]) for label, group in splits.items()}
    operands = []
    for term, value, split in zip(terms, node.operands, merged, strict=True):
        source = value.producer.operands[0] if value.producer and split is not None else value
        shape = tuple(n for label in term for n in splits[label])
        if not same_shape(source.shape, shape):
            source = graph.add_node("reshape", [source], {"shape": shape}).result
        operands.append(source)
    wide = ["".join(names[label] for label in term) for term in [*terms, out]]
    result = _contraction(graph, node, operands, wide[:-1], wide[-1])
    return graph.add_node("reshape", [result], {"shape": node.result.shape}).result


def _agreed(groups: list[tuple[Size, ...]], stays: bool) -> tuple[Size, ...] | None:
    """Return how the operands split a dim, ignoring those of length 1, if they agree."""
    groups = [tuple(n for n in group if n != 1) or (1,) for group in groups]
    agree = all(same_shape(group, groups[0]) for group in groups)
    return groups[0] if agree and (stays or len(groups[0]) == 1) else None


def merged_dims(value: Value) -> list[tuple[Size, ...]] | None:
    """For a reshape that merges neighbours and adds dims of length 1: the source dims of each of its dims."""
    view = value.producer
    if view is None or not view.is_op("reshape"):
        return None
    source, groups = list(view.operands[0].shape), list[tuple[Size, ...]]()
    if any(n == 0 for n in source):
        return None
    for position, n in enumerate(value.shape):
        group: list[Size] = []
        if n == 1 and (not source or source[0] != 1):
            groups.append(())
            continue
        last = position == len(value.shape) - 1
        while source and (last or not group or not same_size(product(tuple(group)), n)):
            group.append(source.pop(0))
        if not group or not same_size(product(tuple(group)), n):
            return None
        groups.append(tuple(group))
    return None if source else groups


def _moves_elements(value: Value) -> bool:
    """Return whether a reshape merges dims that a permutation made adjacent, as a partition into windows does.

    Its producer stores the elements in this order, and rows of a matmul are laid out as its result.
    """
    groups, view = merged_dims(value), value.producer
    below = view.operands[0].producer if groups and view else None
    if groups is None or below is None or not below.is_op("permute"):
        return False
    dims, sizes = below.attributes["dims"], below.operands[0].shape
    known = [d for d, n in enumerate(sizes) if n != 1]
    order = iter(dims)
    merged = [[known.index(d) for d in islice(order, len(group)) if d in known] for group in groups]
    return any(b != a + 1 for places in merged for a, b in pairwise(places))


_POINTWISE = (
    "add", "sub", "mul", "div", "maximum", "minimum", "neg", "exp", "tanh", "sigmoid", "erf", "cast", "rsqrt", "where",
    "sqrt", "reciprocal", "pow",
)  # fmt: skip


@simplifies(*_POINTWISE)
def flattened_operands(graph: Graph, node: Node) -> Value | None:
    """Arithmetic on flattened rows flattens its result instead, where the trailing dims are untouched."""
    shape = node.result.shape
    flat = [v for v in node.operands if v.shape and same_shape(v.shape, shape) and merged_dims(v) is not None]
    if not flat:
        return None
    groups = merged_dims(flat[0])
    assert groups is not None and flat[0].producer is not None
    source = flat[0].producer.operands[0].shape
    kept = 0
    while kept < len(groups) and len(groups[-1 - kept]) == 1:
        kept += 1
    operands = []
    for v in node.operands:
        if v in flat and v.producer is not None and same_shape(v.producer.operands[0].shape, source):
            operands.append(v.producer.operands[0])
        elif len(v.shape) <= kept:
            operands.append(v)
        else:
            return None
    if not same_shape(broadcast(*(v.shape for v in operands)), source):
        return None
    computed = graph.add_node(node.op.name, operands, dict(node.attributes)).result
    return graph.add_node("reshape", [computed], {"shape": shape}).result
