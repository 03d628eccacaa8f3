"""Contractions: canonical labels, transposes folded into the spec, flattened rows unflattened."""

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import split_spec
from fusec.ir.types import Size, accumulation, broadcast, product, same_shape, same_size
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
def permuted_operand(graph: Graph, node: Node) -> Value | None:
    """A contraction reads a permuted operand by permuted labels."""
    terms, out = split_spec(node.attributes["spec"])
    operands, found = list(node.operands), False
    for i, value in enumerate(operands):
        view = value.producer
        if view is None or not view.is_op("permute"):
            continue
        dims = view.attributes["dims"]
        terms[i] = "".join(terms[i][dims.index(d)] for d in range(len(dims)))
        operands[i], found = view.operands[0], True
    return _contraction(graph, node, operands, terms, out) if found else None


@simplifies("contraction")
def flattened_rows(graph: Graph, node: Node) -> Value | None:
    """Rows that were flattened before the product are flattened after it, where the reshape can cancel."""
    terms, out = split_spec(node.attributes["spec"])
    batched = bool(set(out).intersection(*terms))
    splits: dict[str, tuple[Size, ...]] = {}
    operands = list(node.operands)
    for i, value in enumerate(operands):
        groups = merged_dims(value)
        if groups is None:
            continue
        for label, group in zip(terms[i], groups, strict=True):
            if len(group) > 1:
                keys = batched and label not in terms[0]  # a softmax over them has one loop
                if label not in out or keys or not _agree(splits.setdefault(label, group), group):
                    return None
        operands[i] = value.producer.operands[0] if value.producer else value
    if not splits:
        return None
    spare = [letter for letter in _LETTERS if letter not in "".join(terms)]
    if len(spare) < sum(len(g) - 1 for g in splits.values()):
        return None
    names = {label: label + "".join(spare.pop() for _ in group[1:]) for label, group in splits.items()}
    for term, old, new in zip(terms, node.operands, operands, strict=True):
        kept = len(old.shape) + sum(len(splits[label]) - 1 for label in term if label in splits)
        if len(new.shape) != kept:
            return None  # some dim is split that this operand has in one
    wide = ["".join(names.get(label, label) for label in term) for term in [*terms, out]]
    result = _contraction(graph, node, operands, wide[:-1], wide[-1])
    return graph.add_node("reshape", [result], {"shape": node.result.shape}).result


def _agree(a: tuple[Size, ...], b: tuple[Size, ...]) -> bool:
    return same_shape(a, b)


def merged_dims(value: Value) -> list[tuple[Size, ...]] | None:
    """For a reshape that only merges neighbouring dims: the source dims of each of its dims."""
    view = value.producer
    if view is None or not view.is_op("reshape"):
        return None
    source, groups = list(view.operands[0].shape), []
    if any(n == 0 for n in source):
        return None
    for position, n in enumerate(value.shape):
        group: list[Size] = []
        last = position == len(value.shape) - 1
        while source and (last or not group or not same_size(product(tuple(group)), n)):
            group.append(source.pop(0))
        if not group or not same_size(product(tuple(group)), n):
            return None
        groups.append(tuple(group))
    return None if source else groups


@simplifies("contraction")
def single_terms(graph: Graph, node: Node) -> Value | None:
    """A contraction that sums single terms is a product."""
    terms, out = split_spec(node.attributes["spec"])
    sizes = _label_sizes(node, terms)
    if any(n != 1 for label, n in sizes.items() if label not in out):
        return None
    x, y = (_aligned(graph, v, term, out, sizes) for v, term in zip(node.operands, terms, strict=True))
    return graph.add_node("mul", [x, y]).result


@simplifies("contraction", exact=False)
def single_columns(graph: Graph, node: Node) -> Value | None:
    """A batch of products whose results have one column, as scores of a single key, is one of sums of products."""
    terms, out = split_spec(node.attributes["spec"])
    sizes, batch = _label_sizes(node, terms), set(out).intersection(*terms)
    columns = set(out).difference(batch, *(term for term in terms if out[-1] not in term))
    if not batch or out[-1] in batch or any(sizes[label] != 1 for label in columns):
        return None
    bound = "".join(label for label in sizes if label not in out)
    labels, dtype = "".join(label for label in out if label not in columns) + bound, node.result.dtype
    x, y = (_aligned(graph, v, term, labels, sizes) for v, term in zip(node.operands, terms, strict=True))
    if accumulation(dtype) != dtype:
        x, y = (graph.add_node("cast", [v], {"dtype": accumulation(dtype)}).result for v in (x, y))
    product = graph.add_node("mul", [x, y]).result
    total = graph.add_node("sum", [product], {"dims": tuple(range(-len(bound), 0))}).result
    if total.dtype != dtype:
        total = graph.add_node("cast", [total], {"dtype": dtype}).result
    return graph.add_node("reshape", [total], {"shape": node.result.shape}).result


def _label_sizes(node: Node, terms: list[str]) -> dict[str, Size]:
    pairs = zip(terms, node.operands, strict=True)
    return {label: n for term, v in pairs for label, n in zip(term, v.shape, strict=True)}


def _aligned(graph: Graph, value: Value, term: str, labels: str, sizes: dict[str, Size]) -> Value:
    """An operand with a dim for each of these labels, of size 1 where it has none; those that it loses have size 1."""
    kept = [d for d in range(len(term)) if term[d] in labels]
    order = sorted(kept, key=lambda d: labels.index(term[d]))
    if order != kept:
        dropped = [d for d in range(len(term)) if d not in kept]
        value = graph.add_node("permute", [value], {"dims": (*order, *dropped)}).result
    shape = tuple(sizes[label] if label in term else 1 for label in labels)
    return value if same_shape(value.shape, shape) else graph.add_node("reshape", [value], {"shape": shape}).result


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


RULES = (canonical_labels, single_terms, single_columns, permuted_operand, flattened_rows, flattened_operands)
