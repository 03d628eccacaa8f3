"""Compiles of tools are kept in the cache: the next tool shows the same without compiling."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fusec.cli import app
from fusec.debug import kept
from fusec.errors import BuildError
from tests.tools.command_line import CliRunner
from tests.tools.sample import unpacked

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16), nn.GELU(), nn.Softmax(-1)).eval()
inputs = (torch.randn(4, 16),)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(SCRIPT)
    assert fusec("capture", "model.py", "-o", "model.fir") == ""
    return tmp_path


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The graphs that are compiled."""
    found, compile_graph = list[str](), kept.compile_graph

    def counted(graph: Any, *about: Any) -> Any:
        found.append(graph.name)
        return compile_graph(graph, *about)

    monkeypatch.setattr(kept, "compile_graph", counted)
    return found


def fusec(*words: str) -> str:
    torch._dynamo.reset()
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("model", ["model.py", "model.fir"])
def test_what_is_kept_is_shown_as_it_was(model: str, compiles: list[str]) -> None:
    commands = [("explain", model, "--json"), ("why", model), ("why", model, "kernel"), ("kernels", "list", model)]
    first = fusec(*commands[0])
    assert len(compiles) == 1
    assert json.loads(fusec(*commands[0])) == json.loads(first)
    shown = [fusec(*command) for command in commands]
    assert len(compiles) == 1 and "rms_norm" in shown[1]


def test_the_page_of_what_is_kept() -> None:
    """Equal numbers are one node in the graphs that are read."""
    graphs = []
    for _ in range(2):
        fusec("view", "models:llama/tiny", "-o", "page.html")
        graphs += unpacked(Path("page.html").read_text())["graphs"]
    compiled, kept = ([(len(s["removed"]), len(s["added"])) for s in graph["states"]] for graph in graphs)
    assert compiled[2:] == kept[2:], "before, equal numbers are not merged yet"
    compiled, kept = ([p["numbers"] for p in graph["passes"] if "history" in p] for graph in graphs)
    assert compiled == kept and len(kept) > 1


def test_only_the_page_needs_the_history(compiles: list[str]) -> None:
    fusec("why", "model.fir")
    fusec("view", "model.fir", "-o", "page.html")
    assert len(compiles) == 2 and any("history" in p for p in page_of("page.html")["passes"])
    for entry in Path("cache").glob("*.compile"):
        entry.unlink()
    fusec("view", "model.fir", "-o", "page.html")
    fusec("why", "model.fir")
    fusec("explain", "model.fir")
    assert len(compiles) == 3


def page_of(path: str) -> dict[str, Any]:
    """Return the data of the only graph of a page."""
    (graph,) = unpacked(Path(path).read_text())["graphs"]
    return dict(graph)


def test_another_graph_option_or_edit_is_compiled(compiles: list[str]) -> None:
    fusec("why", "model.py")
    Path("model.py").write_text(SCRIPT.replace("randn(4", "randn(5"))
    fusec("why", "model.py")
    fusec("explain", "model.py", "--dynamic")
    name = json.loads(fusec("kernels", "list", "model.py", "--json"))[0]["name"]
    assert len(compiles) == 3
    fusec("kernels", "edit", "model.py", name, "--path")
    assert "edited" in fusec("explain", "model.py", "--all") and len(compiles) == 4


def test_a_damaged_entry_is_compiled_again(compiles: list[str], caplog: pytest.LogCaptureFixture) -> None:
    first = fusec("why", "model.fir")
    (entry,) = Path("cache").glob("*.compile")
    entry.write_bytes(entry.read_bytes()[:-100])
    assert fusec("why", "model.fir") == first and len(compiles) == 2


def test_a_compile_that_fails_is_not_kept(compiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from fusec.codegen.cpp import target

    def refused(kernel: Any) -> str:
        raise BuildError("no C++ for it")

    monkeypatch.setattr(target, "print_kernel", refused)
    for count in (1, 2):
        assert "could not be built" in fusec("explain", "model.py", "--json") and len(compiles) == count


@pytest.mark.parametrize("model", ["model.py", "model.fir"])
def test_kernels_that_are_shown_are_not_built(model: str, folder: Path) -> None:
    for command in (["explain"], ["kernels", "list"], ["view", "-o", "page.html"], ["check", "--against", "a.json"]):
        name, *options = command if command[0] != "kernels" else [" ".join(command)]
        fusec(*name.split(), model, *options, *(["--update"] if name == "check" else []))
    assert "int64_t rms_norm" in fusec("explain", model, "--kernel", "rms_norm_gelu_softmax")
    assert not list((folder / "cache").glob("*.so")) and list((folder / "cache").glob("*.compile"))
