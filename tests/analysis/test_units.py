"""Joining closes a circle exactly where an exhaustive search finds a path through another unit."""

import random

import pytest

from fusec.analysis.units import Units
from fusec.analysis.uses import Uses
from fusec.ir.graph import Graph, Node
from fusec.ir.types import F32, TensorType, contiguous_strides

TYPE = TensorType(F32, (4, 8), contiguous_strides((4, 8)))


def sparse_graph(rng: random.Random, size: int) -> Graph:
    graph = Graph()
    values = [graph.add_input(TYPE)]
    for _ in range(size):
        values.append(graph.add_node("add", [rng.choice(values[-8:]), rng.choice(values[-8:])]).result)
    graph.set_outputs(values[-1:])
    return graph


def path_through_another(units: Units, first: set[Node], second: set[Node]) -> bool:
    found, stack = set[Node](), [user for node in first for user in node.users if user not in first | second]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [user for member in units.of[node] for user in member.users if user not in first]
    return not second.isdisjoint(found)


@pytest.mark.parametrize("seed", range(40))
def test_circles(seed: int) -> None:
    rng = random.Random(seed)
    graph = sparse_graph(rng, 40)
    units = Units(Uses(graph, ()))
    for node in graph:
        units.put({node})
    edges = [(v.producer, node) for node in graph for v in node.operands if v.producer is not None]
    answers = set()
    for producer, node in rng.sample(edges, len(edges)):
        first, second = units.of[producer], units.of[node]
        if first is not second:
            circle = units.closes_cycle(first, second)
            assert circle == path_through_another(units, first, second)
            if not circle and rng.random() < 0.5:
                units.put(first | second)
            answers.add(circle)
    assert answers == {True, False}
