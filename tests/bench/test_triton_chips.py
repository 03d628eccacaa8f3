"""The command that compiles Triton kernels at published sizes: a sample of it, and that it tells what is not right."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench import triton_chips as command
from bench.published import PUBLISHED, Step, capture
from fusec.analysis.memory import touched_bytes
from fusec.codegen.triton import compile as compiles
from fusec.ir.types import estimate


def found(tmp_path: Path, *words: str) -> tuple[int, Any]:
    file = tmp_path / "found.json"
    return command.main(["--jobs", "1", "--json", str(file), *words]), json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rows", "dtype", "chip"),
    [
        pytest.param("llama", "8", "bfloat16", "gfx942", marks=pytest.mark.thorough),
        ("llama", "8", "float16", "sm_90"),
        pytest.param("bert", "8,512", "float16", "sm_90", marks=pytest.mark.thorough),
        pytest.param("gpt2", "1", "bfloat16", "sm_100", marks=pytest.mark.thorough),
    ],
)
def test_layers_compile_to_what_a_chip_should_run(
    tmp_path: Path, capsys: Any, model: str, rows: str, dtype: str, chip: str
) -> None:
    status, content = found(tmp_path, "--models", model, "--rows", rows, "--dtypes", dtype, "--chips", chip, "--each")
    assert status == 0 and content["passed"], content
    assert {"commit", "versions"} <= content.keys()
    kernels = content["kernels"]
    assert len(kernels) > 5 and all(row["chips"][chip]["registers"] for row in kernels)
    assert {row["kind"] for row in kernels} >= {"attention", "contraction"}
    for row in kernels:
        taken = row["chips"][chip]
        assert taken["spills"] == 0 and taken["bytes"] > 0 and taken["predicted_us"] > 0
        if row["kind"] == "contraction" and "1" not in rows:
            assert taken["matrix_instructions"]
    assert "pass" in capsys.readouterr().out


@pytest.mark.thorough
def test_heads_of_256_fit_the_registers_of_a_chip_whose_assembler_saves_them(tmp_path: Path) -> None:
    words = ("--models", "gemma3", "--rows", "4096", "--dtypes", "bfloat16", "--chips", "sm_120")
    status, content = found(tmp_path, *words)
    assert status == 0 and any(row["kind"] == "attention" for row in content["kernels"])


@pytest.mark.thorough
def test_products_of_many_rows_are_there_under_max_autotune(tmp_path: Path) -> None:
    words = ("--models", "bert", "--rows", "512", "--dtypes", "bfloat16", "--chips", "sm_90")
    products = {}
    for mode in ("default", "max-autotune"):
        status, content = found(tmp_path, *words, "--mode", mode)
        assert status == 0 and content["mode"] == mode
        products[mode] = [row["label"] for row in content["kernels"] if row["kind"] == "contraction"]
    assert len(products["max-autotune"]) > len(products["default"])


def test_nothing_is_allocated_for_them() -> None:
    graph = capture(PUBLISHED["llama"], Step("decode", 8), torch.float16)
    assert sum(estimate(touched_bytes(value)) for value in graph.inputs) > 2**30
    assert all(value.type.device == "meta" for value in graph.inputs)


def test_what_is_not_right_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(
        compiles, "compile_for", lambda kernel, chip: compiles.Report(kernel.name, chip, 8, 4, 2**20, 0)
    )
    status, content = found(tmp_path, "--models", "bert", "--rows", "8", "--dtypes", "bfloat16", "--chips", "sm_90")
    assert status == 1 and not content["passed"]
    said = "; ".join(problem for row in content["kernels"] for problem in row["problems"])
    for problem in ("4 spilled", "shared memory", "without the matrix unit"):
        assert problem in said
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("instructions", "status"),
    [
        pytest.param({"wgmma": 1}, 0, id="does not fit"),
        pytest.param({}, 1, id="is no product", marks=pytest.mark.thorough),
    ],
)
def test_a_candidate_that_does_not_fit_only_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instructions: dict[str, int], status: int
) -> None:
    monkeypatch.setattr(
        compiles, "compile_for", lambda kernel, chip: compiles.Report(kernel.name, chip, 8, 4, 2**20, 0, instructions)
    )
    words = ("--models", "bert", "--rows", "8", "--dtypes", "bfloat16", "--chips", "sm_90", "--candidates")
    got, content = found(tmp_path, *words)
    assert got == status
    labels = [row["label"] for row in content["kernels"]]
    assert len(set(labels)) > 20 and all(
        any(word in label for label in labels) for word in ("transposed", "descriptors")
    )
    assert all(row["chips"]["sm_90"]["spills"] == 4 for row in content["kernels"])


def test_one_row_needs_no_matrix_unit_and_what_spills_is_never_right() -> None:
    fine = compiles.Report("k", "gfx942", 64, 0, 65536, 1000, {"v_mfma_f32_16x16x16_bf16": 2}, multiplies_halves=True)
    assert fine.ok and replace(fine, matrix_instructions={}, multiplies_halves=False).ok
    for wrong in ({"spills": 1}, {"shared": 65537}, {"matrix_instructions": {}}):
        assert len(replace(fine, **wrong).problems) == 1
