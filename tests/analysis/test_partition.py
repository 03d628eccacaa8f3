"""Merging closes a cycle exactly where an exhaustive search finds a path through another group."""

import random

import pytest

from fusec.analysis.partition import Partition
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


def path_through_another(partition: Partition, first: set[Node], second: set[Node]) -> bool:
    found, stack = set[Node](), [user for node in first for user in node.users if user not in first | second]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [user for member in partition.group_of[node] for user in member.users if user not in first]
    return not second.isdisjoint(found)


@pytest.mark.parametrize("seed", range(40))
def test_cycles(seed: int) -> None:
    rng = random.Random(seed)
    graph = sparse_graph(rng, 40)
    partition = Partition(Uses(graph, ()))
    for node in graph:
        partition.put({node})
    edges = [(v.producer, node) for node in graph for v in node.operands if v.producer is not None]
    answers = set()
    for producer, node in rng.sample(edges, len(edges)):
        first, second = partition.group_of[producer], partition.group_of[node]
        if first is not second:
            cycle = partition.closes_cycle(first, second)
            assert cycle == path_through_another(partition, first, second)
            if not cycle and rng.random() < 0.5:
                partition.put(first | second)
            answers.add(cycle)
    assert answers == {True, False}
