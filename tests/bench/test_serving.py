"""The command that measures parts of a server's step."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from bench import serving


def test_each_workload_is_measured_against_the_fastest_peer(tmp_path: Path) -> None:
    words = ["--models", "Mixtral", "--hidden", "32", "--rows", "2", "--dtypes", "float32", "--rounds", "1"]
    serving.main([*words, "--allow-busy", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())["workloads"]
    assert [row["kind"] for row in found] == ["decode", "greedy", "sampler", "greedy", "sampler"]
    for row in found:
        ratios = {r["name"]: r["ratio"] for r in row["rows"]}
        ours = min(ratio for name, ratio in ratios.items() if name.startswith("fusec"))
        assert row["gain"] == pytest.approx(ratios[row["best"]] / ours)
        assert not row["best"].startswith("fusec")
