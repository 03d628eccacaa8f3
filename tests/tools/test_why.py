"""``why``: a fusion at a place is fused, or the nearest attempt is named with its obstacle and a code."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusec.cli import app
from fusec.debug.capture import compile_model
from fusec.debug.finding_table import finding_view
from fusec.debug.reasons import REASONS, code_of_text
from fusec.debug.text import as_text
from fusec.debug.why import Finding, UnknownPlace, why
from fusec.models import llama
from fusec.models.inputs import sample_tokens
from fusec.remarks import Remark
from fusec.rewriting.match import OTHER, SAME
from tests.tools.command_line import CliRunner
from tests.tools.sample import decoder


class Norm(nn.Module):
    """A norm that ``forward`` computes; a subclass breaks it."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.compute = nn.Parameter(torch.randn(16)), compute

    def forward(self, x: Tensor) -> Any:
        return self.compute(x, self.weight)


class Model(nn.Module):
    """A module ``norm`` inside of a model."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.norm = Norm(compute)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def gated(x: Tensor, weight: Tensor) -> Tensor:
    return F.silu(x * weight) * x


def findings(compute: Callable[[Tensor, Tensor], Any], what: str, at: str = "", dtype: Any = None) -> list[Finding]:
    torch._dynamo.reset()
    model = Model(compute).eval().to(dtype or torch.float32)
    subjects = compile_model(model, (torch.randn(4, 16, dtype=dtype or torch.float32),))
    return why(subjects, model, what, at)


def outcome(finding: Finding) -> tuple[str, str]:
    return finding.status, finding.code


def test_what_is_fused_names_its_kernel() -> None:
    (norm,) = findings(rms, "rms_norm")
    assert outcome(norm) == ("fused", "") and norm.kernels == ("rms_norm",) and norm.where.startswith("norm, ")
    (site,) = findings(rms, "norm", "norm")
    assert outcome(site) == ("fused", "") and site.reason == "rms_norm"


def test_a_call_on_the_same_line_does_not_run_a_fusion() -> None:
    (norm,) = findings(lambda x, w: torch.logcumsumexp(rms(x, w), 0), "rms_norm")
    assert outcome(norm) == ("fused", "") and norm.kernels == ("rms_norm",)
    (norm,) = findings(lambda x, w: torch.logcumsumexp(F.rms_norm(x, (16,), w), 0), "rms_norm")
    assert outcome(norm) == ("fused", "") and norm.kernels == ("rms_norm",)


MISSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str, str, str, str]] = {
    "constant": (lambda x, w: x * torch.sigmoid(x * 1.5), "silu", "missed", "", ""),
    "another dim": (
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * w, "rms_norm", "unnamed", "", "",
    ),
    "eps outside of the root": (
        lambda x, w: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * w,
        "rms_norm", "unnamed", "operation", "eps inside",
    ),
    "none of its operations": (lambda x, w: x + w, "rms_norm", "absent", "operation", "needs .*rsqrt"),
    "no such site": (lambda x, w: x + w, "attention", "absent", "operation", "no module here is such a site"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSES)
def test_what_is_missed_has_a_reason(name: str) -> None:
    compute, what, status, code, reason = MISSES[name]
    first, *_ = findings(compute, what)
    assert first.what == what and first.status == status
    assert first.code == code if code else first.code in {r.code for r in REASONS}
    assert re.search(reason, first.reason) and first.where


@pytest.mark.parametrize(
    "compute",
    [lambda x, w: x / x.norm(dim=-1, keepdim=True), lambda x, w: torch.relu(x) * w, lambda x, w: torch.sigmoid(x) * w],
    ids=["L2 norm", "ReGLU", "GLU"],
)
def test_a_kernel_of_no_declared_fusion_is_said_to_be_one(compute: Callable[[Tensor, Tensor], Any]) -> None:
    (kernel,) = [v for v in findings(compute, "everything") if v.what != "norm"] or findings(compute, "norm")
    assert outcome(kernel) == ("unnamed", "operation") and "a general kernel" in kernel.reason
    assert len(kernel.kernels) == 1 and kernel.where.startswith("norm") and not kernel.attempt


def test_attention_that_is_written_out_is_fused_by_grouping() -> None:
    def heads(x: Tensor, weight: Tensor) -> Tensor:
        h = x.reshape(1, 2, 2, 16)
        return torch.softmax(h @ h.mT, -1) @ h * weight

    (attention,) = findings(heads, "attention")
    assert outcome(attention) == ("fused", "") and attention.kernels == ("attention",)


def test_a_fusion_inside_another_that_is_missed_says_why() -> None:
    (swiglu,) = findings(lambda x, w: x * torch.sigmoid(1.3 * x) * w, "swiglu")
    assert outcome(swiglu) == ("missed", "operand") and "expected silu" in swiglu.reason
    assert "of silu, all 2 operations match" in swiglu.reason
    assert "edit    none is known" in as_text(finding_view([swiglu]))


@pytest.mark.parametrize("heads", [False, True])
def test_another_reader_is_named(heads: bool) -> None:
    """The edit does not suffice where attention of a matrix with itself is none that a kernel computes."""

    def twice(x: Tensor, weight: Tensor) -> Any:
        h = x.reshape(1, 2, 2, 16) if heads else x
        probabilities = torch.softmax(h @ h.mT, -1)
        return probabilities @ h, probabilities

    first = next(v for v in findings(twice, "everything") if v.code == "returned")
    edit = ("return only the result of the second matmul", SAME) if heads else ("", "")
    assert first.status == "missed" and (first.edit, first.tried) == edit


def test_operations_that_are_left_to_aten() -> None:
    (cumulated,) = [
        v for v in findings(lambda x, w: torch.logcumsumexp(x * w, -1), "everything") if v.status == "opaque"
    ]
    assert cumulated.what == "aten.logcumsumexp.default" and cumulated.code == "opaque"
    assert cumulated.reason == "fusec does not model this operation" and "cumsum" in cumulated.text


def test_kernels_and_their_operations() -> None:
    (kernel,) = findings(rms, "kernel", "norm")
    assert kernel.what == "rms_norm" and kernel.kernels == ("generated",) and "rsqrt" in kernel.reason


def test_places_are_modules_lines_patterns_and_nodes() -> None:
    torch._dynamo.reset()
    model = llama.Llama(llama.PRESETS["tiny"]).eval()
    subjects = compile_model(model, (sample_tokens(32, 2, 20),))
    whole = why(subjects, model, "rms_norm")
    assert sum(v.count for v in whole) >= 1 and {v.status for v in whole} == {"fused"}
    names = [n for n, m in model.named_modules() if n and "norm" in type(m).__name__.lower()]
    assert all(outcome(v) == ("fused", "") for name in names for v in why(subjects, model, "norm", name))
    assert sum(v.count for v in why(subjects, model, "norm", "*layers*")) == 4
    places = {str(s) for n in subjects[0].final.nodes for s in n.sources if s.file}
    line = max(places).rpartition("/")[2]
    assert why(subjects, model, "kernel", line)
    node = next(n for n in subjects[0].final.nodes if "fusions" in n.attributes and n.results[0].name)
    assert why(subjects, model, "kernel", f"%{node.results[0].name}")


def test_equal_findings_are_merged() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(*(Model(gated) for _ in range(3))).eval()
    (finding,) = why(compile_model(model, (torch.randn(4, 16),)), model, "silu")
    assert finding.count == 3


@pytest.mark.parametrize(
    ("what", "at", "fix"), [("swigloo", "", "swiglu"), ("silu", "nrm", "norm"), ("silu", "x.py:3", "")]
)
def test_unknown_names_have_close_matches(what: str, at: str, fix: str) -> None:
    with pytest.raises(UnknownPlace) as error:
        findings(gated, what, at)
    assert fix in str(error.value)


def test_edits_say_whether_they_change_what_is_computed() -> None:
    (outside,) = findings(MISSES["eps outside of the root"][0], "rms_norm")
    assert not outside.edit and outside.tried.startswith("move `add`") and outside.tried.endswith(OTHER)
    scaled = findings(lambda x, w: x * 1.5 * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, "rms_norm")
    assert [f.tried for f in scaled if f.edit.startswith("move `mul` with 1.5 out of rms_norm at test_why.py:")] == [
        SAME
    ]


def test_a_kind_of_site_has_the_misses_of_its_fusions() -> None:
    """The module's name does not say that it is a norm."""

    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return MISSES["eps outside of the root"][0](x, x[0])

    torch._dynamo.reset()
    model = nn.Sequential(Scale()).eval()
    (found,) = why(compile_model(model, (torch.randn(4, 16),)), model, "norm", "0")
    assert outcome(found) == ("unnamed", "operation") and found.what == "rms_norm"
    assert found.tried.startswith("move `add` with eps inside")


def test_the_code_of_a_miss_is_that_of_its_clause() -> None:
    """Not that of a word in what it expected."""
    torch._dynamo.reset()
    (subject,) = compile_model(Model(rms).eval(), (torch.randn(4, 16),))
    figures: Any = {
        "clause": "constant",
        "depth": 3,
        "size": 4,
        "expected": "1 as in `softmax`",
        "found": "2",
        "text": "",
    }
    subject.remarks = [
        Remark("missed", "fuse", "softmax nearly matched", "softmax", "as in `softmax`", figures=figures)
    ]
    assert [outcome(found) for found in why([subject], None, "softmax")] == [("missed", "constant")]


def test_every_reason_in_the_sources_has_a_code() -> None:
    summaries = {"7: 7", "no generated attention", "no generated GEMM"}
    texts = {re.sub(r"\{[^}]*\}", "7", text) for text in _reasons()} - summaries
    assert len(texts) > 50
    others = [text for text in texts if code_of_text(text) == "other"]
    assert not others, others


def _reasons() -> Iterator[str]:
    """The texts of refusals in the compiler."""
    root = Path(__file__).parents[2]
    said = re.compile(r'(?:Refusal\(|_refused\(|ScheduleError\(|NotAffine\(|yield )\(?f?"([^"]{8,})"')
    for folder in ("passes/grouping", "passes/decompose_sdpa.py", "fusec/loops", "codegen/cpp/legality.py"):
        path = root / folder
        for file in [path] if path.is_file() else path.rglob("*.py"):
            yield from said.findall(file.read_text())


def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text(
        "import torch\n"
        "def model(x, w):\n"
        "    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * w\n"
        "def inputs():\n"
        "    return torch.randn(4, 16), torch.randn(16)\n"
    )
    shown = CliRunner().invoke(app, ["why", str(script), "rms_norm", "model.py:3"])
    assert shown.exit_code == 0 and "rms_norm  unnamed" in shown.stdout and "mean(-1, keepdim=True)" in shown.stdout
    data = CliRunner().invoke(app, ["why", str(script), "rms_norm", "--json"])
    assert json.loads(data.stdout)[0]["status"] == "unnamed"
    wrong = CliRunner().invoke(app, ["why", str(script), "rms_nrm"])
    assert wrong.exit_code == 3 and "rms_norm" in wrong.output


def test_a_process_that_compiles_nothing_knows_the_fusions(tmp_path: Path) -> None:
    graph = tmp_path / "graph.fir"
    graph.write_text(str(decoder(1)))
    command = [sys.executable, "-m", "fusec", "why", str(graph), "layer_norm"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("layer_norm  absent")


def test_a_graph_has_no_sites() -> None:
    subjects = compile_model(lambda x: x.softmax(-1), [torch.randn(4, 16)])
    (found,) = why(subjects, None, "norm")
    assert (found.status, found.reason) == ("absent", "sites are found from modules, and none is known")


def test_every_code_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "debugging.md").read_text()
    assert all(f"| `{reason.code}` | {reason.meaning} |" in text for reason in REASONS)
