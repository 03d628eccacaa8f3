"""Structure: what computes the same has one key, what does not has another."""

import pytest

from fusec.ir.graph import Graph
from fusec.ir.structure import structure
from fusec.ir.types import F32, TensorType, contiguous_strides


def scaled(number: float, shape: tuple[int, ...] = (4, 8), name: str = "") -> Graph:
    graph = Graph()
    x = graph.add_input(TensorType(F32, shape, contiguous_strides(shape)), name)
    graph.set_outputs([graph.add_node("mul", [x, graph.constant(number, F32)]).result])
    return graph


def test_names_do_not_count() -> None:
    assert structure(scaled(2.0, name="x")) == structure(scaled(2.0, name="y"))


def test_one_nan_is_as_good_as_another() -> None:
    assert structure(scaled(float("nan"))) == structure(scaled(float("nan")))


@pytest.mark.parametrize("other", [scaled(-0.0), scaled(1.0), scaled(0), scaled(0.0, (8, 4))])
def test_what_differs(other: Graph) -> None:
    assert structure(scaled(0.0)) != structure(other)


def test_which_results_are_given_counts() -> None:
    graph = scaled(0.0)
    graph.set_outputs([*graph.outputs, *graph.inputs])
    assert structure(graph) != structure(scaled(0.0))
