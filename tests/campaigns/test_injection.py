"""Functions that raise during a compile: the model runs, is right, and somebody says why."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaigns.injection.fork import Died, in_fork
from tests.campaigns.injection.planting import PLANTED, Key, Place, places
from tests.campaigns.injection.trial import Outcome, Trial
from tests.campaigns.injection.workloads import WORKLOADS, Workload

INFERENCE, *_ = WORKLOADS
CHOSEN = [
    "fusec.dynamo._through_aot", "fusec.frontend.fx.import_for_call", "fusec.frontend.fx.Importer._lower",
    "fusec.frontend.pointwise._where", "fusec.frontend.calling.Imported.callable", "fusec.pass_cache.PassCache.load",
    "fusec.passes.decompose_sdpa.DecomposeSDPA.apply", "fusec.codegen.program.kernels.build_kernels",
    "fusec.codegen.cpp.target.CppTarget.schedule", "fusec.codegen.cpp.build.build",
    "fusec.codegen.program.program.build_program", "fusec.cache.Cache.read",
]  # fmt: skip


@pytest.fixture(scope="module")
def attempt(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Trials in this process."""
    return Trial(INFERENCE, INFERENCE.results(), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def known(attempt: Trial) -> dict[str, Place]:
    """The functions of fusec by name."""
    outcome = attempt.compiled()
    assert outcome.passed, outcome
    return {place.name: place for place in places().values()}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_model_runs_and_the_reason_is_told(name: str, attempt: Trial, known: dict[str, Place]) -> None:
    outcome = attempt.compiled(known[name])
    assert outcome.fired and outcome.passed, outcome


@pytest.mark.thorough
@pytest.mark.parametrize("only", ["analysis.machine", "projections.bias_residual"])
def test_a_function_that_runs_once_per_process_is_reached(only: str, tmp_path: Path) -> None:
    """The second is a declaration, which is traced by the names of its arguments."""
    file = tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "tests.campaigns.injection",
        "--workloads",
        "built",
        "--only",
        only,
        "--json",
        str(file),
    ]
    subprocess.run(command, check=True, timeout=300)
    outcomes = json.loads(file.read_text())["outcomes"]
    assert outcomes and all(outcome["fired"] and outcome["passed"] for outcome in outcomes)


def test_a_model_that_fails_does_not_pass() -> None:
    assert not Outcome("", fired=True, right=True).passed
    assert not Outcome("", fired=False, right=False).passed
    assert not Outcome("", fired=True, right=True, reasons=[PLANTED], error="raised").passed


def test_a_fork_that_dies_is_an_outcome_with_module_and_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def die(self: Trial, place: Place) -> Outcome:
        os._exit(3)

    monkeypatch.setattr(Trial, "compiled", die)
    place = Place("fusec.dynamo.reset", Key("fusec/dynamo.py", 17, "reset"), ())
    outcome = Trial(Workload("none", lambda: lambda *_: ()), (), tmp_path)(place)
    assert not outcome.passed and (outcome.function, outcome.line) == ("fusec.dynamo.reset", 17)
    assert "status 3" in outcome.error


def test_a_fork_returns_what_its_function_returns() -> None:
    assert in_fork(os.getpid) != os.getpid()
    with pytest.raises(Died, match="status 1"):
        in_fork(int, "no number")
