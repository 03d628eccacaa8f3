"""Traces of patterns: read back as they were made, made once for all processes, and only of fusec's own functions."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from bench.numerics import default_type
from fusec import passes, provenance
from fusec.cache import Cache
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.ir.graph import Graph
from fusec.ir.types import BF16, F32, F64, DType, TensorType
from fusec.passes.canonicalize import normalize
from fusec.passes.patterns import trace_types
from fusec.passes.raising.norms import rms_norm
from fusec.passes.traces import Traces
from fusec.provenance import digest_of
from fusec.rewriting.fusion import Dims, fusion
from fusec.rewriting.index import Index
from fusec.rewriting.pattern import PatternLibrary, choices, spellings
from fusec.rewriting.rule import REWRITES, rewrite
from fusec.rewriting.sampling import Sizes, sample
from tests.graph_equality import equal_graphs

ROOT = Path(__file__).parents[2]
OWN = passes.RAISED + passes.FUSED
TRACED = Traces(trace_types)
"""A tracer of own declarations that the tests of this file share."""
Rows = Annotated[Tensor, Dims("*batch cols")]


@dataclass
class Tracer:
    """Traces, and remembers what."""

    calls: list[Any] = field(default_factory=list)

    def __call__(self, function: Any, samples: Any) -> Graph:
        self.calls.append(function)
        return TRACED(function, samples)


def library(trace: Any) -> PatternLibrary:
    return PatternLibrary(trace, normalize, first=OWN)


def specialized(made: PatternLibrary, dtype: DType) -> list[Any]:
    """Each pattern of fusec's own declarations, as what it matches."""
    return [(d.name, p.spelling, p.fingerprint, p.any_rank) for d in OWN for p in made.patterns(d, dtype)]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_next_process_has_the_same_patterns_and_traces_nothing(dtype: DType, tmp_path: Path) -> None:
    first, second = Tracer(), Tracer()
    made, known = Traces(first), Traces(second)
    with made.kept(Cache(tmp_path)):
        want = specialized(library(made), dtype)
    assert len(first.calls) > len(OWN)
    with known.kept(Cache(tmp_path)):
        assert specialized(library(known), dtype) == want
    assert not second.calls


@pytest.mark.parametrize("default", [pytest.param(torch.float32, marks=pytest.mark.thorough), torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=pytest.mark.thorough), BF16], ids=str)
def test_a_trace_is_read_as_it_was_made_whatever_the_default_type_is(dtype: DType, default: torch.dtype) -> None:
    known = Traces(trace_types)
    for declared in OWN:
        for present in choices(declared.parameters):
            samples = list(sample(declared.parameters, dtype, present, Sizes(2)).values())
            for function in spellings(declared).values():
                known(function, samples)
                with default_type(default):
                    fresh, read = trace_types(function, samples), known(function, samples)
                assert equal_graphs(fresh, read, order=True, sources=True)
                assert [v.type for v in fresh.inputs] == [v.type for v in read.inputs]


def test_the_next_process_traces_nothing_when_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace_types(rms_norm.function, [TensorType(F32, (3, 8), (8, 1)), TensorType(F32, (8,), (1,)), 1e-6])
    counts = []
    for _ in range(2):
        tracer = Tracer()
        monkeypatch.setattr(passes, "_TRACES", Traces(tracer))
        monkeypatch.setattr(passes, "_LIBRARIES", {})
        compiled = compile_graph(graph, Config(cache_dir=str(tmp_path)))
        assert "rms_norm" in str(compiled.graph)
        counts.append(len(tracer.calls))
    assert counts[0] > 0 and counts[1] == 0


def test_other_samples_are_another_trace() -> None:
    tracer = Tracer()
    made = library(Traces(tracer))
    for dtype, present, batch in ((F32, ("x",), 2), (BF16, ("x",), 2), (F32, ("x", "weight"), 2), (F32, ("x",), 1)):
        for _ in range(2):
            graph, _ = made.traced(rms_norm, rms_norm.function, dtype, present, batch)
            assert [v.name for v in graph.inputs] == list(present)
            assert (graph.inputs[0].dtype, len(graph.inputs[0].shape)) == (dtype, batch + 1)
    assert len(tracer.calls) == 4


def test_what_others_declare_is_traced_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusec.rewriting.fusion.FUSIONS", {})

    @fusion
    def quadrupled(x: Rows) -> Tensor:
        """4x"""
        return x * 4

    for function in (quadrupled.function, lambda x: x * 4):
        function.__module__ = "fusec.passes.raising.norms"  # a closure or a local function is nobody's source
        for tracer in (Tracer(), Tracer()):
            with (made := Traces(tracer)).kept(Cache(tmp_path)):
                library(made).traced(quadrupled, function, F32, ("x",), 2)
            assert len(tracer.calls) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["code", "torch"])
def test_other_code_has_other_traces(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for _ in range(2):
        with (made := Traces(tracer := Tracer())).kept(Cache(tmp_path)):
            library(made).traced(rms_norm, rms_norm.function, F32, ("x",), 2)
        counts.append(len(tracer.calls))
        if change == "torch":
            monkeypatch.setattr(torch, "__version__", "other")
        else:
            monkeypatch.setattr(provenance, "own_code", lambda: "other")
    assert counts == [1, 1]


def test_nothing_is_kept_of_code_that_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "own_code", str)
    with (made := Traces(TRACED)).kept(Cache(tmp_path)):
        library(made).traced(rms_norm, rms_norm.function, F32, ("x",), 2)
    assert not list(tmp_path.iterdir())


def test_two_processes_keep_what_both_traced(tmp_path: Path) -> None:
    one, two = Traces(TRACED), Traces(TRACED)
    with one.kept(Cache(tmp_path)), two.kept(Cache(tmp_path)):
        for made, dtype in ((one, F32), (two, BF16)):
            library(made).traced(rms_norm, rms_norm.function, dtype, ("x",), 2)
    with (known := Traces(tracer := Tracer())).kept(Cache(tmp_path)):
        for dtype in (F32, BF16):
            library(known).traced(rms_norm, rms_norm.function, dtype, ("x",), 2)
    assert not tracer.calls


def test_a_full_disk_is_reported_and_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Cache, key: str, suffix: str, content: bytes) -> Path:
        raise OSError("no space")

    monkeypatch.setattr(Cache, "publish", full)
    with (made := Traces(TRACED)).kept(Cache(tmp_path)):
        library(made).traced(rms_norm, rms_norm.function, F32, ("x",), 2)
    assert "for later processes: no space" in caplog.text


@pytest.mark.parametrize("content", [b"\x87", b"{", b"[1]", b"1"])
def test_what_does_not_read_back_is_traced_anew(tmp_path: Path, content: bytes) -> None:
    for _ in range(2):
        with (made := Traces(tracer := Tracer())).kept(Cache(tmp_path)):
            library(made).traced(rms_norm, rms_norm.function, F32, ("x",), 2)
        assert tracer.calls
        (entry,) = tmp_path.glob("*.traces")
        Cache(tmp_path).publish(entry.stem, entry.suffix, content)


def test_sources_are_known_by_their_content(tmp_path: Path) -> None:
    for name in ("own/a.py", "own/text", "own/inner/b.py", "beside/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    own, found = tmp_path / "own", list[str]()
    (own / "linked").symlink_to(tmp_path / "beside")
    for change in (
        lambda: None,
        lambda: (own / "inner/b.py").write_text("other"),
        lambda: (tmp_path / "beside/c.py").write_text("other"),
        lambda: (own / "inner/b.py").rename(own / "inner/d.py"),
    ):
        change()
        found.append(digest_of(own, time.time() + 10))
    (own / "text").write_text("no source")
    assert digest_of(own, time.time() + 10) == found[-1]
    assert all(found) and len(set(found)) == len(found)
    assert not digest_of(own / "none", time.time() + 10)


def test_sources_that_changed_since_they_were_loaded_are_not_known(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("a")
    loaded = file.stat().st_ctime
    os.utime(file, (0, 0))  # a file's own time may be anything
    assert digest_of(tmp_path, loaded + 1) and not digest_of(tmp_path, loaded)


def test_every_process_knows_its_own_code() -> None:
    script = """
import sys, time
import fusec
print(*(name for name in sys.modules if name.startswith("fusec")))
from fusec.provenance import Path, digest_of, own_code
print(own_code() == digest_of(Path(fusec.__file__).parent, time.time()))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["True", "fusec", "fusec.provenance"]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_next_process_makes_only_patterns_whose_operations_a_graph_has(dtype: DType, tmp_path: Path) -> None:
    graph = trace_types(rms_norm.function, [TensorType(dtype, (3, 8), (8, 1)), TensorType(dtype, (8,), (1,)), 1e-6])
    normalize(graph)
    index, wanted, counts = Index(graph), list[Any](), list[int]()
    for _ in range(2):
        made = Traces(TRACED)
        with made.kept(Cache(tmp_path)):
            patterns = PatternLibrary(made, normalize, first=OWN, kinds=made.kinds)
            wanted.append([p.fingerprint for d in OWN for p in patterns.patterns(d, dtype, index)])
            counts.append(len(patterns.made))
    everything = [p for d in OWN for p in patterns.patterns(d, dtype)]
    assert wanted[0] == wanted[1] == [p.fingerprint for p in everything if index.holds_all(p.kinds)] != []
    assert 3 * counts[1] < counts[0]


def test_the_least_pattern_in_one_dtype_bounds_the_operations_of_all() -> None:
    made, bounds = library(Traces(TRACED)), 0
    for known_in, dtype in permutations((F32, BF16, F64), 2):
        for declared, present in [(d, present) for d in OWN for present in choices(d.parameters)]:
            *_, least = choices(declared.parameters)
            for spelling in spellings(declared):
                made.kinds.clear()
                made.pattern_or_none(declared, spelling, known_in, least)
                known = made.known_kinds(declared, spelling, dtype, present)
                pattern = made.pattern_or_none(declared, spelling, dtype, present)
                assert pattern is None or set(known) <= set(pattern.kinds), (declared, spelling, present, dtype)
                bounds += bool(known)
    assert bounds > 100


def test_nothing_is_known_of_patterns_that_others_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusec.rewriting.fusion.FUSIONS", {})
    made = library(Traces(TRACED))

    @fusion
    def quadrupled(x: Rows) -> Tensor:
        """4x"""
        return x * 4

    assert list(made.patterns(quadrupled, F32)) and list(made.patterns(rms_norm, F32))
    names = {title.split()[0] for title in made.kinds}
    assert "rms_norm" in names and "quadrupled" not in names

    @rewrite
    def doubled(x: Rows) -> Tensor:
        """x + x = 2x"""
        return x + x

    monkeypatch.setitem(REWRITES, "doubled", REWRITES.pop("doubled"))
    other = library(Traces(TRACED))
    assert list(other.patterns(rms_norm, F32)) and not other.kinds
