"""Launch batches: consecutive launches are one call, and intermediate results share a block of memory."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fusec.codegen import target_named
from fusec.codegen.program import launch_batch, runtime
from fusec.codegen.program.launch_batch import MAX_LAUNCHES
from fusec.codegen.program.memory_planning import LiveRange, plan, split_size
from fusec.codegen.program.program import build_program
from fusec.codegen.tile.kernel import Check, Kernel, walk
from fusec.compiler import Compiled, compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.graph import Graph
from fusec.ir.types import F32, TensorType, symbol
from fusec.passes.grouping import Group
from tests.contexts import context_of
from tests.machines import profile

SPANS = st.builds(
    lambda n, first, more: LiveRange(n, first, first + more), st.integers(0, 999), *[st.integers(0, 9)] * 2
)


@pytest.fixture
def quick() -> Config:
    """Options of a machine on which GEMMs are generated."""
    return profile(f32=100.0, bf16=100.0)


def compiled(function: Callable[..., Any], *inputs: Tensor, config: Config, symbolic: bool = False) -> Compiled:
    found = compile_graph(trace(function, inputs, symbolic=symbolic), replace(config, strict=True))
    results = found.program([x.clone() for x in inputs])
    for result, expected in zip(results, _several(function(*(x.clone() for x in inputs))), strict=True):
        torch.testing.assert_close(result, expected)
    return found


def _several(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def calls(found: Compiled) -> int:
    """The number of launch batches."""
    return found.program.source.count("launch_all_")


def memory(found: Compiled) -> list[str]:
    """The sizes of the memory blocks, in bytes."""
    return re.findall(r"w_\d+ = acquire_block_\d+\((.*)\)", found.program.source)


def layers(x: Tensor, *weights: Tensor) -> Tensor:
    """One kernel for each weight."""
    for weight in weights:
        x = torch.tanh(F.linear(x, weight))
    return x


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes]


def test_consecutive_launches_are_one_call(quick: Config) -> None:
    found = compiled(layers, *drawn((3, 32), *[(32, 32)] * 6), config=quick)
    assert len(found.program.steps) == 6 and calls(found) == 1
    assert memory(found) == [str(2 * 3 * 32 * 4)]  # two buffers that alternate


def test_memory_of_dynamic_sizes_is_planned(quick: Config) -> None:
    def by_turns(x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.softmax(torch.softmax(3 * x, 0), 1)
        return x

    found = compiled(by_turns, *drawn((37, 32)), config=quick, symbolic=True)
    assert len(found.program.steps) > 5 and calls(found) == 1
    assert any("s0 * s1" in nbytes for nbytes in memory(found))
    for shape in ((1, 1), (5, 3), (200, 70)):
        (x,) = drawn(shape)
        torch.testing.assert_close(found.program([x])[0], by_turns(x))


def test_calls_share_pooled_memory(quick: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across programs; blocks that are too small or too large are not pooled."""
    monkeypatch.setattr(runtime, "_pool", pool := list[Tensor]())
    inputs = drawn((3, 32), *[(32, 32)] * 6)
    small, large = (compiled(layers, *x, config=quick) for x in (inputs, drawn((9, 32), *[(32, 32)] * 6)))
    (first,) = pool  # released by the larger program
    assert first.numel() == int(memory(large)[0]) > int(memory(small)[0])
    for _ in range(3):
        found = small.program(list(inputs))
        assert [block.data_ptr() for block in pool] == [first.data_ptr()]
        assert found[0].untyped_storage().data_ptr() != first.data_ptr()
    monkeypatch.setattr(runtime, "MAX_POOLED_BYTES", 1)
    small.program(list(inputs))
    assert not pool


def test_an_acquired_block_has_one_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads may call concurrently."""
    monkeypatch.setattr(runtime, "_pool", [])
    for _ in range(3):
        taken = [runtime.acquire_block(64) for _ in range(runtime.MAX_POOLED_BLOCKS + 2)]
        assert len({block.data_ptr() for block in taken}) == len(taken)
        for block in taken:
            runtime.release_block(block)
        assert len(runtime._pool) == runtime.MAX_POOLED_BLOCKS


def test_fills_and_random_draws_do_not_end_a_batch(quick: Config) -> None:
    def filled_and_drawn(x: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        first = layers(x, weight)
        filled = torch.full_like(first, 2.0).index_copy(0, rows, first)
        return layers(filled + 0 * torch.rand(3, 32), weight)

    x, weight = drawn((3, 32), (32, 32))
    found = compiled(filled_and_drawn, x, torch.tensor([2, 0, 1]), weight, config=quick)
    assert {step.name for step in found.program.steps} >= {"full", "aten.rand.default"}
    assert calls(found) == 1


def test_results_that_outlive_a_batch_are_tensors(quick: Config) -> None:
    def both(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = layers(x, *weights[:2])
        return first, layers(first, *weights[2:]), first[1:].cos()

    found = compiled(both, *drawn((3, 32), *[(32, 32)] * 5), config=quick)
    assert calls(found) == 1


def test_an_operation_that_reads_data_ends_a_batch(quick: Config) -> None:
    def cumulated_between(x: Tensor, *weights: Tensor) -> Tensor:
        return layers(layers(x, *weights[:3]).cummax(-1).values, *weights[3:])

    assert calls(compiled(cumulated_between, *drawn((3, 32), *[(32, 32)] * 6), config=quick)) == 2


def test_a_copy_reads_what_earlier_launches_write(quick: Config) -> None:
    def written(cache: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
        cache.copy_(layers(x, *weights[:2]))
        return layers(cache.T.contiguous().sort().values, *weights[2:])

    found = compiled(written, *drawn((32, 32), (32, 32), *[(32, 32)] * 4), config=quick)
    inputs = drawn((32, 32), (32, 32), *[(32, 32)] * 4)
    expected, (result,) = written(inputs[0].clone(), *inputs[1:]), found.program([inputs[0].T.clone().T, *inputs[1:]])
    torch.testing.assert_close(result, expected)


def test_a_copy_of_a_result_follows_its_batch() -> None:
    graph = Graph()
    x, *weights = (graph.add_input(TensorType(F32, shape, (shape[1], 1))) for shape in ((3, 32), (32, 32), (32, 32)))
    for weight in weights:
        x = graph.add_node("contraction", (x, weight), {"spec": "az,bz->ab"}).result
    graph.set_outputs([x])
    context = context_of(config=Config(strict=True))
    Group().apply(graph, context)
    last = [node for node in graph.nodes if node.is_op("region")][-1]
    last.body.inputs[0].type = TensorType(F32, (3, 32), (1, 3))  # as eager lays it out, and its maker does not
    program = build_program(graph, target_named("cpp"), context)
    assert [step.kind for step in program.steps] == ["kernel", "copy", "kernel"]
    inputs = drawn((3, 32), (32, 32), (32, 32))
    torch.testing.assert_close(program(list(inputs))[0], F.linear(F.linear(*inputs[:2]), inputs[2]))


def test_batches_have_a_maximum_of_launches(quick: Config) -> None:
    found = compiled(layers, *drawn((1, 16), *[(16, 16)] * (2 * MAX_LAUNCHES + 1)), config=quick)
    assert len(found.program.steps) == 2 * MAX_LAUNCHES + 1 and calls(found) == 3


def test_an_index_out_of_bounds_is_reported_for_its_own_kernel(quick: Config) -> None:
    def looked_up(i: Tensor, j: Tensor, table: Tensor, *weights: Tensor) -> Tensor:
        x = layers(F.embedding(i, table), *weights)
        return layers(x + F.embedding(j, table[:5]), *weights)

    weights = drawn((20, 16), (16, 16), (16, 16))
    found = compiled(looked_up, torch.tensor([19]), torch.tensor([4]), *weights, config=quick)
    assert calls(found) == 1
    for i, j, length in ((20, 4, 20), (19, 7, 5), (19, -9, 5)):
        place = i if i == 20 else j
        with pytest.raises(IndexError, match=f"index {place} is out of bounds for dimension 0 with size {length}"):
            found.program([torch.tensor([i]), torch.tensor([j]), *weights])


@pytest.mark.parametrize(("most", "rows"), [(3, 1), (2, 2)])
def test_a_batch_has_no_more_checks_than_can_be_numbered(
    quick: Config, monkeypatch: pytest.MonkeyPatch, most: int, rows: int
) -> None:
    def looked_up(i: Tensor, j: Tensor, table: Tensor, *weights: Tensor) -> Tensor:
        return layers(F.embedding(i, table), *weights) + F.embedding(j, table[:5]) + F.embedding(i, table[:7])

    monkeypatch.setattr(launch_batch, "MAX_CHECKS", most)
    weights = drawn((20, 16), (16, 16), (16, 16))
    found = compiled(looked_up, torch.tensor([1]), torch.tensor([4]), *weights, config=quick)
    assert [len(checks(kernel)) for kernel in found.program.kernels.values()] == [1, 2]
    assert found.program.source.count("if fault := ") == rows
    for i, j, length in ((20, 4, 20), (6, 5, 5), (7, 4, 7)):
        place = j if length == 5 else i
        with pytest.raises(IndexError, match=f"index {place} is out of bounds for dimension 0 with size {length}"):
            found.program([torch.tensor([i]), torch.tensor([j]), *weights])


def checks(kernel: Kernel) -> list[Check]:
    return [s for s in walk(kernel.body) if isinstance(s, Check)]


def test_a_size_is_an_integer_times_a_symbolic_factor() -> None:
    n, m = symbol("n"), symbol("m")
    assert split_size(48) == (48, 1) and split_size(4 * n * m) == (4, n * m) and split_size(8 * n + 4) == (4, 2 * n + 1)
    assert split_size(n / 2) == (1, n / 2) and split_size(n * (n + 1) / 2) == (1, n * (n + 1) / 2)


@given(st.lists(SPANS, max_size=30), st.sampled_from([8, 64]))
def test_live_buffers_do_not_overlap(spans: list[LiveRange], aligned: int) -> None:
    offsets, length = plan(spans, aligned)
    for i, (a, at) in enumerate(zip(spans, offsets, strict=True)):
        assert at % aligned == 0 and at + a.nbytes <= length
        for b, beside in list(zip(spans, offsets, strict=True))[:i]:
            apart = at + a.nbytes <= beside or beside + b.nbytes <= at
            assert apart or a.last < b.first or b.last < a.first
    most = max((sum(s.nbytes for s in spans if s.first <= t <= s.last) for t in range(20)), default=0)
    assert most <= length <= sum(s.nbytes + aligned for s in spans)
