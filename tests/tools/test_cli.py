"""The command line on small graphs and models: what it writes, and its exit codes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fusec.cache import Cache
from fusec.cli import app
from fusec.config import Config
from fusec.ir.printer import print_graph
from fusec.pass_list import DEFAULT, DESCRIPTIONS
from fusec.passes import default_pipeline, known_passes
from tests.tools.command_line import CliRunner, Result
from tests.tools.sample import decoder, unpacked

SCRIPT = """
import torch

class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x, residual):
        h = x + residual
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

model = Norm()

def inputs():
    return torch.randn(4, 8), torch.randn(4, 8)
"""


def run(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(args), input=stdin)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "norm.py").write_text(SCRIPT)
    return str(tmp_path / "norm.py")


@pytest.fixture
def graph(tmp_path: Path) -> str:
    (tmp_path / "decoder.fir").write_text(print_graph(decoder(1)))
    return str(tmp_path / "decoder.fir")


def test_capture_writes_a_graph_that_opt_reads(script: str, tmp_path: Path) -> None:
    path = str(tmp_path / "norm.fir")
    assert run("capture", script, "-o", path).exit_code == 0
    assert "rsqrt" in Path(path).read_text()
    result = run("opt", path, "--passes", "canonicalize")
    assert result.exit_code == 0 and result.stdout.startswith("graph")


def test_capture_to_standard_output_and_opt_from_standard_input(script: str) -> None:
    text = run("capture", script).stdout
    result = run("opt", "-", "--passes", "canonicalize", stdin=text)
    assert result.exit_code == 0 and "return" in result.stdout


def test_captured_training_has_two_graphs(script: str, tmp_path: Path) -> None:
    result = run("capture", script, "--train", "-o", str(tmp_path / "t.fir"), "--json")
    rows = json.loads(result.stdout)["graphs"]
    assert len(rows) == 2 and all(Path(row["file"]).exists() for row in rows)


def test_options_without_effect_are_refused(script: str, graph: str, tmp_path: Path) -> None:
    for words, said in (
        (("capture", script, "--json"), "needs -o"), (("explain", graph, "--train"), "captured already"),
        (("explain", graph, "--dynamic"), "captured already"),
        (("view", script, "--graph", "-2", "-o", str(tmp_path / "v.html")), "no graph -2"),
        (("view", script, "--json", "-o", "-"), "not the page"),
        (("opt", graph, "--disable", "sofmax"), "did you mean softmax"),
    ):  # fmt: skip
        result = run(*words)
        assert result.exit_code == 2 and said in " ".join(result.stderr.split()), (words, result.stderr)


def test_captured_sizes_are_symbols_when_dynamic(script: str) -> None:
    assert "s" in run("capture", script, "--dynamic", "--no-sources").stdout.partition("f32[")[2][:3]


def test_the_width_of_a_terminal_is_that_of_a_pipe_too(graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = {}
    for columns in (60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        widths[columns] = max(map(len, run("explain", graph).stdout.splitlines()))
    assert 40 < widths[60] <= 60 < widths[100] <= 100


def test_opt_prints_what_changed(graph: str) -> None:
    result = run("opt", graph, "--print", "changed", "--filter", "canonicalize", "--timing")
    assert result.exit_code == 0
    assert "canonicalize" in result.stderr and "total" in result.stderr


def test_printed_graphs_are_without_sources_where_none_are_wanted(graph: str) -> None:
    assert "modeling_small.py" in run("opt", graph, "--print", "diff").stderr
    result = run("opt", graph, "--print", "diff", "--no-sources")
    assert result.exit_code == 0 and "modeling_small.py" not in result.stderr and "@@" in result.stderr


def test_opt_reports_as_json(graph: str) -> None:
    report = json.loads(run("opt", graph, "--json").stdout)
    assert report["passes"] and {"pass", "seconds", "changed", "applications"} <= report["passes"][0].keys()


def test_opt_verifies_each_pass(graph: str) -> None:
    report = json.loads(run("opt", graph, "--passes", "canonicalize", "--verify-each", "--json").stdout)
    assert all(row.get("verified", True) for row in report["passes"])


def test_no_application_is_made_where_none_is_selected(graph: str) -> None:
    report = json.loads(run("opt", graph, "--apply", "!0..", "--json").stdout)
    assert not any(r["kind"] == "passed" and r["application"] is not None for r in report["remarks"])


def test_passes_are_listed() -> None:
    assert "canonicalize" in run("opt", "--list-passes").stdout


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["opt", "GRAPH", "--passes", "canonicalise"], "did you mean canonicalize?"),
        (["opt", "GRAPH", "--print", "chnged"], "did you mean changed?"),
        (["opt", "GRAPH", "--remarks", "mised"], "did you mean missed"),
        (["explain", "models:lama"], "did you mean llama?"),
        (["explain", "models:llama/tyny"], "did you mean tiny?"),
        (["view", "nothing"], "names no model"),
        (["opt", "missing.fir"], "cannot read"),
        (["explane", "x"], "explain"),
        (["capture", "models:llama/tiny", "--batch", "-3"], "equal to 1"),
        (["explain", "models:llama/tiny", "--length", "0"], "equal to 1"),
        (["explain", "GRAPH", "--fail-under", "200"], "equal to 100"),
    ],
)
def test_wrong_names_are_usage_errors_that_name_close_ones(graph: str, args: list[str], hint: str) -> None:
    result = run(*[graph if a == "GRAPH" else a for a in args])
    assert result.exit_code == 2 and hint in result.stderr


def test_text_that_is_no_graph_is_a_usage_error() -> None:
    assert run("opt", "-", stdin="not a graph").exit_code == 2


def test_invalid_graph_ends_with_three() -> None:
    text = print_graph(decoder(1)).replace("f32[16, 1] = rsqrt", "f32[16, 2] = rsqrt", 1)
    assert run("opt", "-", stdin=text).exit_code == 3


def test_a_model_that_leaves_no_graph_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "choice.py").write_text(
        "import torch\ninputs = torch.ones(3)\ndef model(x):\n    return torch.masked_select(x, x > 0) + 1\n"
    )
    for command in ("capture", "explain"):
        with import_module("torch._dynamo.config").patch(capture_dynamic_output_shape_ops=True):
            result = run(command, str(tmp_path / "choice.py"))
        assert result.exit_code == 3 and "masked_select" in result.stderr and result.stderr.count("why:") == 1


def test_script_without_model_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("inputs = ()")
    result = run("capture", str(tmp_path / "empty.py"))
    assert result.exit_code == 2 and "model" in result.stderr


def test_script_whose_model_is_none_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "number.py").write_text("model = 3\ninputs = ()")
    result = run("capture", str(tmp_path / "number.py"))
    assert result.exit_code == 2 and "`model` is of type int" in result.stderr


def test_explain_and_view_of_a_grouped_graph(tmp_path: Path) -> None:
    path = tmp_path / "fused.fir"
    path.write_text(print_graph(decoder(1, fused=True)))
    data = json.loads(run("explain", str(path), "--json").stdout)
    assert data["launches"]["generated"] == 3
    assert run("explain", str(path), "--fail-under", "99.9").exit_code == 1
    result = run("view", str(path), "-o", "-")
    assert result.exit_code == 0 and result.stdout.startswith("<!doctype html>")


def test_explain_and_view_of_a_model(script: str, tmp_path: Path) -> None:
    data = json.loads(run("explain", script, "--json").stdout)
    assert data["launches"]["generated"] == 1 and data["launches"]["opaque"] == 0
    assert "bytes" in run("explain", script).stdout
    assert "norm: 1 fusions" in run("explain", script, "--line").stdout
    page = tmp_path / "norm.html"
    written = run("view", script, "-o", str(page), "--json")
    assert json.loads(written.stdout) == {"file": str(page), "bytes": page.stat().st_size}
    kernels = unpacked(page.read_text(encoding="utf-8"))["graphs"][0]["reports"][0]["kernels"]
    assert [row["name"] for row in kernels] == ["add_rms_norm"]


def test_environment_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"python", "packages", "c++"} <= json.loads(run("env", "--json").stdout).keys()
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path))
    for i, (digit, suffix) in enumerate((("a", ".so"), ("b", ".so"), ("c", ".passes"))):
        path = Cache(tmp_path).publish(digit * 64, suffix, b"content" * 100_000)
        os.utime(path, (i, i))
    (tmp_path / "thesis.txt").write_text("not ours")
    found = json.loads(run("cache", "show", "--json").stdout)
    assert (found["entries"], found["kinds"]["so"]["entries"]) == (3, 2)
    assert "passes" in run("cache", "show").stdout and not found["not_used"]
    tmp_path.chmod(0o777)
    assert "not used: other users may write to it" in run("cache", "show").stdout
    tmp_path.chmod(0o700)
    assert run("cache", "verify").exit_code == 0
    (tmp_path / ("c" * 64 + ".passes")).write_text("damaged")
    bad = run("cache", "verify", "--json")
    assert bad.exit_code == 1 and "damaged" in json.loads(bad.stdout)["bad"]["c" * 64 + ".passes"]
    assert json.loads(run("cache", "prune", "--json").stdout)["removed"]["entries"] == 0
    assert json.loads(run("cache", "prune", "--mb", "1", "--json").stdout)["removed"]["entries"] == 1
    assert not (tmp_path / ("a" * 64 + ".so")).exists() and (tmp_path / ("b" * 64 + ".so")).exists()
    assert run("cache", "clear", "--yes").exit_code == 0
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.txt"]


def test_opt_applies_what_a_script_declares(tmp_path: Path) -> None:
    from fusec.rewriting.rule import REWRITES

    script = str(Path(__file__).parents[2] / "examples" / "wrong_rewrite.py")
    path = str(tmp_path / "graph.fir")
    assert run("capture", script, "-o", path).exit_code == 0
    REWRITES.pop("squared_sine")
    assert "squared_sine" not in run("opt", path, "--remarks", "passed").output
    try:
        assert "squared_sine" in run("opt", path, "--declare", script, "--remarks", "passed").output
        wrong = run("opt", path, "--declare", script, "--verify-each")
        assert wrong.exit_code == 3 and "pass raise changes the result" in wrong.output
        assert re.search(r"where: .*#1 squared_sine at .*wrong_rewrite.py:\d+", wrong.output)
        assert "--apply '!1' leaves it out" in wrong.output
        assert run("opt", path, "--declare", script, "--verify-each", "--apply", "!1").exit_code == 0
    finally:
        REWRITES.pop("squared_sine", None)


def test_every_pass_is_in_the_list() -> None:
    assert list(DESCRIPTIONS) == list(known_passes())
    assert [step.name for step in default_pipeline(Config()).passes] == list(DEFAULT)
    listed = json.loads(run("opt", "--list-passes", "--json").stdout)
    assert listed == [{"pass": name, "does": DESCRIPTIONS[name]} for name in DEFAULT]
    chosen = run("opt", "--list-passes", "--passes", "raise{only=rms_norm},group").stdout
    assert [line.split("  ")[0] for line in chosen.splitlines()] == ["raise{only=rms_norm}", "group"]


def test_a_list_of_passes_with_an_unknown_name_is_refused() -> None:
    for wrong in (["--passes", "raize"], ["--disable", "rms_nrm"], ["--disable", "rms_nrm", "--passes", "raise"]):
        assert run("opt", "--list-passes", *wrong).exit_code == 2


def commands(group: Any) -> Iterator[Any]:
    for command in group.commands.values():
        yield from commands(command) if hasattr(command, "commands") else [command]


def test_every_command_prints_data() -> None:
    found = list(commands(get_command(app)))
    assert len(found) > 20
    assert not [one.name for one in found if not any("--json" in option.opts for option in one.params)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    shown = CliRunner().invoke(app, ["--show-completion"], prog_name="fusec")
    assert shown.exit_code == 0 and f"_FUSEC_COMPLETE=complete_{shell}" in shown.stdout
    words = {"COMP_WORDS": "fusec kernels re", "COMP_CWORD": "2", "_TYPER_COMPLETE_ARGS": "fusec kernels re"}
    asked = {"_FUSEC_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args", **words}
    command = [sys.executable, "-X", "importtime", "-m", "fusec"]
    said = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert "revert" in said.stdout and "list" not in said.stdout
    assert not re.search(r"\| +torch$", said.stderr, re.M)
