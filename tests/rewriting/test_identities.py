"""Rewrites: what the right side gets of numbers, sizes and tensors, and where the left side is not met."""

from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from fusec import Dims
from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph
from fusec.ir.verifier import verify_graph
from fusec.passes.canonicalize import normalize
from fusec.passes.patterns import trace_types
from fusec.passes.traces import Traces
from fusec.pipeline import Context
from fusec.reference.interpreter import evaluate
from fusec.rewriting.application import apply_declared
from fusec.rewriting.pattern import PatternLibrary
from fusec.rewriting.rule import REWRITES, Rewrite, rewrite
from fusec.verify.rewrites import check_rewrite

Rows = Annotated[Tensor, Dims("*batch cols")]
Pairs = Annotated[Tensor, Dims("*batch 2*half")]


@rewrite
def common_factor(x: Rows, y: Rows, a: float) -> Tensor:
    """x·a + y·a = (x + y)·a"""
    return x * a + y * a


@common_factor.to
def _(x: Tensor, y: Tensor, a: float) -> Tensor:
    return (x + y) * a


@rewrite(exact=False)  # the field knows nothing of an order after arithmetic
def shifted_maximum(x: Rows, y: Rows, a: float) -> Tensor:
    """max(x - a, y - a) = max(x, y) - a"""
    return torch.maximum(x - a, y - a)


@shifted_maximum.to
def _(x: Tensor, y: Tensor, a: float) -> Tensor:
    return torch.maximum(x, y) - a


@rewrite
def mean_of_sum(x: Rows, y: Rows) -> Tensor:
    """The sum of two means is the mean of the sum."""
    return x.mean(-1, keepdim=True) + y.mean(-1, keepdim=True)


@mean_of_sum.to
def _(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).mean(-1, keepdim=True)


@rewrite(exact=False)
def around(x: Rows, a: float) -> Tensor:
    """What is taken away and added cancels."""
    return (x - a) + (x + a)


@around.to
def _(x: Tensor) -> Tensor:
    return x + x


@rewrite
def half_at_once(x: Pairs) -> Tensor:
    """Functions of both halves side by side are the function of the whole."""
    half = x.shape[-1] // 2
    return torch.cat((torch.tanh(x[..., :half]), torch.tanh(x[..., half:])), -1) * torch.tanh(x)


@half_at_once.to
def _(x: Tensor) -> Tensor:
    return torch.tanh(x).reshape(*x.shape[:-1], 2, x.shape[-1] // 2).reshape(x.shape) * torch.tanh(x)


@rewrite(exact=False)
def logarithm_undone(x: Rows) -> Tensor:
    """exp(log x) = x"""
    return torch.exp(torch.log(x))


@logarithm_undone.to
def _(x: Tensor) -> Tensor:
    return x


OWN = [
    REWRITES.pop(name)
    for name in ("common_factor", "shifted_maximum", "mean_of_sum", "around", "half_at_once", "logarithm_undone")
]
"""Declared for the tests of this file alone."""
TRACES = Traces(trace_types)


def applied(
    rule: Rewrite, function: Callable[..., Any], *inputs: Any, verify: bool = True, symbolic: bool = False
) -> tuple[Graph, Context]:
    """The graph after the rule, which has kept the meaning."""
    graph = trace(function, inputs, symbolic=symbolic)
    normalize(graph)
    before, context = graph.copy(), Context(Config(verify=verify))
    count = apply_declared([rule], graph, PatternLibrary(TRACES, normalize), context)
    assert count == context.verified == len(context.remarks.of("passed")) or not verify
    assert not context.remarks.of("failure")
    assert check_rewrite(before, graph, exact=rule.exact), graph
    return graph, context


X, Y = torch.randn(3, 6), torch.randn(3, 6)


def numbers(graph: Graph) -> list[float]:
    return [n.attributes["value"] for n in graph.nodes if n.is_op("constant")]


def test_a_number_that_is_bound_twice_must_be_one() -> None:
    graph, context = applied(common_factor, lambda x, y: x * 0.3 + y * 0.3, X, Y)
    assert [n.op.name for n in graph.nodes if not n.is_op("constant")] == ["add", "mul"] and numbers(graph) == [0.3]
    graph, context = applied(common_factor, lambda x, y: x * 0.3 + y * 0.7, X, Y)
    assert context.verified == 0 and sorted(numbers(graph)) == [0.3, 0.7]
    _, context = applied(around, lambda x: (x - 0.3) + (x + 0.3), X)
    assert context.verified == 1
    _, context = applied(around, lambda x: (x - 0.3) + (x + 0.7), X)
    assert context.verified == 0


def test_a_number_may_be_a_value_of_the_graph() -> None:
    a, b = torch.tensor(0.3), torch.tensor(0.7)
    graph, context = applied(common_factor, lambda x, y, a: x * a + y * a, X, Y, a)
    assert context.verified == 1 and [n.op.name for n in graph.nodes] == ["add", "mul"]
    assert graph.nodes[1].operands[1] is graph.inputs[2] or graph.nodes[1].operands[0] is graph.inputs[2]
    _, context = applied(common_factor, lambda x, y, a, b: x * a + y * b, X, Y, a, b)
    assert context.verified == 0
    _, context = applied(common_factor, lambda x, y, a: x * a + y * 0.3, X, Y, a)
    assert context.verified == 0


@pytest.mark.parametrize("number", [0.75, -0.75])
def test_a_number_keeps_its_sign(number: float) -> None:
    graph, context = applied(shifted_maximum, lambda x, y: torch.maximum(x - number, y - number), X, Y)
    assert context.verified == 1 and numbers(graph) == [-number]


def test_a_negated_number_is_no_value() -> None:
    """x - a for a value a is no x + (-a): the canonical form of the pattern is not met."""
    a = torch.tensor(0.5)
    _, context = applied(shifted_maximum, lambda x, y, a: torch.maximum(x + a, y + a), X, Y, a)
    assert context.verified == 0


@pytest.mark.parametrize("columns", [6, 10])
def test_sizes_of_the_right_side_are_those_of_the_match(columns: int) -> None:
    x, y = torch.randn(2, 3, columns), torch.randn(2, 3, columns)
    graph, context = applied(mean_of_sum, lambda x, y: x.mean(-1, keepdim=True) + y.mean(-1, keepdim=True), x, y)
    assert context.verified == 1 and sum(n.is_op("sum") for n in graph.nodes) == 1
    (size,) = [n.attributes["expr"] for n in graph.nodes if n.is_op("size")]
    assert type(size) is int and size == columns
    graph, context = applied(half_at_once, half_at_once.before, x)
    assert context.verified == 1 and not any(n.is_op("concat") for n in graph.nodes)


def test_sizes_of_the_right_side_may_be_unknown() -> None:
    x, y = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    graph, context = applied(mean_of_sum, mean_of_sum.before, x, y, symbolic=True)
    assert context.verified == 1 and sum(n.is_op("sum") for n in graph.nodes) == 1
    assert [n.attributes["expr"] for n in graph.nodes if n.is_op("size")] == [graph.inputs[0].shape[-1]]


def test_an_application_that_is_not_selected_is_not_made() -> None:
    graph = trace(lambda x, y: (x * 0.3 + y * 0.3) * (x * 0.5 + y * 0.5), [X, Y], symbolic=False)
    normalize(graph)
    context = Context(Config(apply="1"))
    assert apply_declared([common_factor], graph, PatternLibrary(TRACES, normalize), context) == 1
    assert [r.application for r in context.remarks.of("passed")] == [1]
    assert [r.application for r in context.remarks.of("missed") if r.application is not None] == [0]


def test_a_wrong_right_side_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_factor, "after", lambda x, y, a: (x - y) * a)
    graph = trace(lambda x, y: x * 0.3 + y * 0.3, [X, Y], symbolic=False)
    normalize(graph)
    text, context = str(graph), Context(Config(verify=True))
    assert apply_declared([common_factor], graph, PatternLibrary(TRACES, normalize), context) == 0
    assert str(graph) == text
    (failure,) = context.remarks.of("failure")
    assert "common_factor changes the result" in failure.message and failure.application == 0


def test_a_left_side_in_another_type_or_shape_is_not_met() -> None:
    _, context = applied(common_factor, lambda x, y: x * 0.3 + y * 0.3, X, torch.randn(6))
    assert context.verified == 0
    _, context = applied(common_factor, lambda x, y: x * 0.3 + (y * 0.3), X.double(), Y.double())
    assert context.verified == 1


@pytest.mark.parametrize(
    ("rest", "count"),
    [
        ("%r: f32[2, 4] = sub(%w, %v) return %r", 0),
        ("%r: f32[2, 4] = sin(%v) return %r, %w", 1),
        ("return %v, %w", 0),
    ],
    ids=["read after the write", "read before the write", "returned"],
)
def test_an_operand_that_is_written_later_does_not_replace_a_value_that_is_read_after_the_write(
    rest: str, count: int
) -> None:
    graph = parse_graph(
        "graph g(%x: f32[2, 4], %y: f32[2, 4]) { %l: f32[2, 4] = log(%x) %v: f32[2, 4] = exp(%l)"
        f" %w: f32[2, 4] = write(%x, %y) {rest} }}"
    )
    inputs = [torch.rand(2, 4), torch.rand(2, 4)]
    expected = evaluate(graph, [x.clone() for x in inputs], mutate=True)
    assert apply_declared([logarithm_undone], graph, PatternLibrary(TRACES, normalize)) == count
    verify_graph(graph)
    for e, f in zip(expected, evaluate(graph, inputs, mutate=True), strict=True):
        torch.testing.assert_close(f, e)
