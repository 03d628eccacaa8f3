"""A model against the report of an earlier compile of it, and against expectations."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusec
from fusec.debug.compare import changes, report_of
from fusec.debug.expect import Unexpected
from fusec.debug.explain import explain
from fusec.models import llama
from fusec.models.inputs import sample_tokens
from tests.tools.test_cli import run

SCRIPT = """
import torch

class RMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

class Other(RMSNorm):
    def forward(self, x):
        return FORMULA

model = torch.nn.Sequential(RMSNorm(), torch.nn.Linear(16, 16), Other())
inputs = (torch.randn(4, 16),)
"""
NORM = "super().forward(x)"
EPS_OUTSIDE = "x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * self.weight"
RUNNING_MAXIMA = "x * torch.rsqrt(torch.cummax(x.pow(2), -1).values.mean(-1, keepdim=True) + 1e-6) * self.weight"
LEFT_TO_ATEN = "torch.cummax(super().forward(x), -1).values"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, str]:
    """A model, and the report of it."""
    script, report = tmp_path / "model.py", str(tmp_path / "fused.json")
    script.write_text(SCRIPT.replace("FORMULA", NORM))
    assert run("check", str(script), "--against", report, "--update").exit_code == 0
    return script, report


def test_an_unchanged_model_is_the_same(files: tuple[Path, str]) -> None:
    result = run("check", str(files[0]), "--against", files[1])
    assert result.exit_code == 0 and result.stdout == "the same sites, fusions, launches and bytes\n"


def test_a_lost_site_is_named_with_the_reason(files: tuple[Path, str]) -> None:
    script, report = files
    script.write_text(SCRIPT.replace("FORMULA", RUNNING_MAXIMA))
    result = run("check", str(script), "--against", report)
    assert result.exit_code == 1 and result.stdout.startswith("1 site lost; first: norm 2\n- site lost: norm 2 (")
    assert "cummax" in result.stdout.splitlines()[1]


def test_a_lost_fusion_is_named(files: tuple[Path, str]) -> None:
    script, report = files
    script.write_text(SCRIPT.replace("FORMULA", EPS_OUTSIDE))
    result = run("check", str(script), "--against", report)
    assert result.exit_code == 1 and "--update writes" in result.stderr
    assert "fusion rms_norm: 2 → 1" in result.stdout
    (change,) = [c for c in json.loads(run("check", str(script), "--against", report, "--json").stdout) if c["worse"]]
    assert (change["what"], change["before"], change["after"]) == ("fusion", 2, 1)
    gained = run("diff", str(script), report)
    assert gained.exit_code == 0 and gained.stdout == "+ fusion rms_norm: 1 → 2\n"


def test_what_is_left_to_aten_is_worse(files: tuple[Path, str]) -> None:
    script, report = files
    script.write_text(SCRIPT.replace("FORMULA", LEFT_TO_ATEN))
    result = run("check", str(script), "--against", report)
    assert (
        result.exit_code == 1 and "- ATen calls: 0 → 1" in result.stdout and "- coverage opaque: 0.0%" in result.stdout
    )


def test_two_models_have_their_predicted_times_compared(files: tuple[Path, str]) -> None:
    other = files[0].with_name("other.py")
    other.write_text(files[0].read_text().replace("16", "256"))
    done = run("diff", str(files[0]), str(other))
    assert re.search(r"^- predicted time on .*: [\d.]+ µs → [\d.]+ µs$", done.stdout, re.MULTILINE), done.output
    (time,) = [c for c in json.loads(run("diff", str(other), str(files[0]), "--json").stdout) if c["what"] == "time"]
    assert time["before"] > time["after"] > 0 and not time["worse"]
    assert "predicted time" not in run("diff", str(other), files[1]).stdout


def test_a_report_with_other_options_is_refused(files: tuple[Path, str]) -> None:
    result = run("check", str(files[0]), "--against", files[1], "--batch", "3", "--dynamic")
    assert result.exit_code == 2 and "give --batch 2 --length 16, or --update it" in " ".join(result.stderr.split())
    run("check", str(files[0]), "--against", files[1], "--update", "--dynamic")
    assert "give --dynamic --batch 2" in " ".join(run("check", str(files[0]), "--against", files[1]).stderr.split())


WITHOUT_REASON = """{"regions": {}, "launches": {"generated": 1, "vendor": 0, "opaque": 0}, "kernels": [],
"coverage": {"bytes": {"generated": 1, "vendor": 0, "opaque": 0}}, "sites": SITES, "options": OPTIONS}"""


@pytest.mark.parametrize("text", [
    "", "{}", "[1]", '{"sites": 3}', "graph",
    WITHOUT_REASON.replace("SITES", '[{"kind": "norm", "module": "", "fused": true}]').replace("OPTIONS", "{}"),
    WITHOUT_REASON.replace("SITES", "[]").replace("OPTIONS", "[]"),
])  # fmt: skip
def test_what_is_no_report_is_said(files: tuple[Path, str], text: str) -> None:
    Path(files[1]).write_text(text)
    for words in (("check", str(files[0]), "--against", files[1]), ("diff", files[1], files[1])):
        result = run(*words)
        assert result.exit_code == 2 and "is no report" in result.stderr and len(result.stderr) < 1000


def test_a_site_is_lost_where_it_is_not_fused_or_gone() -> None:
    site = {"kind": "norm", "module": "n", "fused": True, "reason": ""}
    rest = report_of(explain(lambda x: x + 1, torch.ones(4)))
    before = {**rest, "sites": [site, {**site, "module": "gone"}, {**site, "module": "kept"}]}
    after = {**rest, "sites": [{**site, "fused": False, "reason": "two readers"}, {**site, "module": "kept"}]}
    assert [str(change) for change in changes(before, after)] == [
        "site lost: norm n (two readers)", "site lost: norm gone (it is not in the model any more)"
    ]  # fmt: skip
    assert [change.worse for change in changes(after, before)] == [False, False]


def test_bytes_within_the_tolerance_are_the_same() -> None:
    before = report_of(explain(lambda x: x + 1, torch.ones(100)))
    after = report_of(explain(lambda x: x + 1, torch.ones(102)))
    assert not changes(before, after, 0.05)
    assert [(change.what, change.worse) for change in changes(before, after, 0.01)] == [("bytes", True)]


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return nn.functional.silu(self.gate(x)) * self.up(x)


def test_expectations_that_hold() -> None:
    found = fusec.expect(Gate(), torch.randn(4, 16), fused=["norm", "rms_norm"], opaque=0)
    assert found.launches("opaque") == 0


def test_a_fusion_inside_a_larger_one_is_as_expected() -> None:
    """As the documentation says of a Llama."""
    model = llama.Llama(llama.PRESETS["tiny"]).eval()
    found = fusec.expect(model, sample_tokens(512, 2, 16), fused=["norm", "attention", "swiglu"], opaque=0)
    assert "swiglu" not in found.regions


def report_with(regions: dict[str, int], **launches: int) -> dict[str, Any]:
    kernels = [{"name": n, "kind": "generated", "launches": m, "bytes": 8} for n, m in launches.items()]
    counts = {"generated": len(kernels), "vendor": 0, "opaque": 0}
    shares = {"bytes": {"generated": 1.0, "vendor": 0.0, "opaque": 0.0}}
    return {"regions": regions, "sites": [], "kernels": kernels, "launches": counts, "coverage": shares}


def worse(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    from fusec.debug.compare import changes

    return [(change.what, change.name) for change in changes(before, after) if change.worse]


def test_a_softmax_that_is_now_inside_attention_is_not_lost() -> None:
    one = {"scaled_softmax": 1}
    split, whole = report_with(one, scaled_softmax=1, linear=2), report_with(one, attention=1)
    assert not worse(split, whole)
    assert worse(whole, split)[0] == ("kernels", "of attention")
    assert worse(split, report_with(one, linear=2))
    both = {"scaled_softmax": 1, "softmax": 1}
    two = report_with(both, scaled_softmax=1, softmax=1)
    assert worse(two, report_with(both, attention=1)) == [("kernels", "of softmax")]


def test_a_fusion_that_is_now_part_of_a_larger_one_is_not_lost() -> None:
    small, large = {"rms_norm": 2, "silu": 1}, {"add_rms_norm": 2, "silu": 1}
    assert not worse(report_with(small), report_with(large))
    assert worse(report_with(large), report_with(small)) == [("fusion", "add_rms_norm")]
    assert worse(report_with(small), report_with({"add_rms_norm": 1, "silu": 1})) == [("fusion", "rms_norm")]
    assert worse(report_with(small), report_with({"rms_norm": 2, "add_rms_norm": 1})) == [("fusion", "silu")]


def test_expectations_that_do_not_hold() -> None:
    class Sorted(Gate):
        def forward(self, x: Tensor) -> Tensor:
            return torch.kthvalue(super().forward(x), 2).values

    with pytest.raises(AssertionError) as caught:
        fusec.expect(Sorted(), torch.randn(4, 16), fused=["softmax", "atention"], opaque=0, kernels=0)
    assert isinstance(caught.value, Unexpected)
    for said in (
        "softmax: nothing matched",
        "no fusion or kind of site is called 'atention': did you mean attention",
        "1 calls are left to ATen, not 0: aten.kthvalue.default",
        "kernels, not 0",
    ):
        assert said in str(caught.value)
