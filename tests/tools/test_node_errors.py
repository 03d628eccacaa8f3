"""Errors of nodes against float64, which ``verify`` records."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusec
from fusec.debug import node_errors
from fusec.debug.explain import explain
from tests.tools.sample import unpacked

VERIFY = {"verify": True}


def relative(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_of_the_last_kernel_is_that_of_the_model(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64)).to(dtype).eval(), torch.randn(8, 32)
    x = x.to(dtype)
    with torch.no_grad():
        found = explain(model, x, options=VERIFY)
        compiled, eager = torch.compile(model, backend="fusec")(x), model(x)
        reference = model.double()(x.double())
    (subject,) = found.subjects
    last = subject.errors[subject.final.outputs[0].producer]
    assert last.compiled == pytest.approx(relative(compiled, reference), rel=1e-6)
    assert 0.25 < last.eager / relative(eager, reference) < 4  # eager computes GELU and LayerNorm in float32 as a whole
    assert max(row.error or 0.0 for row in found.kernels) == max(e.compiled for e in subject.errors.values())


def test_the_error_is_recorded_where_it_arises() -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x, -1), torch.softmax((y + 1e6) - 1e6, -1)  # cancellation

    (subject,) = explain(model, torch.randn(8, 16), torch.randn(24, 32), options=VERIFY).subjects
    first, last = (subject.errors[v.producer].compiled for v in subject.final.outputs if v.producer)
    assert first < 1e-6 and last > 1e-3


def test_arguments_stay_as_they_are_and_values_that_are_overwritten_have_no_error() -> None:
    def model(cache: Tensor, x: Tensor) -> Tensor:
        cache.add_(1.0)
        return torch.softmax(x + cache, -1)

    cache = torch.zeros(4, 8)
    with torch.no_grad():
        (subject,) = explain(model, cache, torch.randn(4, 8), options=VERIFY).subjects
    assert cache.eq(1.0).all() and subject.errors
    assert all(e.compiled < 1e-6 for e in subject.errors.values())


def test_the_page_offers_the_error_as_heat() -> None:
    data = unpacked(fusec.view(torch.nn.Softmax(-1), torch.randn(4, 8), options=VERIFY))["graphs"][0]
    (kernel,) = data["reports"][0]["kernels"]
    assert [r["error"]["compiled"] for r in data["records"] if "error" in r] == [kernel["error"]]


def test_errors_that_cannot_be_found_are_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(node_errors, "_program", fail)
    found = explain(torch.nn.Softmax(-1), torch.randn(4, 8), options=VERIFY)
    (remark,) = [r for r in found.remarks if r.pass_name == "verify"]
    assert remark.reason == "RuntimeError: no memory" and not found.subjects[0].errors
    assert all(row.error is None for row in found.kernels)
