"""The models that fusec is checked on are as transformers loads them, hide nothing, and do not amplify rounding."""

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from bench.numerics import cast_parameters, reference_outputs, tensors_of
from tests.campaigns import check as checking
from tests.campaigns.architectures import Found, architecture_table, line, refusal_table
from tests.campaigns.check import check
from tests.campaigns.zoo import ARCHITECTURES

ROUNDOFF = torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize("name", ["granite", "gpt_neo", "mt5", "nemotron"])
def test_rounding_is_not_amplified(name: str) -> None:
    # Softmaxes that saturate, and norms that double, carry a rounding through the model hundredfold.
    family = ARCHITECTURES[name]
    model, inputs = family.build(), family.sample(3, 40, "left")
    with torch.no_grad():
        found = tensors_of(model(**inputs))[0]
    reference = reference_outputs(model, inputs)[0]
    assert (found - reference).abs().max() < 40 * ROUNDOFF * reference.abs().max()


def test_buffers_have_the_type_they_are_loaded_in() -> None:
    for name, buffer, expected in (
        ("llama", "model.rotary_emb.inv_freq", torch.float32),
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias", torch.float32),
        ("xglm", "model.embed_positions.weights", torch.bfloat16),
        ("bart", "final_logits_bias", torch.bfloat16),
    ):
        model = ARCHITECTURES[name].build().train()
        loaded = cast_parameters(model, torch.bfloat16)
        assert loaded.get_buffer(buffer).dtype == expected, name
        assert all(p.dtype == torch.bfloat16 for p in loaded.parameters()) and loaded.training
        weights = dict(loaded.named_parameters())
        assert all(torch.equal(p.bfloat16(), weights[n]) for n, p in model.named_parameters()), name


def test_reference_takes_limits_of_float64() -> None:
    # XGLM writes the least number of the scores' type into a tensor of the default type.
    family = ARCHITECTURES["xglm"]
    (reference, *_) = reference_outputs(family.build(), family.sample(1, 7, "none"))
    assert reference.dtype == torch.float64 and torch.get_default_dtype() == torch.float32


def test_what_eager_refuses_neither_passes_nor_fails() -> None:
    result = check(ARCHITECTURES["fnet"], torch.bfloat16, "static", "eager", shapes=[(1, 5, "none")])
    assert "Unsupported dtype BFloat16" in result.refused
    assert not result.passed and not result.differs and not result.error


def test_what_eager_never_runs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(runner: Any, inputs: Any) -> str:
        raise RuntimeError("no such size")

    monkeypatch.setattr(checking, "_run", raises)
    result = check(ARCHITECTURES["fnet"], torch.bfloat16, "static", "eager", shapes=[(1, 5, "none")])
    assert "no such size" in result.error and not result.refused and not result.passed


def test_to_compute_what_eager_refuses_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(model: nn.Module, backend: Any, dynamic: bool | None = None) -> Any:
        return lambda **inputs: torch.zeros(1)

    monkeypatch.setattr(checking, "compiled_with", lenient)
    result = check(ARCHITECTURES["fnet"], torch.bfloat16, "static", "eager", shapes=[(1, 5, "none")])
    assert result.differs and "eager refuses" in result.reason


def test_refusals_are_shown_apart() -> None:
    kept = Found("fnet", "float32")
    refused = Found("fnet", "bfloat16", refused="RuntimeError: no such type")
    assert kept.passed and not refused.passed and not refused.failed
    assert "eager refuses: RuntimeError" in line(refused) and "FAIL" not in line(refused)
    cells = [cell for column in architecture_table([kept, refused]).columns for cell in column.cells]
    assert "[green]pass[/]" in cells
    assert [cell for column in refusal_table([kept, refused]).columns for cell in column.cells] == [
        "fnet", "bfloat16", "RuntimeError: no such type",
    ]  # fmt: skip
    assert Found("fnet", "float32", crash="out of order").failed
