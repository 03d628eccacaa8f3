"""Canonical arithmetic: constants on the right, no neutral elements, one form for inverses."""

import math

from fusec.ir.graph import Graph, Node, Value
from fusec.ir.types import TensorType
from fusec.loops.intervals import Interval, interval
from fusec.passes.canonicalize.numbers import number_of, number_throughout
from fusec.rewriting.driver import simplifies


def _same_type(value: Value, node: Node) -> Value | None:
    """Return ``value`` if it has the shape and dtype of the node's result; otherwise None."""
    result = node.result.type
    return value if isinstance(result, TensorType) and result.same_values(value.type) else None


def _like(graph: Graph, node: Node, op: str, *operands: Value) -> Value:
    return graph.add_node(op, operands, types=[node.result.type]).result


@simplifies("add", "mul", "maximum", "minimum", "and", "or", "xor", "eq", "ne")
def constant_right(graph: Graph, node: Node) -> Value | None:
    """c ∘ x = x ∘ c: the constant comes second."""
    a, b = node.operands
    if number_of(a) is None or number_of(b) is not None:
        return None
    return _like(graph, node, node.op.name, b, a)


@simplifies("mul", "div", "pow", "floor_divide")
def times_one(graph: Graph, node: Node) -> Value | None:
    """x·1 = x/1 = x¹ = x."""
    x, c = node.operands
    if number_of(c) != 1 or (node.is_op("floor_divide") and x.dtype.is_float):
        return None
    return _same_type(x, node)


@simplifies("add", "sub")
def plus_zero(graph: Graph, node: Node) -> Value | None:
    """x + (-0) = x - 0 = x; x + 0 only for integers, as it turns -0 into 0."""
    x, c = node.operands
    zero = number_of(c)
    if zero is None or zero != 0:
        return None
    neutral_sign = 1.0 if node.is_op("sub") else -1.0
    if x.dtype.is_float and math.copysign(1.0, zero) != neutral_sign:
        return None
    return _same_type(x, node)


@simplifies("sum", "prod", "max", "min")
def single_elements(graph: Graph, node: Node) -> Value | None:
    """The sum or the largest of a single element is the element."""
    (x,), dims = node.operands, node.attributes["dims"]
    return _same_type(x, node) if all(x.shape[d] == 1 for d in dims) else None


@simplifies("min")
def all_lowest(graph: Graph, node: Node) -> Value | None:
    """All of x are -∞ exactly where the largest is: a softmax over masked rows has that already."""
    test = node.operands[0].producer
    if test is None or not test.is_op("eq") or number_of(test.operands[1]) != -math.inf:
        return None
    x, lowest = test.operands
    largest = graph.add_node("max", (x,), dict(node.attributes)).result
    return _like(graph, node, "eq", largest, lowest)


@simplifies("sub")
def minus_constant(graph: Graph, node: Node) -> Value | None:
    """x - c = x + (-c)."""
    x, c = node.operands
    n = number_of(c)
    if n is None or n == 0 or not x.dtype.is_float:
        return None
    return _like(graph, node, "add", x, graph.constant(-n, c.dtype, c.tensor.device))


@simplifies("add", "sub")
def plus_negative(graph: Graph, node: Node) -> Value | None:
    """x + (-y) = x - y, and x - (-y) = x + y."""
    x, y = node.operands
    if node.is_op("add") and x.producer is not None and x.producer.is_op("neg"):
        x, y = y, x
    if y.producer is None or not y.producer.is_op("neg") or not x.dtype.is_float:
        return None
    return _like(graph, node, "sub" if node.is_op("add") else "add", x, y.producer.operands[0])


@simplifies("mul", "div")
def times_minus_one(graph: Graph, node: Node) -> Value | None:
    """x·(-1) = x/(-1) = -x."""
    x, c = node.operands
    if number_of(c) != -1 or _same_type(x, node) is None or not x.dtype.is_float:
        return None
    return _like(graph, node, "neg", x)


@simplifies("neg", "not")
def double_negation(graph: Graph, node: Node) -> Value | None:
    """-(-x) = x, ¬¬x = x."""
    (x,) = node.operands
    if x.producer is None or x.producer.op is not node.op:
        return None
    return x.producer.operands[0]


@simplifies("pow")
def small_power(graph: Graph, node: Node) -> Value | None:
    """x² = x·x and x³ = x·x·x, which is how eager computes them."""
    x, c = node.operands
    n = number_of(c)
    if n not in (2, 3) or isinstance(n, bool) or not x.dtype.is_float:
        return None
    square = _like(graph, node, "mul", x, x)
    return square if n == 2 else _like(graph, node, "mul", square, x)


@simplifies("div")
def divide_by_power_of_two(graph: Graph, node: Node) -> Value | None:
    """x/2ᵏ = x·2⁻ᵏ; the division of a sum is kept, as it is the form of a mean."""
    x, c = node.operands
    n = number_of(c)
    if n is None or not x.dtype.is_float:
        return None
    if x.producer is not None and x.producer.is_op("sum"):
        return None
    mantissa, exponent = math.frexp(n)
    if abs(mantissa) != 0.5 or abs(exponent) > 100:
        return None
    return _like(graph, node, "mul", x, graph.constant(1.0 / n, c.dtype, c.tensor.device))


@simplifies("div")
def one_over(graph: Graph, node: Node) -> Value | None:
    """1/x is the reciprocal."""
    c, x = node.operands
    if number_of(c) != 1 or number_of(x) is not None or not x.dtype.is_float or _same_type(x, node) is None:
        return None
    return _like(graph, node, "reciprocal", x)


@simplifies("reciprocal", exact=False)
def reciprocal_root(graph: Graph, node: Node) -> Value | None:
    """1/√x is the reciprocal root: one rounding less."""
    (x,) = node.operands
    if x.producer is None or not x.producer.is_op("sqrt"):
        return None
    return _like(graph, node, "rsqrt", x.producer.operands[0])


@simplifies("exp", exact=False)
def exponential_of_logarithm(graph: Graph, node: Node) -> Value | None:
    """exp(a - log Σ exp a) = exp a / Σ exp a, where a = x - max x: nothing overflows, and the sum is 1 at least."""
    (difference,) = node.operands
    if difference.producer is None or not difference.producer.is_op("sub"):
        return None
    a, logarithm = difference.producer.operands
    log, shift = logarithm.producer, a.producer
    if log is None or not log.is_op("log") or shift is None or not shift.is_op("sub"):
        return None
    total, (x, largest) = log.operands[0].producer, shift.operands
    if total is None or not total.is_op("sum") or largest.producer is None or not largest.producer.is_op("max"):
        return None
    exponential, dims = total.operands[0].producer, dict(total.attributes)
    if exponential is None or not exponential.is_op("exp") or exponential.operands[0] is not a:
        return None
    if largest.producer.operands[0] is not x or dict(largest.producer.attributes) != dims:
        return None
    shifted = graph.add_node("sub", [x, graph.add_node("max", [x], dims).result]).result
    e = graph.add_node("exp", [shifted]).result
    return _like(graph, node, "div", e, graph.add_node("sum", [e], dims).result)


@simplifies("where")
def where_of_known_condition(graph: Graph, node: Node) -> Value | None:
    """A choice whose condition is a number, or whose branches are one value."""
    condition, a, b = node.operands
    known = number_throughout(condition)
    if a is not b and known is None:
        return None
    return _same_type(a if a is b or known else b, node)


@simplifies("where")
def where_of_true_and_false(graph: Graph, node: Node) -> Value | None:
    """c ? true : false = c."""
    condition, a, b = node.operands
    if node.result.dtype.kind != "bool" or number_of(a) != 1 or number_of(b) != 0:
        return None
    return _same_type(condition, node)


@simplifies("where")
def where_of_negation(graph: Graph, node: Node) -> Value | None:
    """¬c ? a : b = c ? b : a."""
    condition, a, b = node.operands
    if condition.producer is None or not condition.producer.is_op("not"):
        return None
    return _like(graph, node, "where", condition.producer.operands[0], b, a)


@simplifies("eq", "ne")
def comparison_of_bools(graph: Graph, node: Node) -> Value | None:
    """(x = true) = (x ≠ false) = x, and (x = false) = (x ≠ true) = ¬x, for booleans."""
    x, c = node.operands
    known = number_of(c)
    if known is None or x.dtype.kind != "bool":
        return None
    same = _same_type(x, node)
    return same if same is None or bool(known) == node.is_op("eq") else _like(graph, node, "not", x)


@simplifies("and", "or")
def neutral_bool(graph: Graph, node: Node) -> Value | None:
    """x ∧ true = x, x ∨ false = x."""
    for x, c in (node.operands, node.operands[::-1]):
        known = number_throughout(c)
        if known is not None and x.dtype.kind == "bool" and bool(known) == node.is_op("and"):
            return graph.add_node("expand", [x], {"shape": node.result.shape}).result
    return None


@simplifies("lt", "le", "gt", "ge", "eq", "ne")
def decided_comparison(graph: Graph, node: Node) -> Value | None:
    """A comparison of integers that has one outcome for all they can be, as of 0, 1, … n-1 with n."""
    a, b = (interval(v) for v in node.operands)
    if a is None or b is None:
        return None
    known = _outcome(node.op.name, a, b)
    if known is None:
        return None
    truth = graph.constant(known, node.result.dtype, node.result.tensor.device)
    return graph.add_node("expand", [truth], {"shape": node.result.shape}).result


@simplifies("minimum", "maximum", conditional=True)
def decided_extreme(graph: Graph, node: Node) -> Value | None:
    """The smaller or larger of two integers, where it is the same one for all they can be."""
    for x, other in (node.operands, node.operands[::-1]):
        a, b = interval(x), interval(other)
        if a is not None and b is not None and _outcome("le" if node.is_op("minimum") else "ge", a, b):
            return graph.add_node("expand", [x], {"shape": node.result.shape}).result
    return None


def _outcome(op: str, a: Interval, b: Interval) -> bool | None:
    """Return the outcome of a comparison of any two numbers of two intervals; None where there are both."""
    if op in ("gt", "ge"):
        return _outcome("lt" if op == "gt" else "le", b, a)
    if op in ("eq", "ne"):
        apart = a[1] < b[0] or b[1] < a[0]
        return (op == "ne") if apart else (op == "eq") if a == b and a[0] == a[1] else None
    always = a[1] < b[0] if op == "lt" else a[1] <= b[0]
    never = a[0] >= b[1] if op == "lt" else a[0] > b[1]
    return True if always else False if never else None
