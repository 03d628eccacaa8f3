"""Failures of a compile leave the graph in a file, and name the command that reduces it."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusec.config import Config
from fusec.debug.bisect import bisect
from fusec.ir.parser import parse_graph
from fusec.reproducers import FOLDER, MOST, keep_graph
from tests.tools.test_cli import run


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept graphs."""
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    return tmp_path / "cache" / FOLDER


def break_(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def broken(*args: Any, **keywords: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(where, broken)


def path_in(command: str) -> Path:
    words = shlex.split(command)
    assert words[:2] == ["fusec", "reduce"]
    return Path(words[2])


def compiled(**options: Any) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)).eval()
    with torch.no_grad():
        return torch.compile(model, backend="fusec", options={"cache": False, **options})(torch.randn(4, 8))


@pytest.mark.parametrize("where", ["fusec.pipeline._structure", "fusec.codegen.program.program.build_program"])
def test_an_error_under_strict_names_the_graph_and_how_to_reduce_it(
    where: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_(monkeypatch, where)
    with pytest.raises(Exception, match="planted") as error:
        compiled(strict=True, target="cpp")
    command = re.search(r"graph: (fusec reduce .*)", str(error.value))
    assert command is not None, error.value
    (file,) = kept.iterdir()
    assert path_in(command[1]) == file and parse_graph(file.read_text()) and "ValueError: planted" in file.read_text()
    words = shlex.split(command[1])[1:]
    reduced = run(*words, "-o", str(tmp_path / "reduced.py"))
    assert reduced.exit_code == 0 and "→ 0 operations" in reduced.stdout and "ValueError" in reduced.stdout


def test_what_falls_back_is_logged_with_its_graph(
    kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_(monkeypatch, "fusec.codegen.program.program.build_program")
    assert compiled().shape == (4, 8)
    (file,) = kept.iterdir()
    assert f"`fusec reduce {file} --strict` shrinks the graph" in caplog.text


def test_a_pass_that_is_undone_suggests_the_command(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusec.dynamo import compiled_graphs

    break_(monkeypatch, "fusec.passes.grouping.Group.apply")
    compiled()
    (failure,) = compiled_graphs()[-1].remarks.of("failure")
    assert "was undone" in failure.message and path_in(failure.suggestion).parent == kept


def test_a_trace_has_the_graph_already(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_(monkeypatch, "fusec.codegen.program.program.build_program")
    with pytest.raises(Exception, match=r"imported\.fir --strict"):
        compiled(strict=True, trace=str(tmp_path / "trace"))
    assert not kept.exists()
    explained = run("explain", str(tmp_path / "trace"))
    assert explained.exit_code == 3 and "planted" in explained.stderr and "imported.fir --strict" in explained.stderr


def test_what_is_right_leaves_nothing(kept: Path) -> None:
    compiled()
    assert not kept.exists()


def test_a_folder_that_cannot_be_written_fails_no_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("")
    break_(monkeypatch, "fusec.codegen.program.program.build_program")
    assert compiled().shape == (4, 8)


def test_the_last_ones_are_kept(kept: Path) -> None:
    for i in range(MOST + 5):
        assert keep_graph(f"graph g{i}() {{\n  return\n}}\n", f"a/b {i}", Config.from_environment(), "planted")
    assert len(list(kept.iterdir())) == MOST and (kept / keep(24)).exists()


def keep(number: int) -> str:
    command = keep_graph(f"graph g{number}() {{\n  return\n}}\n", f"a/b {number}", Config.from_environment(), "")
    return path_in(command).name


def test_options_of_the_compile_are_in_the_command(kept: Path) -> None:
    config = Config.from_options(None, {"target": "cpp", "disable": "raise,fuse"})
    assert keep_graph("", "g", config, "", strict=True).endswith(" --strict --target cpp --disable raise,fuse")


@pytest.mark.usefixtures("wrong_rewrite")
def test_a_finding_of_bisect_has_a_graph() -> None:
    (finding,) = bisect(lambda x: torch.sin(x) * torch.sin(x), torch.randn(8, 8))
    assert finding.wrong and parse_graph(path_in(finding.reduce).read_text())


@pytest.mark.usefixtures("wrong_rewrite")
def test_bisect_prints_the_commands(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(
        "import torch\ndef model(x):\n    return x.sin() * x.sin()\ndef inputs():\n    return torch.ones(4)\n"
    )
    result = run("bisect", str(path), "--length", "3")
    assert result.exit_code == 1 and f"fusec reduce {path} --length 3\n" in result.stderr
    assert "--length" not in run("bisect", str(path)).stderr
    data = json.loads(run("bisect", str(path), "--json").stdout)
    again = run(*shlex.split(data["graphs"][0]["reduce"])[1:], "-o", str(tmp_path / "reduced.py"))
    assert again.exit_code == 0 and "wrong" in again.stdout


@pytest.mark.usefixtures("wrong_rewrite")
def test_a_pass_that_changes_the_result_leaves_the_graph_before_it(tmp_path: Path, kept: Path) -> None:
    path = tmp_path / "sines.fir"
    path.write_text("graph g(%x: f32[4]) {\n  %a: f32[4] = sin(%x)\n  %y: f32[4] = mul(%a, %a)\n  return %y\n}\n")
    result = run("opt", str(path), "--verify-each")
    assert result.exit_code == 3 and str(kept) in result.stderr


def test_the_command_names_the_file_of_a_rewrite(tmp_path: Path, kept: Path) -> None:
    """Without its declarations a graph is right."""
    from fusec.rewriting.rule import REWRITES

    script, declared = Path(__file__).parents[2] / "examples" / "wrong_rewrite.py", dict(REWRITES)
    try:
        done = run("bisect", str(script))
        (command,) = re.findall(r"random inputs: (fusec reduce .*)", done.stderr)
        assert command.endswith(f" --declare {script}")
        for name in set(REWRITES) - set(declared):
            del REWRITES[name]
        found = run("bisect", str(path_in(command)), "--declare", str(script))
        assert "squared_sine" in found.stdout and f"--declare {script}" in found.stderr
        reduced = run(*shlex.split(command)[1:], "-o", str(tmp_path / "reduced.py"))
        assert reduced.exit_code == 0 and ": wrong" in reduced.stdout, reduced.output
    finally:
        for name in set(REWRITES) - set(declared):
            del REWRITES[name]


def test_the_trace_of_one_compile_is_a_graph(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    compiled(trace=str(trace))
    assert run("bisect", str(trace)).stdout.startswith("graph: right")
    torch._dynamo.reset()
    compiled(trace=str(trace))
    several = run("reduce", str(trace))
    assert several.exit_code == 2 and f"has 2 compiles\n  fix:   pass one of them, such as {trace}" in several.stderr
