"""Stages of a compile that raise: the model runs, is right, and somebody says why."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import injection

INFERENCE, *_ = injection.WORKLOADS
CHOSEN = [
    "fusec.dynamo._through_aot", "fusec.frontend.fx.import_for_call", "fusec.frontend.fx.Importer._lower",
    "fusec.frontend.pointwise._where", "fusec.frontend.calling.Imported.callable", "fusec.outcomes.Outcome.recall",
    "fusec.passes.attention.SpellAttention.apply", "fusec.codegen.launchables.build_kernels",
    "fusec.codegen.cpp.target.CppTarget.schedule", "fusec.codegen.cpp.build.build",
    "fusec.codegen.program.build_program", "fusec.cache.Cache.read",
]  # fmt: skip


@pytest.fixture(scope="module")
def functions() -> dict[str, injection.FunctionType]:
    codes: set[injection.CodeType] = set()
    outcome = injection.run(INFERENCE, codes=codes)
    assert outcome.right and not outcome.error
    return {injection.name_of(f): f for f in injection.functions(codes)}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_model_runs_and_the_reason_is_told(name: str, functions: dict[str, injection.FunctionType]) -> None:
    outcome = injection.run(INFERENCE, functions[name])
    assert outcome.fired and outcome.passed, outcome


def test_a_function_that_runs_once_per_process_is_reached(tmp_path: Path) -> None:
    file, only = tmp_path / "found.json", "analysis.machine"
    command = [sys.executable, "-m", "bench.injection", "--workloads", "built", "--only", only, "--json", str(file)]
    subprocess.run(command, check=True, timeout=300)
    outcomes = json.loads(file.read_text())["outcomes"]
    assert outcomes and all(outcome["fired"] and outcome["passed"] for outcome in outcomes)


def test_a_model_that_fails_does_not_pass() -> None:
    assert not injection.Outcome("", "", fired=True, right=True).passed
    assert not injection.Outcome("", "", fired=False, right=False).passed
    assert not injection.Outcome("", "", fired=True, right=True, reasons=[injection.PLANTED], error="raised").passed
