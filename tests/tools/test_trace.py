"""``trace``: each compile of a program as files, read back as the compile was, also after a crash."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fusec.cli import app
from fusec.debug.explain import explain_subjects
from fusec.debug.site_status import site_statuses
from fusec.debug.subject import subject_of
from fusec.debug.text import as_text
from fusec.debug.trace_table import trace_data, trace_view
from fusec.debug.traces import NoTrace, Trace, read_trace
from fusec.debug.why import why
from fusec.dynamo import compiled_graphs
from fusec.viz.html import render
from tests.tools.command_line import CliRunner
from tests.tools.sample import packed, unpacked

PROGRAM = """
import sys, torch
from torch import nn

def function(x):
    y = torch.softmax(x * 2, -1)
    print("in between")
    return torch.cumsum(y + 1, 0)

compiled = torch.compile(function, backend="fusec")
with torch.no_grad():
    compiled(torch.randn(4, 16)), compiled(torch.randn(5, 16))
sys.exit(len(sys.argv))
"""

FULL_DISK = """
import errno, pathlib, torch
write = pathlib.Path.write_text

def full(path, *args, **keywords):
    if path.name == {!r}:
        raise OSError(errno.ENOSPC, "No space left on device")
    return write(path, *args, **keywords)

pathlib.Path.write_text = full
torch.compile(torch.sin, backend="fusec")(torch.randn(4))
"""


def test_a_compile_is_read_back_as_it_was(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16), nn.GELU(), nn.Softmax(-1)).eval()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend="fusec", options={"trace": str(tmp_path / "t")})(torch.randn(4, 16))
    (compiled,) = compiled_graphs()
    (read,) = (trace := read_trace(tmp_path / "t")).subjects
    there, here = explain_subjects([read]), explain_subjects([subject_of(compiled)])
    first, second = ({**e.to_json(), "pass_seconds": 0, "title": ""} for e in (there, here))
    assert json.dumps(first, default=str) == json.dumps(second, default=str)
    assert str(read.final) == str(compiled.graph) and str(read.imported) == str(compiled.imported)
    assert [r.after for r in read.records if r.changed] == [r.after for r in compiled.records if r.changed]
    texts = [render(e) for e in (there, here)]
    pages = [unpacked(text)["graphs"][0] for text in texts]
    changed = [[[len(s[kind]) for kind in ("nodes", "added", "removed")] for s in page["states"]] for page in pages]
    assert changed[0] == changed[1]
    assert [p.get("numbers") for p in pages[0]["passes"]] == [p.get("numbers") for p in pages[1]["passes"]]
    lives = [
        [sorted(history["lives"].values()) for history in packed(text, "parts") if "lives" in history] for text in texts
    ]
    assert lives[0] == lives[1] != []
    assert [f.status for f in why([read], None, "rms_norm")] == ["fused"]
    (compile,) = trace.compiles
    assert compile.state == "done" and compile.seconds > 0
    assert {path.suffix for path in (compile.path / "kernels").iterdir()} == {".cpp"}


def test_a_compile_without_kernels_is_read(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch.compile(torch.sin, backend="fusec", options={"trace": str(tmp_path / "t"), "disable": "group"})(torch.ones(4))
    (read,) = read_trace(tmp_path / "t").subjects
    assert [step.generated for step in read.steps.values()] == [False]


def test_a_program_with_recompiles_and_graph_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Artifacts go to torch's own trace as well, where there is one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_TRACE", str(tmp_path / "torch"))
    Path("program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "fusec", "trace", "-o", "t", "program.py", "--flag", "1"]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 3, done.stderr  # as the program's
    assert "size mismatch at index 0. expected 4, actual 5" in done.stdout and "program.py:7" in done.stdout
    trace = read_trace(Path("t"))
    assert len(trace.subjects) == 4 and len(trace.of("recompile")) == 2 and len(trace.of("graph break")) >= 1
    data = trace_data(trace)
    assert len(data["recompiles"]) == 2 and data["graph_breaks"] and not data["fallbacks"]
    assert [(row["state"], row["generated"] > 0 or row["opaque"] > 0) for row in data["compiles"]] == [
        ("done", True)
    ] * 4
    shown = CliRunner().invoke(app, ["explain", "t"])
    assert shown.exit_code == 0 and "4 graphs" in shown.stdout
    several = Trace([], [{"kind": "recompile", "text": json.dumps(["0/1: size 5", "0/0: size 4"])}])
    assert as_text(trace_view(several), 80).rstrip().endswith("Recompiles: 0/1: size 5\n  0/0: size 4")
    assert CliRunner().invoke(app, ["explain", "t", "--train"]).exit_code == 2
    assert CliRunner().invoke(app, ["explain", "t", "--time"]).exit_code == 2
    assert CliRunner().invoke(app, ["kernels", "edit", "t", "softmax"]).exit_code == 2
    assert CliRunner().invoke(app, ["view", "t", "-o", "t.html"]).exit_code == 0 and Path("t.html").stat().st_size > 1e4
    text = "".join(path.read_text() for path in (tmp_path / "torch").rglob("*") if path.is_file())
    assert all(f"fusec_{name}" in text for name in ("final_graph", "kernels", "remarks"))
    assert "cumsum" in text and 'extern "C"' in text


def traced_crash(trace: Trace, state: str) -> None:
    (compile,) = trace.compiles
    assert compile.state == state and compile.subject is None and "sin(" in (compile.path / "imported.fir").read_text()
    assert ("KeyError: 'missing'" in compile.error) == (state == "failed") == bool(trace.of("fallback"))
    assert state in as_text(trace_view(trace))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), nn.RMSNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


@pytest.mark.parametrize("in_place", [False, True])
def test_the_sites_of_the_model(in_place: bool, tmp_path: Path) -> None:
    """Of the one that is called, and not of one whose call reaches it, in traces, reports and their pages."""
    model = Normed().eval()
    options = {"trace": str(tmp_path / "t"), "report": str(tmp_path / "r.json")}
    torch._dynamo.reset()
    if in_place:
        model.compile(backend="fusec", options=options)
    called = nn.Sequential(model if in_place else torch.compile(model, backend="fusec", options=options))
    with torch.no_grad():
        called(torch.randn(4, 16))
    read = read_trace(tmp_path / "t").subjects
    (found,) = why(read, None, "norm")
    assert (found.where, found.status) == ("norm", "fused")
    sites = [site.to_json() for site in site_statuses(model, read)]
    assert json.loads(json.dumps(sites)) == json.loads((tmp_path / "r.json").read_text())["sites"]
    assert [site.to_json() for site in explain_subjects(read).sites] == sites


def test_a_model_whose_sites_cannot_be_found_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fusec.dynamo.called_module", lambda: 1 / 0)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Normed(), backend="fusec", options={"trace": str(tmp_path / "t")})(torch.randn(4, 16))
    assert "the sites of the model are not in the trace" in caplog.text
    assert [subject.sites for subject in read_trace(tmp_path / "t").subjects] == [()]


def test_a_crash_leaves_the_graph(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text(
        "import os, torch\nfrom fusec.codegen.program import program\n"
        "program.build_program = lambda *a: os._exit(9)\n"
        'torch.compile(lambda x: torch.sin(x) + 1, backend="fusec")(torch.randn(4))\n'
    )
    environment = {**os.environ, "FUSEC_TRACE": str(tmp_path / "t")}
    subprocess.run([sys.executable, str(script)], env=environment, check=False, capture_output=True)
    traced_crash(read_trace(tmp_path / "t"), "running")


def test_an_error_leaves_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusec.codegen.program.program.build_program", lambda *_: {}["missing"])
    torch._dynamo.reset()
    options = {"trace": str(tmp_path / "t")}
    torch.compile(lambda x: torch.sin(x) + 1, backend="fusec", options=options)(torch.randn(4))
    traced_crash(read_trace(tmp_path / "t"), "failed")


def test_a_trace_that_cannot_be_written_fails_no_compile(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    x = torch.randn(4)
    found = torch.compile(torch.sin, backend="fusec", options={"trace": "/dev/full/trace"})(x)
    torch.testing.assert_close(found, torch.sin(x))
    assert "the trace is incomplete" in caplog.text


def test_a_trace_that_raises_fails_no_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr("fusec.tracing._Compile.done", broken)
    torch._dynamo.reset()
    x = torch.randn(4)
    found = torch.compile(torch.sin, backend="fusec", options={"trace": str(tmp_path / "t"), "strict": True})(x)
    torch.testing.assert_close(found, torch.sin(x))
    assert [compile.state for compile in read_trace(tmp_path / "t").compiles] == ["running"]


def test_wrong_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoTrace, match="there is no such folder"):
        read_trace(tmp_path / "missing")
    Path("nothing.py").write_text("print('hello')\n")
    assert CliRunner().invoke(app, ["trace", "missing.py"]).exit_code == 2
    assert CliRunner().invoke(app, ["trace", "-o", str(tmp_path), "nothing.py"]).exit_code == 2
    nothing = CliRunner().invoke(app, ["trace", "-o", "t", "nothing.py"])
    assert nothing.exit_code == 0 and "nothing was compiled" in nothing.output
    data = json.loads(CliRunner().invoke(app, ["trace", "--json", "-o", "t", "nothing.py"]).stdout)
    lists = ("compiles", "recompiles", "graph_breaks", "fallbacks")
    assert data == {"folder": "t", "exit_code": 0, **{name: [] for name in lists}}
    assert CliRunner().invoke(app, ["explain", str(tmp_path)]).exit_code == 3


def test_nodes_are_numbered_as_they_are_read_back(tmp_path: Path) -> None:
    """Equal numbers are one node there."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return ((torch.exp(x * 3.0) + 1e-6) * 2.0 - torch.sin(x * 3.0 + 1e-6)) * 2.0

    torch._dynamo.reset()
    options = {"trace": str(tmp_path / "t"), "apply": "!0.."}
    torch.compile(function, backend="fusec", options=options)(torch.randn(4))
    (compiled,) = compiled_graphs()
    (read,) = read_trace(tmp_path / "t").subjects
    assert len(read.final) < len(compiled.graph)
    assert [(n.op.name, s.name) for n, s in read.steps.items()] == [
        (s.node.op.name, s.name) for s in compiled.program.steps if s.kind == "interpreted"
    ]


@pytest.mark.parametrize(
    ("lost", "said"), [("imported.fir", "has no compile"), ("final.fir", "could not be written: 1")]
)
def test_a_disk_that_is_full(lost: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(FULL_DISK.format(lost))
    done = CliRunner().invoke(app, ["trace", "-o", "t", "program.py"])
    assert done.exit_code == 0 and said in done.output and "fusec view" not in done.output
