"""Random graphs through the whole compiler: what their kernels compute is what the interpreter says."""

import logging
import random
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fusec import dynamo
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.debug.explain import explain
from fusec.frontend import trace
from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph
from fusec.ir.types import ScalarType, evaluate_size
from fusec.reference.contract import compare_outputs
from fusec.reference.dtypes import torch_dtype
from fusec.reference.interpreter import evaluate
from tests.campaigns.fuzz.graphs import random_graph


def inputs_of(graph: Graph, rows: int) -> list[torch.Tensor | int]:
    """Inputs of a graph for one value of its symbol."""
    given: list[torch.Tensor | int] = []
    for value in graph.inputs:
        if isinstance(value.type, ScalarType):
            given.append(rows)
            continue
        shape = [evaluate_size(n, {"s0": rows}) for n in value.shape]
        strides = [evaluate_size(n, {"s0": rows}) for n in value.tensor.strides]
        given.append(torch.empty_strided(shape, strides, dtype=torch_dtype(value.dtype)).normal_())
    return given


@pytest.mark.parametrize("seed", range(25))
def test_random_graphs(seed: int) -> None:
    graph = random_graph(random.Random(1000 + seed), 20)
    program = compile_graph(graph, Config(strict=True)).program
    for rows in (1, 5):
        given = inputs_of(graph, rows)
        expected, exact = evaluate(graph, given), evaluate(graph, given, dtype=torch.float64)
        found = program(list(given))
        for e, f, r in zip(expected, found, exact, strict=True):
            assert (e.dtype, e.shape) == (f.dtype, f.shape)
            if e.dtype.is_floating_point:
                assert compare_outputs([e], [f], [r], e.dtype).passed, graph
            else:
                assert torch.equal(e, f), graph


def test_a_reshape_that_no_loop_follows_stays_outside_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_STRICT", "1")
    torch._dynamo.reset()

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.flatten().view(x.shape[1], x.shape[0]) + 1

    x = torch.randn(5, 7)
    with torch.no_grad():
        assert torch.equal(torch.compile(turned, backend=dynamo.backend, dynamic=True)(x), turned(x))


def test_a_single_row_keeps_its_scratch() -> None:
    x = torch.randn(1, 40)
    with torch.no_grad():
        compiled = torch.compile(lambda x: torch.softmax(x, -1), backend=dynamo.backend, options={"strict": True})
        torch.testing.assert_close(compiled(x), torch.softmax(x, -1))


def test_what_is_computed_again_in_a_kernel_is_read_ahead_of_what_it_writes() -> None:
    graph = parse_graph("""graph g(%x: f32[]) {
      %old: f64[] = cast(%x) {dtype=f64}
      %one: f32[] = expand(1.0:f32) {shape=()}
      %new: f32[] = write(%x, %one)
      %r: f64[] = add(%old, %old)
      return %r
    }""")
    x = torch.tensor(3.0)
    assert compile_graph(graph, Config(strict=True)).program([x]) == [6.0] and x == 1.0


@pytest.mark.parametrize("right", ["%x", "%y"])
def test_a_product_that_the_target_does_not_schedule_is_the_librarys(right: str) -> None:
    graph = parse_graph(f"""graph g(%x: f32[3, 1, 6], %y: f32[3, 1, 6]) {{
      %left: f32[3, 2, 6] @(6, 0, 1) = expand(%x) {{shape=(3, 2, 6)}}
      %right: f32[3, 2, 6] @(6, 0, 1) = expand({right}) {{shape=(3, 2, 6)}}
      %r: f32[2, 6, 2, 6] = contraction(%left, %right) {{spec="zab,zcd->abcd"}}
      return %r
    }}""")
    given = inputs_of(graph, 1)
    program = compile_graph(graph, Config(strict=True)).program
    torch.testing.assert_close(program(list(given)), evaluate(graph, given))


def test_a_compile_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    with caplog.at_level(logging.INFO, "fusec"):
        torch.compile(lambda x: x.sin().softmax(-1), backend="fusec")(torch.randn(4, 16))
    (line,) = (record.getMessage() for record in caplog.records if record.levelno == logging.INFO)
    assert line.startswith("graph: 6 nodes, 1 fusions, 1 kernels, 0 vendor calls, 0 ATen calls, 0 failures, ")


def test_a_fusion_inside_another_one_is_not_counted() -> None:
    def model(x: Any, y: Any, w: Any) -> Any:
        return F.rms_norm(x + y, (16,), w)

    graph = trace(model, [torch.randn(4, 16), torch.randn(4, 16), torch.ones(16)], symbolic=False)
    compiled = compile_graph(graph, Config(cache=False))
    assert " 1 fusions, " in compiled.summary()
    assert explain(compiled).regions == {"add_rms_norm": 1}
