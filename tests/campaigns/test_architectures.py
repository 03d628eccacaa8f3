"""What is promised of which architectures, and how those are shown that have less."""

from dataclasses import replace

import pytest
import torch
from rich.table import Table

pytest.importorskip("transformers")

from tests.campaigns.architectures import Found, architecture_table, exempt_table, line
from tests.campaigns.check import check
from tests.campaigns.zoo import ARCHITECTURES

SITE = {"kind": "norm", "module": "", "parts": [], "fused": False, "bytes_lost": 0, "reason": "", "edit": None}
FOURIER = ARCHITECTURES["fnet"].exempt


def cells(table: Table) -> list[object]:
    return [cell for column in table.columns for cell in column.cells]


def test_a_family_says_what_is_not_promised_of_it() -> None:
    assert "a Fourier transform takes attention's place" in FOURIER
    assert ARCHITECTURES["mixtral"].exempt == "a router chooses experts"
    exempt = {name for name, family in ARCHITECTURES.items() if family.exempt}
    assert exempt == {"fnet", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_moe"}


def test_promise_of_dense_transformers_leaves_out_what_says_so() -> None:
    dense = Found("fnet", "float32", opaque={"flops": 0.0, "bytes": 0.3}, fallbacks={"aten._fft_c2c.default": 2})
    found = replace(dense, exempt=FOURIER)
    assert dense.failed and not dense.left_out
    assert found.passed and found.left_out and found.to_json()["left_out"]
    assert replace(found, opaque={}, sites=[SITE]).left_out and not replace(found, opaque={}).left_out
    for broken in (replace(found, wrong="1.2"), replace(found, crash="no"), replace(found, breaks=["print"])):
        assert broken.failed and not broken.passed


def test_what_is_left_out_is_shown_with_its_reason() -> None:
    rows = [
        Found("fnet", "float32", FOURIER, opaque={"flops": 0.0, "bytes": 0.3}, fallbacks={"aten._fft_c2c.default": 2}),
        Found("fnet", "bfloat16", FOURIER, refused="RuntimeError: no such type"),
        Found("mixtral", "float32", ARCHITECTURES["mixtral"].exempt, opaque={"flops": 0.0, "bytes": 0.0}),
    ]
    assert cells(exempt_table(rows)) == ["fnet", "float32", FOURIER, "0.0%", "30.0%", "", "_fft_c2c"]
    assert "pass" not in line(rows[0]) and FOURIER in line(rows[0]) and "30.0%" in line(rows[0])
    shown = cells(architecture_table(rows[:2]))
    assert "[yellow]exempt[/]" in shown and "30.0%" in shown and "[green]pass[/]" not in shown
    assert "[green]pass[/]" in cells(architecture_table(rows[2:]))


@pytest.mark.parametrize("name", ["fnet", "llama"])
def test_check_knows_what_is_not_promised(name: str) -> None:
    result = check(ARCHITECTURES[name], torch.float32, "static", "eager", shapes=[(1, 5, "none")])
    result.summaries = [{"left": {"flops": 0.0, "bytes": 0.3}, "activations": 0.5}]
    assert result.passed == (name == "fnet") and bool(result.uncovered) == (name == "llama")
    result.reason = "wrong"
    assert not result.passed and result.differs


def test_sites_are_written_where_they_are_missed_without_empty_fields() -> None:
    found = Found("llama", "float32", sites=[SITE, SITE | {"fused": True}])
    assert found.to_json()["sites"] == [{"kind": "norm", "fused": False, "bytes_lost": 0}]
    assert found.to_json()["fused"] == {"norm": 1} and found.sites[0] == SITE
