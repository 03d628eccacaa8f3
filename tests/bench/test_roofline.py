"""The comparison of predicted with measured times: how order is counted, and that the command runs to its end."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from bench import roofline
from fusec.analysis.machine import assumed_cpu
from fusec.debug.roofline import Roofline


def row(predicted: float, measured: float | None) -> Roofline:
    return Roofline(1.0, 1.0, "memory", predicted, predicted, measured)


def test_pairs_in_the_predicted_order_are_counted() -> None:
    assert roofline.concordance([row(1, 10), row(2, 20), row(3, 30)]) == 1.0
    assert roofline.concordance([row(1, 10), row(2, 30), row(3, 20)]) == pytest.approx(2 / 3)
    assert roofline.concordance([row(1, 20), row(1, 10), row(2, None)]) == 1.0  # nothing was predicted of any pair


def test_roofline_runs_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(assumed_cpu(), name="of the test", source="measured")
    monkeypatch.setattr(roofline, "measure_machine", lambda seconds: machine)
    file = tmp_path / "roofline.json"
    words = ["--models", "bert", "--dtypes", "float32", "--tokens", "1", "--hidden", "64", "--layers", "1"]
    assert roofline.main([*words, "--allow-busy", "--json", str(file)]) == 0
    data = json.loads(file.read_text())
    (found,) = data["models"].values()
    assert data["machine"] == machine.to_json() and 0 <= found["order"] <= 1
    assert found["totals"]["measured_us"] > 0 and all(k["measured_us"] > 0 for k in found["kernels"])
