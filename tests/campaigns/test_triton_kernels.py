"""The command that checks Triton kernels of whole models: it tells right from wrong, and shares equal kernels."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from fusec.codegen.triton import check as checks
from fusec.codegen.triton.compile import Report
from tests.campaigns import triton_kernels as command

WORDS = ["--models", "vit", "--dtypes", "float32", "--chips", "sm_90", "--hidden", "32", "--shapes", "2x9"]


def found(tmp_path: Path, *words: str) -> tuple[int, Any]:
    file = tmp_path / "found.json"
    return command.main([*WORDS, "--json", str(file), *words]), json.loads(file.read_text())


@pytest.mark.slow
def test_kernels_of_a_model_pass(tmp_path: Path, capsys: Any) -> None:
    status, content = found(tmp_path)
    assert status == 0 and content["passed"]
    assert {"commit", "versions", "seed"} <= content.keys()
    rows = content["kernels"]
    assert sum(row["places"] for row in rows) > len(rows)  # two layers share kernels
    assert all(row["spills"] == [0] and row["ratio"] <= 1 for row in rows)
    rounded = [row for row in rows if row["label"] != "ge"]  # a mask is exact; transformers builds it on torch 2.11
    assert rounded and all(row["ratio"] > 0 for row in rounded)
    assert "pass" in capsys.readouterr().out


def test_a_wrong_kernel_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(checks, "compile_for", lambda kernel, chip: Report(kernel.name, chip, 8, 4, 0, 0))
    monkeypatch.setattr(checks, "TritonKernel", lambda kernel: lambda buffers, symbols: None)
    status, content = found(tmp_path)
    assert status == 1 and not content["passed"]
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.slow
def test_candidates_of_products_are_right(tmp_path: Path) -> None:
    words = [
        "--mode",
        "max-autotune",
        "--models",
        "gpt2",
        "--dtypes",
        "bfloat16",
        "--shapes",
        "2x20",
        "--hidden",
        "112",
    ]
    status, content = found(tmp_path, *words)
    forms = [form for row in content["kernels"] for form in row.get("forms", ())]
    assert status == 0 and content["mode"] == "max-autotune" and any("descriptors" in form for form in forms)
