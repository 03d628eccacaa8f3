"""The check accepts what is right and rejects what is not; it is tried without the compiler."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench.families import FAMILIES, chosen
from bench.numerics import Float64, cast_parameters, reference_outputs, tensors_of
from bench.peers import backend_named
from tests.campaigns import models as command
from tests.campaigns.check import Result, check
from tests.campaigns.faults import FAULTS, Fault, planted
from tests.campaigns.routing import Routed, flips, routers_of, scores_and_choices, unfounded_choices

SHAPE = [(2, 11, "left")]


@pytest.mark.parametrize("family", ["gpt2", pytest.param("t5", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_passes_its_own_check(family: str, dtype: torch.dtype) -> None:
    result = check(FAMILIES[family], dtype, "static", "eager", shapes=SHAPE)  # type: ignore[arg-type]
    assert result.passed, (result.reason, result.error, result.ratio)
    assert result.graphs == 1 and not result.breaks


@pytest.mark.parametrize("family", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.thorough)])
def test_routers_pass_with_choices_forced(family: str) -> None:
    # On these tokens some choice flips in bfloat16, so that both ways are taken.
    tokens: list[Any] = [(1, 13, "none"), (3, 16, "left"), (3, 16, "right")]
    result = check(FAMILIES[family], torch.bfloat16, "static", "eager", shapes=tokens)
    assert result.passed, (result.reason, result.error, result.ratio)
    assert result.flips > 0


# ``make verify`` plants them all in each backend.
@pytest.mark.parametrize(
    "fault",
    [*FAULTS[::3], *(pytest.param(f, marks=pytest.mark.thorough) for i, f in enumerate(FAULTS) if i % 3)],
    ids=lambda f: f.name,
)
def test_planted_fault_is_found(fault: Fault) -> None:
    result = check(FAMILIES[fault.family], torch.bfloat16, "static", planted(fault, "eager"), shapes=[fault.shape])
    assert result.differs, (result.ratio, result.error)


def test_a_fault_that_does_not_fit_is_an_error_not_a_find() -> None:
    nowhere = Fault("nowhere", "bert", (1, 5, "none"), lambda graph: False)
    result = check(FAMILIES["bert"], torch.float32, "static", planted(nowhere, "eager"), shapes=[nowhere.shape])
    assert "no place" in result.error and not result.differs and not result.passed


def test_a_choice_that_its_scores_do_not_favour_is_found() -> None:
    model = FAMILIES["mixtral"].build()
    routed = Routed(model)
    with torch.no_grad():
        outputs = list(routed(**FAMILIES["mixtral"].sample(2, 9, "none")))
    assert len(routers_of(model)) == 2 and unfounded_choices(model, outputs) == 0
    wrong = copy.copy(outputs)
    scores, choices = scores_and_choices(outputs)
    wrong[2] = choices[0].clone()
    wrong[2][3] = scores[0][3].topk(2, largest=False).indices
    assert flips(wrong, outputs) == 1 and unfounded_choices(model, wrong) == 1


def test_forcing_its_own_choice_changes_nothing() -> None:
    for family in ("mixtral", "deepseek_v3"):
        routed = Routed(FAMILIES[family].build())
        inputs = FAMILIES[family].sample(2, 9, "left")
        with torch.no_grad():
            free = routed(**inputs)
            forced = routed(forced=scores_and_choices(free)[1], **inputs)
        torch.testing.assert_close(free[0], forced[0], rtol=1e-4, atol=1e-5)


def test_reference_is_float64_throughout() -> None:
    family = FAMILIES["llama"]
    model, inputs = cast_parameters(family.build(), torch.bfloat16), family.sample(1, 7, "left")
    reference = reference_outputs(model, inputs)
    assert all(r.dtype == torch.float64 for r in reference)
    assert next(model.parameters()).dtype == torch.bfloat16
    with torch.no_grad():
        error = (tensors_of(model(**inputs))[0] - reference[0]).abs().max()
    assert 1e-4 < error < 1
    with Float64():
        assert torch.ones(2, dtype=torch.bfloat16).float().dtype == torch.float64


def test_command_writes_what_it_found(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "check.json"
    words = ["--check", "--models", "vit", "--dtypes", "float32", "--modes", "static", "--backend", "eager"]
    assert command.main([*words, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["passed"] and found["check"][0]["model"] == "vit" and found["seed"] == 0
    assert {"commit", "versions", "cpu", "python"} <= found.keys()
    assert "pass" in capsys.readouterr().out


def test_broken_promise_of_coverage_fails() -> None:
    kept = {"left": {"flops": 0.0, "bytes": 0.04}, "activations": 0.96}
    result = Result("llama", "float32", "static", ratio=0.5, summaries=[kept])
    assert result.passed
    for left in ({"flops": 0.02, "bytes": 0.0}, {"flops": 0.0, "bytes": 0.06}):
        result.summaries = [kept, kept | {"left": left}]
        assert not result.passed and "left to ATen" in command.why_failed(result) and not result.differs
    result.summaries = [kept, kept | {"activations": 0.9}]
    assert not result.passed and "activation" in command.why_failed(result)
    result.exempt = FAMILIES["mixtral"].exempt
    assert result.passed


def test_check_reports_coverage_of_the_compiler() -> None:
    result = check(FAMILIES["vit"], torch.float32, "static", backend_named("fusec"), shapes=[(1, 4, "none")])
    assert result.passed, (result.reason, result.error, result.uncovered)
    figures = command.largest([result])
    assert figures["kernels"]["generated"] > 0 and figures["activations"] == 1.0
    assert "activations 100.0%" in command.summary_text(result)


def test_unknown_model_is_refused() -> None:
    with pytest.raises(SystemExit, match="unknown model lama"):
        chosen("lama")
