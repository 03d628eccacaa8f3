"""Kernels of a model are listed, shown, timed, and edited: an edit is used, marked, and dropped with its region."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from fusec.cli import app
from fusec.codegen.program.edits import edit_path, edited_source, write_edit
from fusec.config import Config
from tests.tools.command_line import CliRunner

SCRIPT = """
import torch
def model(x):
    return torch.sin(x) * 2 + x.softmax(-1)
def inputs():
    torch.manual_seed(0)
    return (torch.randn({rows}, 16),)
"""
EDITOR = "import sys; p = sys.argv[1]; t = open(p).read(); open(p, 'w').write(t.replace({!r}, {!r}))"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(SCRIPT.format(rows=4))
    return "model.py"


def run(*words: str) -> Result:
    torch._dynamo.reset()
    return CliRunner().invoke(app, ["kernels", *words])


def edit(monkeypatch: pytest.MonkeyPatch, script: str, name: str, old: str, new: str, *options: str) -> Result:
    Path("editor.py").write_text(EDITOR.format(old, new))
    monkeypatch.setenv("EDITOR", f"{sys.executable} editor.py")
    return run("edit", script, name, *options)


def names(script: str) -> list[str]:
    return [row["name"] for row in json.loads(run("list", script, "--json").stdout)]


def test_they_are_listed_and_shown(script: str) -> None:
    (name,) = names(script)
    assert name in run("list", script).stdout
    shown = run("show", script, name).stdout
    assert all(word in shown for word in ("computes", "sin(", "model.py:4", "limit", "int64_t"))
    assert json.loads(run("show", script, name, "--json").stdout)["source"] in shown
    wrong = run("show", script, "sofmax")
    assert wrong.exit_code == 2 and "did you mean softmax?" in wrong.output


def test_one_is_timed_alone_and_otherwise(script: str) -> None:
    (name,) = names(script)
    found = json.loads(run("bench", script, name, "--seconds", "0.1", "--json").stdout)
    ways = {one["name"]: one for one in found["alternatives"]}
    assert ways["as it is"]["kernels"] == 1 < ways["a kernel for each operation"]["kernels"]
    assert all(one["us"] > 0 for one in ways.values()) and "eager" in ways
    assert "as it is" in run("bench", script, name, "--seconds", "0.1").stdout


def test_an_edit_that_is_right_is_used_and_marked(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = names(script)
    done = edit(monkeypatch, script, name, "{\n", "{\n  // by hand\n")
    assert done.exit_code == 0 and "right" in done.stdout, done.output
    (row,) = json.loads(run("list", script, "--json").stdout)
    assert Path(row["edited"]).is_file() and "by hand" in row["source"]
    explained = CliRunner().invoke(app, ["explain", script]).stdout
    assert "generated, edited" in explained
    assert "1 edit removed" in run("revert", name).stdout
    assert json.loads(run("list", script, "--json").stdout)[0]["edited"] == ""


def test_edits_as_data(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = names(script)
    file = run("edit", script, name, "--path").stdout.strip()
    assert json.loads(run("edit", script, name, "--path", "--json").stdout) == {"file": file, "right": None}
    done = edit(monkeypatch, script, name, " sin(", " cos(", "--json")
    assert done.exit_code == 1 and json.loads(done.stdout) == {"file": file, "right": False}
    assert json.loads(run("revert", "--json").stdout) == {"removed": [file]}


def test_an_edit_that_is_wrong_is_found(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = names(script)
    done = edit(monkeypatch, script, name, " sin(", " cos(")
    assert done.exit_code == 1 and "wrong with the edited kernel" in done.stdout, done.output
    found = CliRunner().invoke(app, ["bisect", script])
    assert found.exit_code == 1 and "edited: " in found.stdout and "fusec kernels revert" in found.stdout


def test_an_edit_that_is_not_valid_is_named_and_opened_again(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = names(script)
    done = edit(monkeypatch, script, name, "{\n", "{\n  flat x;\n")
    assert done.exit_code == 1 and "is not valid" in done.output and f"fusec kernels edit MODEL {name}" in done.output
    again = edit(monkeypatch, script, name, "  flat x;\n", "")
    assert again.exit_code == 0 and "right" in again.stdout, again.output


def test_an_edit_of_other_code_is_noted(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = names(script)
    assert edit(monkeypatch, script, name, "{\n", "{\n  // by hand\n").exit_code == 0
    assert "not used" not in run("list", script).stderr
    Path(script).write_text(Path(script).read_text().replace("* 2", "* 3"))
    assert f"is not used: {name} was other code when it was edited" in run("list", script).stderr
    assert "is not used" in CliRunner().invoke(app, ["explain", script]).stderr


INTERPRETED = ("--target", "triton")


def listed(script: str) -> list[dict[str, Any]]:
    return json.loads(run("list", script, *INTERPRETED, "--json").stdout)  # type: ignore[no-any-return]


def edit_triton(monkeypatch: pytest.MonkeyPatch, script: str, old: str, new: str) -> Result:
    """Edit the only kernel as it is for Triton, which its interpreter runs here."""
    (row,) = listed(script)
    assert old in row["source"], row["source"]
    Path("editor.py").write_text(EDITOR.format(old, new))
    monkeypatch.setenv("EDITOR", f"{sys.executable} editor.py")
    return run("edit", script, row["name"], *INTERPRETED)


def test_an_edit_in_triton_is_used_marked_and_dropped_with_its_region(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = edit_triton(monkeypatch, script, "tl.sin(", "1.0 * tl.sin(")
    assert done.exit_code == 0 and "right" in done.stdout, done.output
    (row,) = listed(script)
    assert row["edited"].endswith(".py") and "1.0 * tl.sin(" in row["source"]
    assert "1.0 * tl.sin(" in run("show", script, row["name"], *INTERPRETED).stdout
    assert "generated, edited" in CliRunner().invoke(app, ["explain", script, *INTERPRETED]).stdout
    assert [row["edited"] for row in json.loads(run("list", script, "--json").stdout)] == [""]
    Path(script).write_text(SCRIPT.format(rows=4).replace("* 2", "* 3"))
    assert [row["edited"] for row in listed(script)] == [""]
    Path(script).write_text(SCRIPT.format(rows=4))
    assert "1 edit removed" in run("revert").stdout
    assert [row["edited"] for row in listed(script)] == [""]


def test_an_edit_in_triton_that_is_wrong_is_found(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = edit_triton(monkeypatch, script, "tl.sin(", "tl.cos(")
    assert done.exit_code == 1 and "wrong with the edited kernel" in done.stdout, done.output
    found = CliRunner().invoke(app, ["bisect", script, *INTERPRETED])
    assert found.exit_code == 1 and "target triton" in found.stdout, found.output


@pytest.mark.parametrize(
    ("old", "new"), [("tl.sin(", "tl.no_such("), ("def ", "def no_"), ("import triton\n", "import (")], ids=str
)
def test_an_edit_in_triton_that_does_not_compile_leaves_the_model_right(
    script: str, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    done = edit_triton(monkeypatch, script, old, new)
    assert done.exit_code == 1 and "Traceback" not in done.output, done.output
    torch._dynamo.reset()
    explained = CliRunner().invoke(app, ["explain", script, *INTERPRETED, "--json"]).stdout
    assert "could not be compiled and runs through ATen" in explained
    assert CliRunner().invoke(app, ["bisect", script, *INTERPRETED]).exit_code == 0


def test_an_edit_in_triton_rounds_to_bfloat16(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter as well, which would truncate."""
    half = SCRIPT.format(rows=4).replace("torch.randn(4, 16)", "torch.randn(4, 16).bfloat16()")
    Path(script).write_text(half)
    done = edit_triton(monkeypatch, script, "tl.sin(", "1.0 * tl.sin(")
    assert done.exit_code == 0 and "right" in done.stdout, done.output


def test_an_edit_that_does_not_compile_leaves_the_model_right(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = names(script)
    done = edit(monkeypatch, script, name, "int64_t", "no_such_type")
    assert done.exit_code == 1
    assert "could not be built and runs through ATen" in CliRunner().invoke(app, ["explain", script, "--json"]).stdout
    assert CliRunner().invoke(app, ["bisect", script]).exit_code == 0


def test_an_edit_is_dropped_when_its_region_changes(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = names(script)
    assert edit(monkeypatch, script, name, "{\n", "{\n  // by hand\n").exit_code == 0
    Path(script).write_text(SCRIPT.format(rows=5))
    assert [row["edited"] for row in json.loads(run("list", script, "--json").stdout)] == [""]
    Path(script).write_text(SCRIPT.format(rows=4))
    assert all(row["edited"] for row in json.loads(run("list", script, "--json").stdout))


def test_what_others_may_have_written_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(cache_dir=str(tmp_path))
    path = write_edit("name", "text", config)
    path.write_text("edited")
    assert edited_source("name", "text", config) == ("edited", str(path))
    path.chmod(0o666)
    assert edited_source("name", "text", config) == ("text", "") and "is not used" in caplog.text
    assert edit_path("name", "text", config) != edit_path("name", "other", config)


def test_wrong_use(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = names(script)
    assert run("edit", script, "nothing").exit_code == 2
    monkeypatch.setenv("VISUAL", "no-such-editor")
    missing = run("edit", script, name)
    assert missing.exit_code == 2 and "no-such-editor" in missing.output
    assert Path(run("edit", script, name, "--path").stdout.strip()).is_file()
    assert run("revert", "nothing").exit_code == 2
