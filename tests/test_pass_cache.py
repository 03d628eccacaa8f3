"""What passes made of a graph: later processes take it from the cache, for the same graph, code and choices only."""

import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor, nn

from bench.families import FAMILIES, Sizes
from fusec import pass_cache, provenance
from fusec.analysis.machine import assumed_cpu
from fusec.cache import Cache
from fusec.codegen.cpp import CppTarget
from fusec.compiler import Compiled, compile_graph
from fusec.config import Config
from fusec.debug.capture import capture
from fusec.ir.graph import Graph
from fusec.ir.parser import parse_graph
from fusec.passes import known_passes
from fusec.pipeline import Context, Pipeline
from fusec.rewriting.fusion import Dims, fusion
from tests.campaigns.fuzz.graphs import random_graph
from tests.graph_equality import difference


@pytest.fixture(autouse=True)
def known_code(passes_run: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is taken for that of an earlier process, and its declarations for all there are."""
    monkeypatch.setattr(pass_cache, "key_of_derived", provenance.key_of_derived)
    monkeypatch.setattr(provenance, "own_code", lambda: "code")
    for name in ("FUSIONS", "REWRITES"):
        declared = {n: d for n, d in getattr(pass_cache, name).items() if d.module.startswith("fusec.")}
        monkeypatch.setattr(pass_cache, name, declared)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that pipelines have been run on."""
    found: list[Graph] = []
    run = Pipeline.run

    def noted(self: Pipeline, graph: Graph, context: Context) -> None:
        found.append(graph)
        run(self, graph, context)

    monkeypatch.setattr(Pipeline, "run", noted)
    return found


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles end behind the passes."""
    monkeypatch.setattr("fusec.codegen.program.program.build_program", lambda *_: None)


def a_graph(seed: int = 3) -> Graph:
    return random_graph(random.Random(seed), 20)


def agree(first: Compiled, second: Compiled) -> None:
    """Both went the same way to the same program."""
    assert difference(first.graph, second.graph, order=True, sources=True) is None
    assert first.remarks == second.remarks
    assert first.records == second.records


def test_a_later_process_runs_no_passes(tmp_path: Path, runs: list[Graph]) -> None:
    config = Config(cache_dir=str(tmp_path), strict=True)
    first, second = (compile_graph(a_graph(), config) for _ in range(2))
    assert len(runs) == 1
    assert first.remarks
    agree(first, second)
    assert first.program.source == second.program.source
    assert first.program.texts == second.program.texts


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.thorough) for family in ("gemma3", "t5"))]
)
def test_models_are_read_back_as_they_were_made(family: str, tmp_path: Path, runs: list[Graph], unbuilt: None) -> None:
    model = FAMILIES[family].build(Sizes(hidden=32, heads=2))
    config = Config(cache_dir=str(tmp_path))
    for graph in capture(model, dynamic=True, **FAMILIES[family].sample(2, 8, "left")):
        runs.clear()
        first, second = (compile_graph(graph, config) for _ in range(2))
        assert len(runs) == 1
        agree(first, second)


def test_what_is_read_back_trains_as_well(tmp_path: Path, runs: list[Graph]) -> None:
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)), torch.randn(4, 8)
    gradients = []
    for _ in range(2):
        torch._dynamo.reset()
        model.zero_grad()
        torch.compile(model, backend="fusec", options={"cache_dir": str(tmp_path)})(x).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert len(runs) == 2  # forward and backward
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


# What a later process may find changed. Each gives the graph and the choices that it compiles.


def other_graph(monkeypatch: pytest.MonkeyPatch, config: Config) -> tuple[Graph, Config]:
    return a_graph(4), config


def other_places(monkeypatch: pytest.MonkeyPatch, config: Config) -> tuple[Graph, Config]:
    graph = a_graph()
    node = next(n for n in graph.nodes if n.operands)
    node.sources = tuple(replace(source, line=source.line + 1, file="model.py") for source in node.sources or ())
    assert node.sources
    return graph, config


def other_configs(monkeypatch: pytest.MonkeyPatch, config: Config) -> tuple[Graph, Config]:
    return a_graph(), replace(config, apply="!0")  # which the text of the pipeline does not tell


def other_machine(monkeypatch: pytest.MonkeyPatch, config: Config) -> tuple[Graph, Config]:
    monkeypatch.setattr(CppTarget, "machine", lambda self, config: assumed_cpu(7))
    return a_graph(), config


def other_code(monkeypatch: pytest.MonkeyPatch, config: Config) -> tuple[Graph, Config]:
    monkeypatch.setattr(provenance, "own_code", lambda: "other")
    return a_graph(), config


def unknown_code(monkeypatch: pytest.MonkeyPatch, config: Config) -> tuple[Graph, Config]:
    monkeypatch.setattr(provenance, "own_code", str)
    return a_graph(), config


def other_torch(monkeypatch: pytest.MonkeyPatch, config: Config) -> tuple[Graph, Config]:
    monkeypatch.setattr(torch, "__version__", "other")
    return a_graph(), config


def a_fusion_of_the_users(monkeypatch: pytest.MonkeyPatch, config: Config) -> tuple[Graph, Config]:
    monkeypatch.setattr("fusec.rewriting.fusion.FUSIONS", dict(pass_cache.FUSIONS))

    @fusion
    def tripled(x: Annotated[Tensor, Dims("*batch cols")]) -> Tensor:
        """3x"""
        return x * 3

    monkeypatch.setattr(pass_cache, "FUSIONS", pass_cache.FUSIONS | {"tripled": tripled})
    return a_graph(), config


def a_damaged_entry(monkeypatch: pytest.MonkeyPatch, config: Config) -> tuple[Graph, Config]:
    (entry,) = Path(config.cache_dir).glob(f"*{pass_cache.SUFFIX}")
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.write_bytes(content)
    return a_graph(), config


def an_entry_of_another_form(monkeypatch: pytest.MonkeyPatch, config: Config) -> tuple[Graph, Config]:
    (entry,) = Path(config.cache_dir).glob(f"*{pass_cache.SUFFIX}")
    Cache(entry.parent).publish(entry.stem, pass_cache.SUFFIX, zlib.compress(b'{"graph": "graph g() {\\n}"}'))
    return a_graph(), config


CHANGES = [
    other_graph, other_places, other_configs, other_machine, other_code, unknown_code, other_torch,
    a_fusion_of_the_users, a_damaged_entry, an_entry_of_another_form,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_passes_run_again_after(
    change: Callable[..., Any], tmp_path: Path, runs: list[Graph], unbuilt: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(cache_dir=str(tmp_path))
    compile_graph(a_graph(), config)
    compile_graph(*change(monkeypatch, config))
    assert len(runs) == 2


@pytest.mark.parametrize("option", ["record", "verify"])
def test_passes_that_are_watched_always_run(option: str, tmp_path: Path, runs: list[Graph], unbuilt: None) -> None:
    for _ in range(2):
        compile_graph(a_graph(), replace(Config(cache_dir=str(tmp_path)), **{option: True}))
    assert len(runs) == 2


def test_without_a_cache_on_disk_nothing_is_left_for_others(tmp_path: Path, runs: list[Graph], unbuilt: None) -> None:
    for cache in (False, True):
        compile_graph(a_graph(), Config(cache=cache, cache_dir=str(tmp_path)))
    assert len(runs) == 2


def test_what_failed_is_tried_again(
    tmp_path: Path, runs: list[Graph], unbuilt: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Any, graph: Graph, context: Context) -> None:
        raise ValueError("planted")

    canonicalize = type(known_passes()["canonicalize"]())
    with monkeypatch.context() as patch:
        patch.setattr(canonicalize, "apply", failing)
        first = compile_graph(a_graph(), Config(cache_dir=str(tmp_path)))
    assert first.remarks.of("failure")
    assert not compile_graph(a_graph(), Config(cache_dir=str(tmp_path))).remarks.of("failure")
    assert len(runs) == 2


def test_what_text_cannot_say_is_not_taken(tmp_path: Path) -> None:
    graph = a_graph()
    next(n for n in graph.nodes if n.operands).attributes["strange"] = object()
    kept = pass_cache.PassCache(Pipeline(()), graph, Context(Config(cache_dir=str(tmp_path))))
    kept.store(graph)
    assert not kept.load(graph)


def test_what_a_remark_cannot_say_is_not_kept(tmp_path: Path, known_code: None) -> None:
    graph, context = a_graph(), Context(Config(cache_dir=str(tmp_path)))
    kept = pass_cache.PassCache(Pipeline(()), graph, context)
    context.remarks.add("analysis", "group", "a size", figures={"rows": object()})  # type: ignore[dict-item]
    kept.store(graph)
    assert not kept.load(graph) and not list(tmp_path.glob("*.passes"))


def test_a_text_that_reads_as_another_graph_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = a_graph()
    kept = pass_cache.PassCache(Pipeline(()), graph, Context(Config(cache_dir=str(tmp_path))))
    kept.store(graph)
    assert kept.load(graph.copy())
    monkeypatch.setattr(pass_cache, "parse_graph", lambda text: a_graph(4))
    assert not kept.load(graph.copy())


def test_a_full_disk_is_reported_and_no_reason_to_fail(
    tmp_path: Path,
    runs: list[Graph],
    unbuilt: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publish = Cache.publish

    def full(self: Cache, key: str, suffix: str, content: bytes) -> Path:
        if suffix == pass_cache.SUFFIX:
            raise OSError("no space")
        return publish(self, key, suffix, content)

    monkeypatch.setattr(Cache, "publish", full)
    for _ in range(2):
        compile_graph(a_graph(), Config(cache_dir=str(tmp_path)))
    assert len(runs) == 2
    assert caplog.text.count("for later processes: no space") == 2


def test_an_output_that_equals_an_updated_input_has_storage_of_its_own_from_the_cache(
    tmp_path: Path, runs: list[Graph]
) -> None:
    graph = parse_graph("""graph g(%x: f32[3, 4], %rows: f32[1, 4], %index: i64[1]) {
      %new: f32[3, 4] = write(%x, %rows, %index) {dim=-2}
      %equal: f32[3, 4] = mul(%new, 1.0)
      %part: f32[3, 2] @(4, 2) = slice(%equal) {dim=-1, start=0, stop=4, step=2}
      return %part, %new
    }""")
    for _ in range(2):
        x = torch.randn(3, 4)
        part, new = compile_graph(graph, Config(cache_dir=str(tmp_path))).program(
            [x, torch.ones(1, 4), torch.tensor([2])]
        )
        assert torch.equal(part, x[:, ::2]) and new.data_ptr() == x.data_ptr() != part.data_ptr()
    assert len(runs) == 1
