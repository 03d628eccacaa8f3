"""Bytes, operations and predicted times on kernels that are easy to count, and the machines behind them."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import sympy

from fusec import config
from fusec.analysis.cost import Cost, compute_bound_from, kernel_cost, node_cost
from fusec.analysis.machine import (
    ASSUMED,
    CHIPS,
    DATASHEET,
    Machine,
    assumed_cpu,
    chip,
    cpu_machine,
    profile_path,
    store_machine,
)
from fusec.config import Config
from fusec.errors import OptionError
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.types import BF16, F32, DType, Size, TensorType, contiguous_strides, symbol
from fusec.loops.indexing import lower_to_loops
from fusec.loops.recomputation import evaluations, repetitions

ROWS = symbol("rows")
A100 = CHIPS["a100"]
SLOW = Machine("slow", "measured", 10.0, {"vector f32": 20.0, "matrix f32": 100.0}, 2.0, 1 << 20, 40.0)


def tensor(graph: Graph, *shape: Size, dtype: DType = F32) -> Value:
    return graph.add_input(TensorType(dtype, shape, contiguous_strides(shape)))


def product(dtype: DType, rows: Size, columns: int, summed: int) -> Node:
    graph = Graph()
    operands = tensor(graph, rows, summed, dtype=dtype), tensor(graph, columns, summed, dtype=dtype)
    return graph.add_node("contraction", operands, {"spec": "az,bz->ab"})


def norm() -> Graph:
    graph = Graph()
    x, weight = tensor(graph, 40, 64), tensor(graph, 64)
    total = graph.add_node("sum", [graph.add_node("mul", [x, x]).result], {"dims": (-1,)}).result
    scaled = graph.add_node("mul", [x, graph.add_node("rsqrt", [total]).result]).result
    graph.set_outputs([graph.add_node("mul", [scaled, weight]).result])
    return graph


def attention() -> Graph:
    graph = Graph()
    q, k, v = (tensor(graph, 2, n, 16) for n in (24, 40, 40))
    scores = graph.add_node("contraction", [q, k], {"spec": "baz,bcz->bac"}).result
    largest = graph.add_node("max", [scores], {"dims": (-1,)}).result
    e = graph.add_node("exp", [graph.add_node("sub", [scores, largest]).result]).result
    weights = graph.add_node("div", [e, graph.add_node("sum", [e], {"dims": (-1,)}).result]).result
    graph.set_outputs([graph.add_node("contraction", [weights, v], {"spec": "bac,bcd->bad"}).result])
    return graph


def in_one_kernel(body: Graph) -> Cost:
    return kernel_cost(body, evaluations(lower_to_loops(body)), SLOW)


def test_the_cost_of_a_matmul_is_symbolic() -> None:
    cost = node_cost(product(BF16, ROWS, 300, 200))
    assert sympy.expand(cost.bytes - 2 * (200 * ROWS + 300 * 200 + 300 * ROWS)) == 0
    assert cost.work == {("matrix", "bf16"): 2 * 300 * 200 * ROWS}
    numbers = cost.at({"rows": 7})
    assert (numbers.flops, numbers.bytes) == (2 * 300 * 200 * 7, 2 * (200 * 7 + 300 * 200 + 300 * 7))


def test_a_norm_is_counted_exactly() -> None:
    cost = in_one_kernel(norm())
    assert cost.bytes == (2 * 40 * 64 + 64) * 4
    assert cost.work == {("vector", "f32"): 4 * 40 * 64 + 9 * 40}  # two squares' worth, a sum, a scale; 9 for rsqrt


def test_attention_is_counted_exactly() -> None:
    cost, scores = in_one_kernel(attention()), 2 * 24 * 40
    assert cost.bytes == (2 * 24 * 16 + 2 * 2 * 40 * 16 + 2 * 24 * 16) * 4
    # Of each score: the largest, a difference, an exponential, a sum, a division.
    assert cost.work == {("matrix", "f32"): 2 * 2 * scores * 16, ("vector", "f32"): scores * (1 + 1 + 16 + 1 + 4)}


def test_recomputation_counts_each_time() -> None:
    graph = Graph()
    angles, x = tensor(graph, 1, 100, 64), tensor(graph, 8, 100, 64)
    table = graph.add_node("cos", [angles]).result
    graph.set_outputs([graph.add_node("mul", [x, table]).result])
    counts = evaluations(lower_to_loops(graph))
    assert repetitions(counts) == {table: 8.0}
    assert kernel_cost(graph, counts, SLOW).flops == 8 * 100 * 64 * (24 + 1)


def test_a_unit_without_a_peak_in_float32_has_a_ridge() -> None:
    """Where the vendor's GEMMs are faster, there is no ``product f32``."""
    peaks = {"vector f32": 24.0, "matrix f32": 48.0, "product bf16": 40.0}
    one = replace(assumed_cpu(), peaks=peaks, read_gb_s=10.0)
    assert one.ridge("bf16", "product") == 4.0 and one.ridge("bf16", "matrix") == 4.8


def test_the_ridge_and_where_a_layer_turns_compute_bound() -> None:
    assert round(A100.ridge("bf16")) == 153
    # With a weight so large that the rows' own bytes do not count, the ridge is the number of rows.
    assert compute_bound_from(node_cost(product(BF16, ROWS, 10**7, 10**7)), A100, ROWS) == pytest.approx(153, abs=0.1)
    layer = node_cost(product(BF16, ROWS, 4096, 4096))
    rows = compute_bound_from(layer, A100, ROWS)
    assert rows is not None and rows == pytest.approx(1 / (1 / A100.ridge("bf16") - 2 / 4096))
    below, above = (layer.at({"rows": round(rows) + step}) for step in (-1, 1))
    assert below.transfer(A100) > below.arithmetic(A100) and above.transfer(A100) < above.arithmetic(A100)
    # Each row brings as many bytes as operations: no number of them is enough.
    assert compute_bound_from(node_cost(product(F32, ROWS, 1, 1)), SLOW, ROWS) is None


def test_time_is_the_longer_side_and_the_launch() -> None:
    cost = Cost(bytes=10**6, work={("vector", "f32"): 10**5})
    assert cost.time(SLOW) == pytest.approx(10**6 / 10e9 + 2e-6) and cost.bound(SLOW) == "memory"
    assert replace(cost, cached=10**6).time(SLOW) == pytest.approx(10**6 / 40e9 + 2e-6)
    heavy = replace(cost, work={("vector", "f32"): 10**7, ("matrix", "f32"): 10**7})
    assert heavy.time(SLOW) == pytest.approx(10**7 / 20e9 + 10**7 / 100e9 + 2e-6) and heavy.bound(SLOW) == "compute"
    assert Cost(8, {}).bound(SLOW) == "launch"


def test_time_in_symbols_is_the_time_of_the_numbers() -> None:
    cost = node_cost(product(F32, ROWS, 300, 200))
    for rows in (1, 1000):
        expected = cost.at({"rows": rows}).time(SLOW)
        assert float(cost.time(SLOW).subs(ROWS, rows)) == pytest.approx(expected)


def test_cached_bytes_are_those_of_cached_values() -> None:
    node = product(F32, 8, 300, 200)
    cost = node_cost(node, lambda value: value is node.operands[0])
    assert cost.cached == 8 * 200 * 4 and cost.bytes > cost.cached


def test_options_name_the_chips() -> None:
    assert tuple(CHIPS) == config.CHIPS and all(m.source == DATASHEET for m in CHIPS.values())
    assert chip("NVIDIA H100 80GB HBM3") is CHIPS["h100"] and chip("a card of tomorrow") is A100
    with pytest.raises(OptionError, match="h100"):
        Config(machine="h10")


def test_profiles_are_stored_by_threads_and_loaded(tmp_path: Path) -> None:
    settings = Config(cache_dir=str(tmp_path / "new"))
    assert cpu_machine(settings, 1) == assumed_cpu(1)
    path = store_machine(SLOW, settings)
    assert path == profile_path(settings, 1) and [f.name for f in path.parent.iterdir()] == [path.name]
    assert cpu_machine(settings, 1) == SLOW
    assert cpu_machine(settings, 2).source == ASSUMED


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"name": "x"}', "null", "nan-rate", "no-f32", "negative", "peaks", "\xff"]
)
def test_a_profile_that_cannot_be_read_is_not_used(tmp_path: Path, text: str) -> None:
    data = SLOW.to_json()
    broken = {
        "nan-rate": {**data, "read_gb_s": math.nan},
        "no-f32": {**data, "peaks": {"matrix bf16": 1.0}},
        "negative": {**data, "launch_us": -1.0},
        "peaks": {**data, "peaks": [1, 2]},
    }
    settings = Config(cache_dir=str(tmp_path))
    content = json.dumps(broken[text]) if text in broken else text
    profile_path(settings, 1).write_bytes(content.encode("latin-1"))
    with pytest.warns(UserWarning, match="fusec machine"):
        assert cpu_machine(settings, 1) == assumed_cpu(1)


def test_a_profile_that_is_a_fifo_does_not_block(tmp_path: Path) -> None:
    settings = Config(cache_dir=str(tmp_path))
    os.mkfifo(profile_path(settings, 1))
    with pytest.warns(UserWarning, match="not a regular file"):
        assert cpu_machine(settings, 1) == assumed_cpu(1)
