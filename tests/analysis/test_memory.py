"""Bytes that nodes move and their arithmetic: what is read counts, not what it is read from."""

import pytest

from fusec.analysis.memory import flops, moved_bytes
from fusec.ir.graph import Graph, Node
from fusec.ir.types import F32, I64, DType, TensorType, contiguous_strides, symbol


def tensor(dtype: DType, *shape: int) -> TensorType:
    return TensorType(dtype, shape, contiguous_strides(shape))


def opaque(target: str, operands: tuple[TensorType, ...], result: TensorType) -> Node:
    graph = Graph()
    values = [graph.add_input(type) for type in operands]
    attributes = {"target": target, "args": tuple(("%", i) for i in range(len(values))), "kwargs": ()}
    return graph.add_node("opaque", values, attributes, types=[result])


@pytest.mark.parametrize("target", ["embedding.default", "index.Tensor", "index_select.default"])
def test_a_lookup_reads_what_it_gives(target: str) -> None:
    table, places, result = tensor(F32, 50_000, 64), tensor(I64, 3, 5), tensor(F32, 3, 5, 64)
    node = opaque(f"aten.{target}", (table, places), result)
    assert moved_bytes(node) == 2 * 3 * 5 * 64 * 4 + 3 * 5 * 8


def test_other_calls_read_all_of_their_operands() -> None:
    node = opaque("aten.index_put.default", (tensor(F32, 50, 4), tensor(I64, 3)), tensor(F32, 50, 4))
    assert moved_bytes(node) == 2 * 50 * 4 * 4 + 3 * 8


def test_an_operand_read_twice_counts_once() -> None:
    graph = Graph()
    x = graph.add_input(tensor(F32, 6, 7))
    assert moved_bytes(graph.add_node("mul", (x, x))) == 2 * 6 * 7 * 4


def test_views_move_nothing_and_spread_elements_count_once() -> None:
    graph = Graph()
    x = graph.add_input(tensor(F32, 1, 7))
    spread = graph.add_node("expand", (x,), {"shape": (6, 7)})
    assert moved_bytes(spread) == 0
    y = graph.add_input(tensor(F32, 6, 7))
    assert moved_bytes(graph.add_node("add", (spread.result, y))) == 7 * 4 + 2 * 6 * 7 * 4


def test_symbolic_sizes_stay() -> None:
    n = symbol("n")
    graph = Graph()
    x = graph.add_input(TensorType(F32, (n, 8), (8, 1)))
    assert moved_bytes(graph.add_node("exp", (x,))) == 64 * n


def test_opaque_products_count_their_arithmetic() -> None:
    image, filters, result = tensor(F32, 2, 3, 9, 9), tensor(F32, 5, 3, 2, 2), tensor(F32, 2, 5, 8, 8)
    assert flops(opaque("aten.convolution.default", (image, filters), result)) == 2 * (2 * 5 * 8 * 8) * (3 * 2 * 2)
    rows, experts, ends = tensor(F32, 6, 7), tensor(F32, 4, 7, 11), tensor(I64, 4)
    grouped = opaque("transformers.grouped_mm_fallback.default", (rows, experts, ends), tensor(F32, 6, 11))
    assert flops(grouped) == 2 * 6 * 7 * 11
    bias, x, weight = tensor(F32, 11), tensor(F32, 6, 7), tensor(F32, 7, 11)
    assert flops(opaque("aten.addmm.default", (bias, x, weight), tensor(F32, 6, 11))) == 2 * 6 * 7 * 11
    assert flops(opaque("aten.sort.default", (x,), tensor(F32, 6, 7))) == 0
