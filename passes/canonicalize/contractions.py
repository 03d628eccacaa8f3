"""Contractions: canonical labels, transposes folded into the spec, flattened rows unflattened."""

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import split_spec
from fusec.ir.types import Size, broadcast, product, same_shape, same_size
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
    splits: dict[str, tuple[Size, ...]] = {}
    operands = list(node.operands)
    for i, value in enumerate(operands):
        groups = merged_dims(value)
        if groups is None:
            continue
        for label, group in zip(terms[i], groups, strict=True):
            if len(group) > 1:
                if label not in out or not _agree(splits.setdefault(label, group), group):
                    return None
        operands[i] = value.producer.operands[0] if value.producer else value
    if not splits:
        return None
    spare = [letter for letter in _LETTERS if letter not in "".join(terms)]
    if len(spare) < sum(len(g) - 1 for g in splits.values()):
        return None
    names = {label: label + "".join(spare.pop() for _ in group[1:]) for label, group in splits.items()}
    for i, (old, new) in enumerate(zip(node.operands, operands, strict=True)):
        if old is new and any(label in splits for label in terms[i]):
            return None
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


RULES = (canonical_labels, permuted_operand, flattened_rows, flattened_operands)
