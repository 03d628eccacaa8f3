"""Launches in a row are one call, and what only they see lies in one block of memory."""

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
from fusec.codegen.program import launch_batches as stretches
from fusec.codegen.program import runtime
from fusec.codegen.program.launch_batches import LONGEST, Span, counted, pack
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

SPANS = st.builds(lambda n, first, more: Span(n, first, first + more), st.integers(0, 999), *[st.integers(0, 9)] * 2)


@pytest.fixture
def quick() -> Config:
    """Options of a machine on which products are generated."""
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
    """How often Python enters a row of launches."""
    return found.program.source.count("launch_all_")


def memory(found: Compiled) -> list[str]:
    """The blocks that rows of launches share, in bytes."""
    return re.findall(r"w_\d+ = borrow_\d+\((.*)\)", found.program.source)


def layers(x: Tensor, *weights: Tensor) -> Tensor:
    """A kernel for each."""
    for weight in weights:
        x = torch.tanh(F.linear(x, weight))
    return x


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes]


def test_launches_in_a_row_are_one_call(quick: Config) -> None:
    found = compiled(layers, *drawn((3, 32), *[(32, 32)] * 6), config=quick)
    assert len(found.program.steps) == 6 and calls(found) == 1
    assert memory(found) == [str(2 * 3 * 32 * 4)]  # what is read and what is written, in turns


def test_sizes_that_only_a_call_knows_are_planned_too(quick: Config) -> None:
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


def test_calls_lend_each_other_their_memory(quick: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever program they are of; blocks that are too small or too large are not kept."""
    monkeypatch.setattr(runtime, "_spare", spare := list[Tensor]())
    inputs = drawn((3, 32), *[(32, 32)] * 6)
    small, large = (compiled(layers, *x, config=quick) for x in (inputs, drawn((9, 32), *[(32, 32)] * 6)))
    (first,) = spare  # what running the larger left
    assert first.numel() == int(memory(large)[0]) > int(memory(small)[0])
    for _ in range(3):
        found = small.program(list(inputs))
        assert [block.data_ptr() for block in spare] == [first.data_ptr()]
        assert found[0].untyped_storage().data_ptr() != first.data_ptr()
    monkeypatch.setattr(runtime, "LARGEST_SPARE", 1)
    small.program(list(inputs))
    assert not spare


def test_what_is_lent_is_lent_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls may run at once, each in a thread of its own."""
    monkeypatch.setattr(runtime, "_spare", [])
    for _ in range(3):
        taken = [runtime.borrow(64) for _ in range(runtime.MOST_SPARE + 2)]
        assert len({block.data_ptr() for block in taken}) == len(taken)
        for block in taken:
            runtime.give_back(block)
        assert len(runtime._spare) == runtime.MOST_SPARE


def test_results_that_are_kept_are_tensors_of_their_own(quick: Config) -> None:
    def both(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = layers(x, *weights[:2])
        return first, layers(first, *weights[2:]), first[1:].cos()

    found = compiled(both, *drawn((3, 32), *[(32, 32)] * 5), config=quick)
    assert calls(found) == 1


def test_what_reads_data_in_between_ends_a_row(quick: Config) -> None:
    def sorted_between(x: Tensor, *weights: Tensor) -> Tensor:
        return layers(layers(x, *weights[:3]).sort().values, *weights[3:])

    assert calls(compiled(sorted_between, *drawn((3, 32), *[(32, 32)] * 6), config=quick)) == 2


def test_a_copy_sees_what_launches_before_it_write(quick: Config) -> None:
    def written(cache: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
        cache.copy_(layers(x, *weights[:2]))
        return layers(cache.T.contiguous().sort().values, *weights[2:])

    found = compiled(written, *drawn((32, 32), (32, 32), *[(32, 32)] * 4), config=quick)
    inputs = drawn((32, 32), (32, 32), *[(32, 32)] * 4)
    expected, (result,) = written(inputs[0].clone(), *inputs[1:]), found.program([inputs[0].T.clone().T, *inputs[1:]])
    torch.testing.assert_close(result, expected)


def test_a_copy_of_what_the_row_makes_comes_after_it() -> None:
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


def test_rows_have_an_end(quick: Config) -> None:
    found = compiled(layers, *drawn((1, 16), *[(16, 16)] * (2 * LONGEST + 1)), config=quick)
    assert len(found.program.steps) == 2 * LONGEST + 1 and calls(found) == 3


def test_a_place_that_does_not_exist_is_that_of_its_own_kernel(quick: Config) -> None:
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
def test_a_row_has_no_more_checks_than_can_be_told_apart(
    quick: Config, monkeypatch: pytest.MonkeyPatch, most: int, rows: int
) -> None:
    def looked_up(i: Tensor, j: Tensor, table: Tensor, *weights: Tensor) -> Tensor:
        return layers(F.embedding(i, table), *weights) + F.embedding(j, table[:5]) + F.embedding(i, table[:7])

    monkeypatch.setattr(stretches, "MAX_CHECKS", most)
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


def test_a_size_is_a_whole_number_of_something() -> None:
    n, m = symbol("n"), symbol("m")
    assert counted(48) == (48, 1) and counted(4 * n * m) == (4, n * m) and counted(8 * n + 4) == (4, 2 * n + 1)
    assert counted(n / 2) == (1, n / 2) and counted(n * (n + 1) / 2) == (1, n * (n + 1) / 2)


@given(st.lists(SPANS, max_size=30), st.sampled_from([8, 64]))
def test_nothing_that_is_needed_at_one_time_shares_a_place(spans: list[Span], aligned: int) -> None:
    offsets, length = pack(spans, aligned)
    for i, (a, at) in enumerate(zip(spans, offsets, strict=True)):
        assert at % aligned == 0 and at + a.nbytes <= length
        for b, beside in list(zip(spans, offsets, strict=True))[:i]:
            apart = at + a.nbytes <= beside or beside + b.nbytes <= at
            assert apart or a.last < b.first or b.last < a.first
    most = max((sum(s.nbytes for s in spans if s.first <= t <= s.last) for t in range(20)), default=0)
    assert most <= length <= sum(s.nbytes + aligned for s in spans)
