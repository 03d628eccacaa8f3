"""The matcher finds what networkx finds, and says why where it finds nothing."""

import math
import random

import networkx as nx
import pytest
from networkx.algorithms.isomorphism import DiGraphMatcher

from fusec.ir.graph import Graph, Node, Source, Value
from fusec.ir.ops import Trait
from fusec.ir.types import BF16, F32, F64, I64, DType, TensorType, contiguous_strides
from fusec.rewriting.match import Match, MatchFailure, Pattern, same_number
from fusec.rewriting.matcher import Matcher

X = TensorType(F32, (4, 8), contiguous_strides((4, 8)))


def random_graph(rng: random.Random, inputs: int, nodes: int) -> Graph:
    graph = Graph()
    values = [graph.add_input(X) for _ in range(inputs)]
    for _ in range(nodes):
        op = rng.choice(["add", "mul", "sub", "exp", "tanh"])
        arity = 1 if op in ("exp", "tanh") else 2
        values.append(graph.add_node(op, [rng.choice(values[-5:]) for _ in range(arity)]).result)
    graph.set_outputs([values[-1]])
    graph.erase_dead()
    return graph


def as_pattern(graph: Graph) -> Pattern:
    tensors = {v: f"p{i}" for i, v in enumerate(graph.inputs)}
    return Pattern("random", "reference", graph, tensors, {}, {}, (0,), False)


def to_networkx(graph: Graph) -> nx.DiGraph:
    """Nodes with operations, edges with operand positions (a set; commutative operands have none)."""
    out = nx.DiGraph()
    for node in graph.nodes:
        out.add_node(node, op=node.op.name)
    for node in graph.nodes:
        for i, v in enumerate(node.operands):
            if v.producer is not None:
                at = "any" if node.has(Trait.COMMUTATIVE) else i
                slots = out.get_edge_data(v.producer, node, {"slots": ()})["slots"]
                out.add_edge(v.producer, node, slots=(*slots, at))
    return out


def fits(pattern: Graph, mapping: dict[Node, Node]) -> bool:
    """Whether a structural match also binds every variable to one value from outside, in any order of operands."""
    inside = set(mapping.values())

    def solve(nodes: list[Node], bound: dict[Value, Value]) -> bool:
        if not nodes:
            return True
        node, *rest = nodes
        operands = mapping[node].operands
        for order in (operands, operands[::-1]) if node.has(Trait.COMMUTATIVE) else (operands,):
            trial = dict(bound)
            for p, v in zip(node.operands, order, strict=True):
                if p.producer is not None:
                    if mapping[p.producer].result is not v:
                        break
                elif v.producer in inside or trial.setdefault(p, v) is not v:
                    break
            else:
                if solve(rest, trial):
                    return True
        return False

    return solve(pattern.nodes, {})


def enclosed(graph: Graph, pattern: Graph, mapping: dict[Node, Node]) -> bool:
    """Whether nobody outside reads an intermediate."""
    inside = set(mapping.values())
    root = mapping[pattern.outputs[0].producer]  # type: ignore[index]
    for node in inside - {root}:
        if node.result in graph.outputs or any(u not in inside for u in node.result.users):
            return False
    return True


def oracle(graph: Graph, pattern: Graph) -> set[Node]:
    """Where networkx finds the pattern, by root."""
    found = set()
    matcher = DiGraphMatcher(
        to_networkx(graph),
        to_networkx(pattern),
        node_match=lambda a, b: a["op"] == b["op"],
        edge_match=lambda a, b: set(b["slots"]) <= set(a["slots"]),
    )
    for mapping in matcher.subgraph_monomorphisms_iter():
        inverse = {p: n for n, p in mapping.items()}
        if fits(pattern, inverse) and enclosed(graph, pattern, inverse):
            found.add(inverse[pattern.outputs[0].producer])  # type: ignore[index]
    return found


@pytest.mark.parametrize("seed", range(150))
def test_it_agrees_with_networkx(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, 3, 9)
    pattern = random_graph(rng, 2, rng.choice([1, 2, 3]))
    if not pattern.nodes:
        return
    outputs = set(graph.outputs)
    matcher = Matcher(as_pattern(pattern), graph, outputs)
    found = {n for n in graph.nodes if isinstance(matcher.match(n.result), Match)}
    assert found == oracle(graph, pattern)


@pytest.mark.parametrize(
    ("a", "b", "dtype", "same"),
    [
        (1 << 24, (1 << 24) + 1, F32, True), (1 << 24, (1 << 24) + 1, I64, False), (1e300, 2e300, F32, True),
        (0.1, 0.10000000149011612, F32, True), (0.1, 0.10000000149011612, F64, False), (0.0, -0.0, F64, True),
        (math.nan, math.nan, F64, True), (math.nan, 0.0, F32, False), (True, 1, I64, True),
    ],
)  # fmt: skip
def test_numbers_are_one_where_the_type_cannot_tell_them_apart(a: float, b: float, dtype: DType, same: bool) -> None:
    assert same_number(a, b, dtype) is same_number(b, a, dtype) is same


def softplus_like() -> Graph:
    graph = Graph()
    x, y = graph.add_input(X, "x"), graph.add_input(X, "y")
    total = graph.add_node("add", [graph.add_node("exp", [x]).result, y]).result
    graph.set_outputs([graph.add_node("mul", [total, total]).result])
    return graph


def failure(change: str) -> MatchFailure:
    graph = softplus_like()
    pattern = as_pattern(softplus_like())
    exp, add, _ = graph.nodes
    if change == "users":
        graph.set_outputs([*graph.outputs, add.result])
    if change == "operation":
        new = graph.add_node("tanh", exp.operands).result
        graph.replace_value(exp.result, new)
    if change == "type":
        graph.inputs[1].type = X.with_dtype(BF16)
    if change == "shape":
        graph.inputs[1].type = X.with_shape((8,))
    graph.sort()
    found = Matcher(pattern, graph, set(graph.outputs)).match(graph.outputs[0])
    assert isinstance(found, MatchFailure)
    return found


@pytest.mark.parametrize("clause", ["users", "operation", "type", "shape"])
def test_a_failure_names_the_clause(clause: str) -> None:
    found = failure(clause)
    assert found.clause == clause
    assert found.expected
    assert found.found


def test_a_failure_points_at_the_line_of_the_node_at_fault() -> None:
    graph = softplus_like()
    for line, node in enumerate(graph.nodes, 1):
        node.sources = (Source(file="model.py", line=line),)
    exp, _, mul = graph.nodes
    tanh = graph.add_node("tanh", exp.operands)
    graph.replace_value(exp.result, tanh.result)
    graph.sort()
    for sources in ((Source(file="model.py", line=9),), ()):
        tanh.sources = sources
        found = Matcher(as_pattern(softplus_like()), graph, set(graph.outputs)).match(graph.outputs[0])
        assert isinstance(found, MatchFailure) and found.node is tanh
        assert found.sources == (sources or mul.sources)


def test_the_best_attempt_is_the_deepest() -> None:
    assert failure("users").depth == 3
    assert failure("operation").depth < 3


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_match_reads_nothing_that_is_computed_from_it(steps: int) -> None:
    graph = Graph()
    x, y, z = (graph.add_input(X) for _ in range(3))
    total = graph.add_node("add", [x, y]).result
    gate = total if steps else z
    for _ in range(steps):
        gate = graph.add_node("tanh", [gate]).result
    graph.set_outputs([graph.add_node("mul", [graph.add_node("exp", [total]).result, gate]).result, total])
    pattern = Graph()
    total = pattern.add_node("add", [pattern.add_input(X), pattern.add_input(X)]).result
    product = pattern.add_node("mul", [pattern.add_node("exp", [total]).result, pattern.add_input(X)]).result
    pattern.set_outputs([product, total])
    found = Matcher(as_pattern(pattern), graph, set(graph.outputs)).match(graph.outputs[0])
    assert isinstance(found, MatchFailure) == bool(steps)
    assert isinstance(found, Match) or found.clause == "convex"
