"""The harness: pairing, the noise floor, and the refusal to measure on a busy machine; nothing depends on speed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench import compile_time, harness, machine, speed
from bench.harness import FLOOR, Measurement, Row, measure, table
from bench.machine import wait_until_idle
from fusec.analysis.machine import assumed_cpu


def test_rounds_are_interleaved_and_eager_runs_twice() -> None:
    calls: list[str] = []
    found = measure({"eager": lambda: calls.append("e"), "other": lambda: calls.append("o")}, rounds=9, call_ms=0.0)
    rounds = ["".join(calls[i : i + 6]) for i in range(len(calls) - 9 * 6, len(calls), 6)]
    assert set(rounds) == {"eeeeoo", "eeooee", "ooeeee"}, "each as often untimed, since short, and in every order"
    assert [row.name for row in found.rows] == ["eager", FLOOR, "other"]
    assert found.row("eager").ratio == 1.0 and found.noise >= 0


@pytest.mark.parametrize(("seconds", "expected"), [(1e-3, "|ee||ee|"), (1.0, "|e|")])
def test_a_short_call_is_timed_after_another_of_its_kind(
    monkeypatch: pytest.MonkeyPatch, seconds: float, expected: str
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(harness, "_seconds", lambda run, clock, first: seconds)
    monkeypatch.setattr(harness.time, "perf_counter", lambda: calls.append("|") or len(calls))
    measure({"eager": lambda: calls.append("e")}, rounds=1)
    assert "".join(calls).endswith(expected * 2)


def measured(ratio: float, spread: float = 0.01, others: float = 0.0) -> Measurement:
    rows = [Row("eager", 1.0, 1.0, 0.0), Row(FLOOR, 1.0, 1.02, 0.01), Row("fusec", ratio, ratio, spread)]
    return Measurement(rows, 10, others)


def test_slower_means_beyond_the_noise() -> None:
    assert measured(1.0).noise == pytest.approx(0.03)
    assert not speed.is_slower(measured(1.02), "fusec")
    assert speed.is_slower(measured(1.05), "fusec")
    assert not speed.is_slower(measured(1.05, spread=0.1), "fusec")


def test_a_disturbed_measurement_is_marked() -> None:
    assert measured(1.0, others=0.5).disturbed and measured(1.0, others=0.5).to_json()["disturbed"]
    assert not measured(1.0).disturbed
    assert table("t", {"q": measured(0.5)}).row_count == 1


def test_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    clock = iter(range(1000))

    def busy() -> tuple[float, float]:
        now = float(next(clock))
        return now, now * 0.9

    monkeypatch.setattr(machine, "_times", busy)
    monkeypatch.setattr(machine, "_own_seconds", lambda: 0.0)
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit, match="90% of the machine"):
        wait_until_idle(patience=0.0)
    assert wait_until_idle(allow_busy=True) == pytest.approx(0.9)
    assert "THE MACHINE IS BUSY" in capsys.readouterr().err


def test_idle_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    clock = iter(range(9))
    monkeypatch.setattr(machine, "_times", lambda: (float(next(clock)), 0.0))
    assert wait_until_idle() == 0.0


def test_own_seconds_are_those_of_the_compilers_that_aot_calls() -> None:
    torch._dynamo.reset()
    with compile_time.own_seconds() as spans:
        torch.compile(lambda x: x * 2 + 1, backend="aot_eager")(torch.ones(3))
    assert len(spans) == 1 and spans[0][0] <= spans[0][1]
    torch._dynamo.reset()
    torch.compile(lambda x: x * 3 + 1, backend="aot_eager")(torch.ones(3))
    assert len(spans) == 1


def runs(**own: float) -> compile_time.Best:
    """Runs of 12 layers by backend and caches, and cold ones of others by depth; from end to end 2 s more."""
    named = {"cold": ("fusec", 12, "cold"), "warm": ("fusec", 12, "warm"), "theirs": ("inductor", 12, "cold")}
    keys = {name: named.get(name) or ("fusec", int(name[1:]), "cold") for name in own}
    return {keys[name]: {"own": seconds, "seconds": seconds + 2.0} for name, seconds in own.items()}


@pytest.mark.parametrize(
    ("worse", "broken"),
    [
        ({}, []),
        ({"theirs": 7.9}, ["12 layers, own: at most 0.25 of inductor's"]),
        ({"theirs": 3.9}, ["12 layers, own: at most 0.25 of inductor's", "12 layers, end to end: at most 0.5"]),
        ({"warm": 1.1}, ["12 layers, own, warm: at most 1.0 s"]),
        ({"d24": 2.5}, ["24 layers, own: at most 1.2 times that of 12"]),
        ({"d48": 3.1}, ["48 layers, own: at most 1.5 times that of 12"]),
    ],
)
def test_compile_time_promises(worse: dict[str, float], broken: list[str]) -> None:
    best = runs(**({"cold": 2.0, "warm": 0.9, "theirs": 8.1, "d24": 2.3, "d48": 2.9} | worse))
    promises = compile_time._promises(best, [12, 24, 48], ["fusec", "inductor"])
    assert len(promises) == 5 and [promise for promise, holds in promises.items() if not holds] == broken


def test_a_warm_process_has_what_the_cold_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_call(backend: str, layers: int, folder: str, hidden: int, seed: int) -> dict[str, Any]:
        built = Path(folder, f"{backend} {layers}")
        own = 0.1 if built.exists() else 1.0
        built.touch()
        return {"backend": backend, "layers": layers, "own": own, "seconds": own + 1}

    monkeypatch.setattr(compile_time, "in_fresh_process", first_call)
    file = tmp_path / "compile_time.json"
    words = ["--backends", "fusec", "--depths", "12,24", "--repeats", "2", "--allow-busy", "--json", str(file)]
    assert compile_time.main(words) == 0
    found = json.loads(file.read_text())["runs"]
    assert [(run["layers"], run["caches"], run["own"], run["files"]) for run in found] == [
        (12, "cold", 1.0, 1), (12, "warm", 0.1, 0), (24, "cold", 1.0, 1),
    ] * 2  # fmt: skip


def test_speed_runs_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "measure_machine", assumed_cpu)
    file = tmp_path / "speed.json"
    words = ["--models", "vit", "--dtypes", "float32", "--hidden", "64", "--layers", "1", "--peers", "aot_eager"]
    speed.main([*words, "--tokens", "1", "--rounds", "2", "--allow-busy", "--json", str(file)])
    assert list(json.loads(file.read_text())["measurements"]) == ["vit float32, 1 tokens"]
