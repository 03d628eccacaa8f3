"""Verification over models: every application is counted, and what fails is told."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from fusec.verify import rewrites
from tests.campaigns import verification


class Gated(nn.Module):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return torch.sigmoid(gate) * gate * x * 1.0


INPUTS = {"x": torch.randn(3, 5), "gate": torch.randn(3, 5)}


def test_every_application_is_verified() -> None:
    found = verification.verify("gated", Gated(), INPUTS)
    assert found.passed and found.applications >= 3, found  # x·1 = x, silu, swiglu
    assert found.seconds.keys() == {"without", "with"}
    assert found.passes >= 3 and "pass" in verification._figures([found.to_json()])[0]


@pytest.mark.parametrize(("verdict", "place"), [(None, "unknown"), (False, "failures")])
def test_what_is_not_verified_is_told(monkeypatch: pytest.MonkeyPatch, verdict: bool | None, place: str) -> None:
    def judge(before: object, after: object, exact: bool = True) -> rewrites.EquivalenceResult:
        if verdict is None:
            raise RuntimeError("out of order")
        return rewrites.EquivalenceResult(False, (rewrites.OracleResult("float64", "differ"),), "planted")

    monkeypatch.setattr(rewrites, "check_rewrite", judge)
    found = verification.verify("gated", Gated(), INPUTS)
    assert not found.passed and getattr(found, place)


def test_a_model_that_cannot_run_fails() -> None:
    found = verification.verify("gated", Gated(), {"x": torch.randn(3), "gate": torch.randn(2)})
    assert not found.passed and found.failures


def test_what_eager_refuses_neither_passes_nor_fails() -> None:
    row = verification.verify_named("fnet", "bfloat16", "static", 0)
    assert row["refused"] and not row["passed"] and not row["failed"]
    assert "refuses" in verification._figures([row])[0]


@pytest.mark.thorough
def test_command_takes_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the other processes, which take their time to start.
    monkeypatch.setattr(verification, "_run", lambda cases, jobs: [verification.verify_named(*c) for c in cases])
    file = tmp_path / "verification.json"
    words = ["--models", "distilbert", "--dtypes", "bfloat16", "--modes", "static", "--json", str(file)]
    assert verification.main(words) == 0
    found = json.loads(file.read_text())
    assert found["passed"] and found["applications"] > 10 and found["passes"] > 3
