"""Campaigns on random programs: the same seed, the same programs; planted faults are found and shrunk."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.ir.parser import parse_graph
from fusec.ir.verifier import verify_graph
from tests.campaigns.fuzz.__main__ import main
from tests.campaigns.fuzz.draws import drawn, read, shrunk, written
from tests.campaigns.fuzz.faults import FAULTS
from tests.campaigns.fuzz.judge import judge_graph, without_overflow
from tests.campaigns.fuzz.order import OrderDependent, run_in_any_order
from tests.campaigns.fuzz.programs import made, subject_of
from tests.campaigns.fuzz.wide import wide_graph
from tests.campaigns.op_db.judge import DRAWS, Values, judge, wrong_values


def test_a_seed_gives_the_same_programs() -> None:
    programs = drawn(5, range(20))
    assert drawn(5, range(20)) == programs and drawn(5, [7]) == [programs[7]] and drawn(6, range(20)) != programs
    assert [read(list(written(p))) for p in programs] == programs


def test_graphs_are_valid_and_reach_every_operation() -> None:
    seen, dtypes, empty = set(), set(), 0
    for program in drawn(0, range(400)):
        graph = wide_graph(program)
        verify_graph(graph)
        seen |= {node.op.name for node in graph}
        dtypes |= {v.dtype.name for v in graph.inputs if hasattr(v.type, "dtype")}
        empty += any(0 in node.results[0].shape for node in graph)
    assert {"take", "gather", "write", "contraction", "convolution", "window", "concat", "cast", "floor_divide"} <= seen
    assert dtypes == {"f32", "bf16", "f16", "f64", "i64", "i32", "i16", "i8", "u8", "bool"} and empty > 20


@pytest.mark.parametrize(("target", "count"), [("interpreter", 60), ("cpp", 10), ("triton", 20)])
def test_programs_are_compiled_right(target: str, count: int) -> None:
    verdicts = [judge_graph(program, target) for program in drawn(0, range(count))]
    assert [v.outcome for v in verdicts] == ["right"] * count


def test_programs_of_torch_are_compiled_right() -> None:
    assert [judge(subject_of(made(program))).outcome for program in drawn(0, range(4))] == ["right"] * 4


def test_overflow_of_float16_is_forgiven_where_eager_overflows() -> None:
    eager = torch.tensor([inf, nan, inf, inf, 2.0], dtype=torch.float16)
    compiled = torch.tensor([1.0, nan, 3.0, inf, inf], dtype=torch.float16)
    reference = torch.tensor([1.0, 2.0, 2.0, inf, 2.0], dtype=torch.float64)
    row = without_overflow(eager, compiled, reference)
    assert row[0].tolist() == [1, 2, 2, inf, 2] and row[1].tolist() == [1, 2, 3, inf, inf]


@pytest.mark.parametrize(
    ("reduction", "numbers", "defined"),
    [
        ("prod(%x) {dims=(-1,)}", [1e30, 1e30, 0.0], False),
        ("prod(%x) {dims=(-1,)}", [1e-30, inf, 1e-30], False),
        ("prod(%x) {dims=(-1,)}", [1e30, 1e30, 0.5], False),
        ("prod(%x) {dims=(-1,)}", [1e-30, 1e-30, 2.0], False),
        ("prod(%x) {dims=(-1,)}", [1e30, 1e30, 2.0], True),
        ("prod(%x) {dims=(-1,)}", [1e-30, 0.0, 0.5], True),
        ("sum(%x) {dims=(-1,)}", [3e38, 3e38, -3e38], False),
        ("sum(%x) {dims=(-1,)}", [inf, -3e38, 1.0], True),
        ('contraction(%x, %x) {spec="ab,cb->ac"}', [1e20, 1.0, 1.0], False),
        ('contraction(%x, %x) {spec="ab,cb->ac"}', [inf, nan, 1e18], True),
    ],
)
def test_what_depends_on_the_order_of_terms_is_undefined(reduction: str, numbers: list[float], defined: bool) -> None:
    graph = parse_graph(f"graph g(%x: f32[1, 3]) {{\n  %y: f32[1, 1] = {reduction}\n  return %y\n}}")
    with nullcontext() if defined else pytest.raises(OrderDependent):
        run_in_any_order(graph, [torch.tensor([numbers])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_suspect_is_judged_over_runs_that_differ(dtype: torch.dtype) -> None:
    seen = set()

    def call(arguments: Sequence[Tensor]) -> Values:
        x = arguments[0].resolve_conj()
        x = torch.view_as_real(x) if x.is_complex() else x
        seen.add(tuple(x.flatten().tolist()))
        return [(x, x * 1.01, x.double())]

    assert wrong_values(call, [torch.full((1, 40), 1.5, dtype=dtype).conj().expand(2, 40)]) and len(seen) == DRAWS


@pytest.mark.parametrize("name", ["max for min", pytest.param("write lost", marks=pytest.mark.thorough)])
def test_a_planted_fault_is_found_and_shrunk(name: str) -> None:
    with FAULTS[name].planted():
        index = next(i for i, p in enumerate(drawn(0, range(60))) if judge_graph(p, "interpreter").outcome == "wrong")
        smallest = shrunk(0, index, lambda p: judge_graph(p, "interpreter").outcome == "wrong", trials=150)
        assert judge_graph(smallest, "interpreter").outcome == "wrong"
    assert len(smallest[1]) <= len(drawn(0, [index])[0][1])
    assert judge_graph(smallest, "interpreter").outcome == "right"


@pytest.mark.thorough
def test_a_campaign_writes_what_it_finds(tmp_path: Path) -> None:
    words = ["--target", "interpreter", "--count", "3", "--seed", "4", "--json", str(tmp_path / "out.json")]
    assert main(words) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["seed"], result["programs"], result["outcomes"]) == (4, 3, {"right": 3})
    assert main([*words, "--first", "3"]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["programs"] == 6 and [run["first"] for run in result["runs"]] == [0, 3] and result["passed"]


@pytest.mark.thorough
def test_what_was_found_is_judged_again(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = ["--target", "interpreter", "--count", "1", "--seed", "4", "--json", str(path)]
    assert main(words) == 0
    result = json.loads(path.read_text())
    path.write_text(json.dumps(result | {"found": [{"seed": 4, "index": 0, "outcome": "wrong", "commit": "earlier"}]}))
    assert main([*words, "--first", "1"]) == 1
    assert main([*words, "--again"]) == 0
    (row,) = json.loads(path.read_text())["found"]
    assert row["mended"]


def test_a_process_that_dies_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.campaigns.fuzz.__main__ as campaign

    started: list[list[str]] = []

    class Done:
        returncode, stderr = -11, "Segmentation fault"

    def dying(words: list[str], **options: Any) -> Done:
        started.append(words)
        first, last, log = words[5:8]
        lines = [
            {"begins": int(first)},
            {"index": int(first), "outcome": "right", "detail": ""},
            {"begins": int(first) + 1},
        ]
        if int(last) - int(first) == 1:
            lines = lines[:2]
        Path(log).write_text("\n".join(map(json.dumps, lines)))
        done = Done()
        done.returncode = -11 if len(lines) == 3 else 0
        return done

    monkeypatch.setattr(campaign, "subprocess", SimpleNamespace(run=dying, DEVNULL=None, PIPE=None))
    path = tmp_path / "out.json"
    assert main(["--count", "3", "--json", str(path)]) == 1
    assert json.loads(path.read_text())["outcomes"] == {"right": 2, "crash": 1} and len(started) == 2
