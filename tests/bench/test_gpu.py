"""The GPU's benchmark without a GPU: it runs to its end at toy sizes, says what is wrong, and claims nothing."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench import gpu, gpu_run
from bench.devices import Budget, Toy
from bench.gpu_report import CLAIM, claims, draw, page_table
from bench.gpu_run import BUDGET_S, TOO_LATE, Run
from bench.gpu_workloads import Turn, workloads
from fusec.analysis.machine import chip
from fusec.codegen.triton import TritonTarget, check
from tests.codegen.triton_regions import regions_with_products

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- gpu: written by `make golden` from bench/results/gpu.json -->\n", "<!-- end of gpu -->\n"
TOY = ["--toy", "--peers", "", "--modes", "default", "--rounds", "1"]


def run(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "gpu.json"
    status = gpu.main([*TOY, "--json", str(file), *words])
    return status, json.loads(file.read_text())


@pytest.mark.thorough
def test_all_stages_run_to_their_end_without_a_gpu(tmp_path: Path) -> None:
    status, found = run(tmp_path)
    assert (status, found["failures"]) == (0, []) and found["toy"]
    assert len(found["kernels"]) > 20 and all(row["ratio"] <= 1 and not row["problem"] for row in found["kernels"])
    assert found["sanitizer"]["tool"]
    assert list(found["models"]) == [workload.title for workload in workloads()]
    for model in found["models"].values():
        ours = model["candidates"]["fusec"]
        assert ours["right"] and ours["steps"]["kernel"] > 3 and not ours["no kernel"]
        assert {row["name"] for row in model["measurement"]["rows"]} == {"eager", "eager again", "fusec"}
    assert set(found["rows"]) == {"RMSNorm", "softmax", "SwiGLU"} and all("share" in r for r in found["rows"].values())
    assert found["compile"]["fusec"]["ready"] > 0
    assert all(claim["have"] is None and claim["holds"] is None for claim in found[CLAIM])


def test_a_wrong_kernel_is_found_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that stores nothing leaves its results poisoned."""
    monkeypatch.setattr(check, "TritonKernel", lambda kernel: lambda buffers, symbols: None)
    status, found = run(tmp_path, "--stages", "kernels,sanitizer", "--only", "BERT-base 1")
    assert status == 1 and found["failures"]
    assert all(row["problem"] for row in found["kernels"]) and "sanitizer" in found


def test_products_run_by_descriptors_too_where_there_are_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No product of many rows pays at toy sizes: one stands for those of a model."""
    inputs = [torch.randn(shape).to(torch.bfloat16) for shape in ((20, 24), (40, 24))]
    regions = [(region, inputs) for region in regions_with_products(torch.nn.functional.linear, inputs)]
    monkeypatch.setattr(TritonTarget, "machine", lambda *_: chip("h200"))
    monkeypatch.setattr(gpu, "regions_of", lambda *_: regions)
    status, found = run(tmp_path, "--stages", "kernels", "--only", "BERT-base 1")
    default, described = found["kernels"]
    assert status == 0 and default["config"] == "default" and "descriptors" in described["config"]
    assert 0 < described["ratio"] <= 1 and not described["problem"]


def test_a_wrong_model_wins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice_as_much(name: str, model: Any) -> Any:
        def call(**inputs: Any) -> Any:
            output = model(**inputs)
            output.last_hidden_state = output.last_hidden_state * 2
            return output

        return call

    monkeypatch.setattr(gpu, "peer", twice_as_much)
    status, found = run(tmp_path, "--stages", "models", "--only", "BERT-base 1")
    (model,) = found["models"].values()
    assert status == 1 and not model["candidates"]["fusec"]["right"]
    assert "ms" not in model and len(model["measurement"]["rows"]) == 3


def test_what_is_wrong_only_when_it_is_replayed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def right_at_first(name: str, model: Any) -> Any:
        calls = []

        def call(**inputs: Any) -> Any:
            calls.append(1)
            output = model(**inputs)
            output.last_hidden_state = output.last_hidden_state * (2 if len(calls) > 2 else 1)
            return output

        return call

    monkeypatch.setattr(gpu, "peer", right_at_first)
    status, _ = run(tmp_path, "--stages", "models", "--only", "BERT-base 1")
    assert status == 1


def test_launches_that_are_not_recorded_are_told(tmp_path: Path) -> None:
    """On the processor nothing is recorded, which is no failure there."""
    options = ["--modes", "max-autotune", "--stages", "models", "--only", "BERT-base 1"]
    status, found = run(tmp_path, *options)
    (model,) = found["models"].values()
    (said,) = set(model["candidates"]["fusec max-autotune"]["not recorded"])
    assert status == 0 and said == "launches are not recorded: nothing can be recorded on the device cpu"


def test_after_a_lost_device_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TritonKernel", lambda kernel: lambda buffers, symbols: None)
    monkeypatch.setattr(Toy, "lives", lambda self: False)
    status, found = run(tmp_path, "--stages", "kernels,models,rows")
    assert status == 1 and not found["models"] and not found["rows"]
    assert "nothing runs any more" in found["not measured"]["8B decode 32"]


@pytest.mark.parametrize(
    ("probe", "kernels", "said", "wrong"),
    [(0, 0, "no error in 2 kernels", False), (0, 86, "status 86", True), (1, 0, "does not work here", False)],
)
def test_a_sanitizer_is_believed_only_where_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: int, kernels: int, said: str, wrong: bool
) -> None:
    """A stand-in that answers for a few lines of torch, and for the kernels."""
    tool = tmp_path / gpu.SANITIZER
    tool.write_text(
        f'#!/bin/sh\nfor word; do [ "$word" = -c ] && exit {probe}\n'
        f"""case "$word" in *.json) echo '{{"kernels": [1, 2]}}' > "$word";; esac; done\nexit {kernels}\n"""
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    one = Run(gpu._parser().parse_args(["--json", str(tmp_path / "gpu.json")]), Toy(), Budget(1000))
    gpu._sanitizer(one)
    assert said in one.found["sanitizer"]["said"] and bool(one.failures) == wrong


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    status, found = run(tmp_path, "--budget", "0")
    assert status == 0 and not found["models"] and not found["kernels"]
    assert found["not measured"]["8B decode 1"] == TOO_LATE


@pytest.mark.thorough
def test_a_run_goes_on_where_another_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured, or failed, stays; what there was no time for is measured now."""
    late, options = Run.late, ["--stages", "models", "--only", "BERT-base"]
    with monkeypatch.context() as patched:
        patched.setattr(Run, "late", lambda run, what, seconds: "32" in what and late(run, what, 1e9))
        _, first = run(tmp_path, *options)
    assert list(first["models"]) == ["BERT-base 1×128"] == first["done"]
    assert first["not measured"] == {"BERT-base 32×128": TOO_LATE}
    _, second = run(tmp_path, *options, "--continue")
    assert list(second["models"]) == ["BERT-base 1×128", "BERT-base 32×128"] == second["done"]
    assert second["models"]["BERT-base 1×128"] == first["models"]["BERT-base 1×128"]
    assert not second["not measured"] and second["seconds"] >= first["seconds"]


def test_nothing_goes_on_with_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, "--stages", "launching")
    run(tmp_path, "--stages", "launching", "--continue")
    monkeypatch.setattr(gpu_run, "own_code", lambda: "another")
    with pytest.raises(SystemExit, match=r"cannot continue .*: code was '\w+' and is 'another'"):
        run(tmp_path, "--stages", "launching", "--continue")


def test_every_stage_has_time_to_begin(tmp_path: Path) -> None:
    """However long those before it take; and one that is asked for alone has all."""
    assert sum(stage.share for stage in gpu.STAGES.values()) == pytest.approx(1)
    for name, stage in gpu.STAGES.items():
        assert stage.share * BUDGET_S >= stage.least, name
        alone = Run(gpu._parser().parse_args(["--stages", name]), Toy(), Budget(BUDGET_S))
        assert alone.ends == {name: 1}


def test_no_stage_takes_the_time_of_those_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told to end before all of it has passed, but for the last one."""
    left: dict[str, float] = {}
    for stage in gpu.STAGES:
        monkeypatch.setattr(gpu, f"_{stage}", lambda run, stage=stage: left.update({stage: run.budget.left}))
    run(tmp_path, "--budget", "1000")
    ends = list(left.values())
    assert ends == sorted(ends) and left["kernels"] < 290 and 780 < left["models"] < 840 and 990 < left["compile"]


def test_a_peer_s_compile_that_takes_too_long_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(name: str, *_: Any) -> dict[str, float]:
        if name == "inductor":
            raise subprocess.TimeoutExpired(name, 150)
        return {"ready": 1.0}

    monkeypatch.setattr(gpu, "in_fresh_process", endless)
    status, found = run(tmp_path, "--stages", "compile", "--peers", "inductor")
    assert (status, found["failures"]) == (0, []) and "inductor" not in found["compile"]
    assert found["not measured"] == {"compile time of inductor": TOO_LATE}


def test_a_compile_that_has_begun_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for one that does not run: no ratio is claimed without it."""

    def endless(name: str, model: Any) -> Any:
        def call(**inputs: Any) -> Any:
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 100
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            while True:
                with suppress(Exception):  # as a compiler may that tries something else
                    time.sleep(1)

        return call if name == "inductor" else model

    monkeypatch.setattr(gpu, "peer", endless)
    _, found = run(tmp_path, "--stages", "models", "--only", "BERT-base 1", "--peers", "inductor")
    assert found["not measured"] == {"BERT-base 1×128, inductor": TOO_LATE}
    (model,) = found["models"].values()
    assert "problem" not in model["candidates"]["inductor"]
    assert {row["name"] for row in model["measurement"]["rows"]} == {"eager", "eager again", "fusec"}


def test_a_picture_shows_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for known, there in ((measured(), True), ({}, False)):
        file = tmp_path / f"{there}.svg"
        draw(file, claims(known))
        assert file.exists() == there
    assert "BERT-base 1×128" in (tmp_path / "True.svg").read_text()


def test_without_a_gpu_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--toy"):
        gpu.main([])


def test_a_cache_holds_the_same_at_every_turn() -> None:
    workload = next(w for w in workloads(toy=True) if w.ask == "decode")
    model = workload.build(torch.device("cpu"), 0)
    one, other = (Turn(workload, model, 0) for _ in "ab")
    first = one.results(model)
    for _ in range(3):
        one(model)
    one.rewind()
    assert all(torch.equal(a, b) for a, b in zip(first, other.results(model), strict=True))
    assert torch.equal(first[0], one.results(model)[0])


def measured() -> dict[str, Any]:
    times = {"eager": 9.0, "inductor": 6.0, "inductor max-autotune": 5.0, "fusec": 4.0, "fusec max-autotune": 2.5}
    rows = [{"name": name, "milliseconds": ms} for name, ms in times.items()]
    compiled = {"fusec": {"ready": 2.0}, "inductor": {"ready": 9.0}}
    right = {"fusec": {"right": True}, "fusec max-autotune": {"right": True}}
    wrong = {"fusec": {"right": True}, "fusec max-autotune": {"right": False}}
    models = {
        "8B decode 1": {"measurement": {"rows": rows}, "candidates": right},
        "1B decode 1": {"measurement": {"rows": rows}, "candidates": wrong},
        "8B decode 32": {"measurement": {"rows": rows[:3]}, "candidates": right},
        "8B prefill 4096": {"measurement": {"rows": [*rows[:2], *rows[3:]]}, "candidates": right},
        "BERT-base 1×128": {
            "measurement": {"rows": [*rows[:2], *rows[3:]]},
            "candidates": right | {"inductor max-autotune": {"problem": "out of memory"}},
        },
    }
    return {"models": models, "rows": {"softmax": {"share": 0.8}}, "compile": compiled}


def test_claims_are_best_against_best_and_only_of_what_ran() -> None:
    found = {claim["what"]: claim for claim in claims(measured(), ["fusec", "fusec max-autotune"])}
    assert found["8B decode 1"]["have"] == 2.0 and found["8B decode 1"]["holds"]
    assert found["1B decode 1"]["have"] == 1.25 and found["1B decode 1"]["holds"] is False
    assert found["8B decode 32"]["have"] is None and found["8B decode 32"]["holds"] is None
    assert found["8B prefill 4096"]["have"] is None, "a peer that there was no time for may be the quicker one"
    assert found["BERT-base 1×128"]["have"] == 2.4, "one that does not run is not"
    assert found["softmax rows"]["holds"] is False and found["compile, cold"]["have"] == 4.5


def test_the_page_shows_what_was_measured(check_block: Callable[[Path, str, str, str], None]) -> None:
    """The table is the result's own; without one, nothing in it is a figure."""
    file = ROOT / "bench" / "results" / "gpu.json"
    table = page_table(json.loads(file.read_text(encoding="utf-8")) if file.exists() else None)
    check_block(ROOT / "docs" / "performance.md", BEGIN, END, table)


def test_a_table_of_figures_says_where_they_come_from() -> None:
    result = {
        "chip": "NVIDIA H200", "time": "2026-11-22T01:02:03Z", "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "cuda": "13.0", "layers": "some stand in for all", CLAIM: claims(measured(), ["fusec", "fusec max-autotune"]),
    }  # fmt: skip
    text = page_table(result)
    assert all(part in text for part in ("NVIDIA H200, 2026-11-22, torch 2.11.0, triton 3.6.0, CUDA 13.0", "8 of 32"))
    assert "| 8B decode 1 | Inductor's best time / ours | 1.15 | 1.5 | 2.00 |" in text
    assert "| softmax rows | share of a copy's bandwidth | 85% | 92% | 80% |" in text
    assert "| 8B decode 32 | Inductor's best time / ours | 1.5 | 4 | not measured |" in text
    assert "](../bench/results/gpu.svg)" in text and "gpu.svg" not in page_table(None)
    assert page_table(None).count("not measured") == len(claims({}))
