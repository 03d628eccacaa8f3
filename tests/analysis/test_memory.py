"""Bytes that nodes read and write, and their operations."""

import pytest

from fusec.analysis.memory import flops, is_attention, is_lookup, moved_bytes, touched_bytes
from fusec.ir.graph import Graph, Node
from fusec.ir.types import F32, I64, DType, ScalarType, TensorType, contiguous_strides, symbol


def tensor(dtype: DType, *shape: int) -> TensorType:
    return TensorType(dtype, shape, contiguous_strides(shape))


def opaque(target: str, operands: tuple[TensorType, ...], *results: TensorType, rest: tuple[object, ...] = ()) -> Node:
    graph = Graph()
    values = [graph.add_input(type) for type in operands]
    attributes = {"target": target, "args": (*(("%", i) for i in range(len(values))), *rest), "kwargs": ()}
    return graph.add_node("opaque", values, attributes, types=results)


@pytest.mark.parametrize("target", ["embedding.default", "index.Tensor", "index_select.default"])
def test_a_lookup_reads_only_its_result(target: str) -> None:
    table, places, result = tensor(F32, 50_000, 64), tensor(I64, 3, 5), tensor(F32, 3, 5, 64)
    node = opaque(f"aten.{target}", (table, places), result)
    assert moved_bytes(node) == 2 * 3 * 5 * 64 * 4 + 3 * 5 * 8


def test_a_lookup_in_a_kernel_reads_only_its_result() -> None:
    graph = Graph()
    table, places = graph.add_input(tensor(F32, 50_000, 64)), graph.add_input(tensor(I64, 3, 5))
    assert moved_bytes(graph.add_node("take", (table, places), {"dim": -2})) == 2 * 3 * 5 * 64 * 4 + 3 * 5 * 8


def test_a_scatter_that_adds_reads_what_it_changes() -> None:
    graph = Graph()
    x, new, places = (graph.add_input(tensor(t, *shape)) for t, shape in ((F32, (50, 4)), (F32, (3, 4)), (I64, (3, 4))))
    for combine, moved in (({}, 2), ({"combine": "add"}, 3)):
        node = graph.add_node("scatter", (x, new, places), {"dim": -2, **combine})
        assert moved_bytes(node) == moved * 3 * 4 * 4


def test_other_calls_read_all_of_their_operands() -> None:
    node = opaque("aten.index_put.default", (tensor(F32, 50, 4), tensor(I64, 3)), tensor(F32, 50, 4))
    assert moved_bytes(node) == 2 * 50 * 4 * 4 + 3 * 8


def test_an_operand_read_twice_counts_once() -> None:
    graph = Graph()
    x = graph.add_input(tensor(F32, 6, 7))
    assert moved_bytes(graph.add_node("mul", (x, x))) == 2 * 6 * 7 * 4


def test_views_move_nothing_and_broadcast_elements_count_once() -> None:
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


def test_opaque_matmuls_count_their_operations() -> None:
    image, filters, result = tensor(F32, 2, 3, 9, 9), tensor(F32, 5, 3, 2, 2), tensor(F32, 2, 5, 8, 8)
    ones = ((1, 1), (0, 0), (1, 1))
    spread = opaque("aten.convolution.default", (result, filters), image, rest=(None, *ones, True, (0, 0), 1))
    assert flops(spread) == 2 * (2 * 5 * 8 * 8) * (3 * 2 * 2)
    biased = opaque("aten.convolution.default", (result, filters, tensor(F32, 3)), image, rest=(*ones, True, (0, 0), 1))
    assert flops(biased) == flops(spread)
    for bias in ((), (tensor(F32, 5),)):  # whose gradient is only added up
        rest = (None, *ones, False, (0, 0), 1, (True, True, bool(bias)))
        back = opaque("aten.convolution_backward.default", (result, image, filters), image, filters, *bias, rest=rest)
        assert flops(back) == 2 * flops(spread)
    rows, experts, ends = tensor(F32, 6, 7), tensor(F32, 4, 7, 11), tensor(I64, 4)
    grouped = opaque("transformers.grouped_mm_fallback.default", (rows, experts, ends), tensor(F32, 6, 11))
    assert flops(grouped) == 2 * 6 * 7 * 11
    bias, x, weight = tensor(F32, 11), tensor(F32, 6, 7), tensor(F32, 7, 11)
    assert flops(opaque("aten.addmm.default", (bias, x, weight), tensor(F32, 6, 11))) == 2 * 6 * 7 * 11
    assert flops(opaque("aten.sort.default", (x,), tensor(F32, 6, 7))) == 0


def test_a_convolution_sums_over_its_window() -> None:
    graph = Graph()
    image, filters = graph.add_input(tensor(F32, 2, 6, 9, 9)), graph.add_input(tensor(F32, 4, 3, 2, 2))
    attributes = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 2}
    node = graph.add_node("convolution", (image, filters), attributes)
    assert flops(node) == 2 * (2 * 4 * 10 * 10) * (3 * 2 * 2)
    assert moved_bytes(node) == 4 * (2 * 6 * 9 * 9 + 4 * 3 * 2 * 2 + 2 * 4 * 10 * 10)


def test_arithmetic_of_one_operation() -> None:
    graph = Graph()
    x, y = graph.add_input(tensor(F32, 6, 7)), graph.add_input(tensor(F32, 5, 7))
    exp = graph.add_node("exp", (x,))
    assert flops(exp) == 6 * 7 * exp.op.cost and exp.op.cost > 1
    assert flops(graph.add_node("sum", (x,), {"dims": (-1,)})) == 6 * 7
    assert flops(graph.add_node("contraction", (x, y), {"spec": "az,bz->ab"})) == 2 * 6 * 5 * 7
    assert flops(graph.add_node("reshape", (x,), {"shape": (42,)})) == 0
    body = Graph()
    inner = body.add_node("exp", (body.add_input(x.type),)).result
    body.set_outputs([body.add_node("sum", (inner,), {"dims": (-1,)}).result])
    region = graph.add_node("region", (x,), {"kind": "kernel", "body": body}, types=[tensor(F32, 6, 1)])
    assert flops(region) == 6 * 7 * exp.op.cost + 6 * 7


def test_a_call_of_attention_counts_both_matmuls() -> None:
    query, key, value = tensor(F32, 2, 3, 5, 7), tensor(F32, 2, 3, 11, 7), tensor(F32, 2, 3, 11, 13)
    call = opaque("aten.scaled_dot_product_attention.default", (query, key, value), tensor(F32, 2, 3, 5, 13))
    assert flops(call) == 2 * (2 * 3) * 5 * 11 * (7 + 13)
    assert is_attention(call) and not is_lookup(call) and moved_bytes(call) > 0


def test_a_write_moves_what_it_writes() -> None:
    graph = Graph()
    cache, row, place = (graph.add_input(t) for t in (tensor(F32, 50, 8), tensor(F32, 1, 8), tensor(I64, 1)))
    write = graph.add_node("write", (cache, row, place), {"dim": -2})
    assert moved_bytes(write) == 2 * 8 * 4 and flops(write) == 0


def test_values_that_are_no_tensors_have_no_bytes() -> None:
    graph = Graph()
    assert touched_bytes(graph.add_input(ScalarType("int", None))) == 0
    assert moved_bytes(graph.constant(1.0, F32).producer) == 0
