"""Graphs whose tensors do not all lie on the GPU: eager takes numbers from a CPU, kernels cannot."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from fusec.codegen import target_for
from fusec.codegen.triton import kernel as triton_kernel
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.debug.capture import capture
from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph
from fusec.passes import default_pipeline
from tests.contexts import context_of
from tests.machines import cpu

SCALED = """graph scaled(%x: f32[4, 8] cuda:0, %scale: f64[]) {
  %narrow: f32[] = cast(%scale) {dtype=f32}
  %twice: f32[] = mul(%narrow, 2.0)
  %y: f32[4, 8] cuda:0 = mul(%x, %twice)
  %z: f32[4, 8] cuda:0 = exp(%y)
  %w: f32[4, 8] cuda:0 = mul(%z, %x)
  return %w
}"""
COUNTED = """graph counted(%x: f32[4, 8] cuda:0, %count: i64[], %other: i64[] cuda:1) {
  %more: i64[] = add(%count, 1)
  %most: i64[] cuda:1 = add(%other, 1)
  %y: f32[4, 8] cuda:0 = mul(%x, 2.0)
  return %y, %more, %most
}"""
MADE = """graph made(%n: int(s0)) {
  %places: i64[s0] cuda:0 = iota() {size=s0, dtype=i64, device="cuda:0"}
  %twice: i64[s0] cuda:0 = mul(%places, 2)
  return %twice
}"""
ATTENTION = """graph attention(%q: f32[1, 2, 5, 8] cuda:0, %k: f32[1, 2, 5, 8] cuda:0, %v: f32[1, 2, 5, 8] cuda:0) {
  %o: f32[1, 2, 5, 8] cuda:0 = opaque(%q, %k, %v) {target="aten.scaled_dot_product_attention.default",
    args=(("%", 0), ("%", 1), ("%", 2), none, 0.0, true), kwargs=()}
  return %o
}"""


def grouped(text: str) -> Graph:
    graph, config = parse_graph(re.sub(r"\n    ", " ", text)), Config()
    default_pipeline(config).run(graph, context_of("triton", config, cpu()))
    return graph


def places(graph: Graph) -> list[set[str]]:
    """Where the tensors lie that each kernel takes and makes."""
    kernels = [n for n in graph if n.is_op("region") and n.attributes["kind"] == "kernel"]
    return [{v.tensor.device for v in (*n.operands, *n.results)} for n in kernels]


def test_a_kernel_takes_no_number_from_the_cpu() -> None:
    graph = grouped(SCALED)
    assert places(graph) == [{"cuda:0"}]
    assert [n.op.name for n in graph if n.result.tensor.device == "cpu" and not n.is_op("constant")] == ["cast", "mul"]


def test_kernels_of_several_gpus_stay_apart_and_the_cpu_has_none() -> None:
    assert sorted(map(sorted, places(grouped(COUNTED)))) == [["cuda:0"], ["cuda:1"]]


def test_what_is_made_on_the_gpu_of_nothing_that_lies_there_is_computed_there() -> None:
    assert target_for(parse_graph(MADE), Config()).name == "triton"
    assert target_for(parse_graph(MADE.replace("cuda:0", "cpu")), Config()).name == "cpp"


def test_decomposed_attention_is_on_the_device_of_its_operands() -> None:
    (region,) = (n for n in grouped(ATTENTION) if n.is_op("region"))
    assert {r.tensor.device for n in region.body for r in n.results} == {"cuda:0"}


def test_a_number_of_the_cpu_is_brought_to_its_reader_once() -> None:
    """Under ``dynamic=True`` the epsilons of norms are such."""

    def norms(x: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps.float()).to(x.dtype)
        return x

    x = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")
    (graph,) = capture(norms, x, torch.tensor(1e-6, dtype=torch.float64))
    config = Config()
    default_pipeline(config).run(graph, context_of("triton", config, cpu()))
    (call,) = (n for n in graph if n.is_op("opaque"))
    assert [v.tensor.device for v in (*call.operands, *call.results)] == ["meta", "cpu", "meta"]
    assert places(graph) == [{"meta"}] and {r.tensor.device for n in graph for r in n.results} == {"meta"}


def test_the_gpu_of_a_graph_is_the_one_that_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = ["cuda:0"]

    @contextmanager
    def device(name: str) -> Iterator[None]:
        now.append(str(name))
        yield
        now.pop()

    told = SimpleNamespace(major=9, minor=0, L2_cache_size=1, multi_processor_count=1)
    for name, function in {
        "is_available": lambda: True,
        "device": device,
        "get_device_properties": lambda: SimpleNamespace(**vars(told), name=f"a GPU at {now[-1]}"),
        "get_device_capability": lambda: (9, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(triton_kernel, "prepare_all", lambda kernels: None)
    compiled = compile_graph(parse_graph(SCALED.replace("cuda:0", "cuda:1")), Config())
    assert compiled.machine is not None and compiled.machine.name == "a GPU at cuda:1" and now == ["cuda:0"]
