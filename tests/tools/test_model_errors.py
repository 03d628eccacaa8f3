"""Errors of the model, crashes of the compiler and wrong use are told apart, each with what to do next."""

from pathlib import Path

import pytest
import torch

from tests.tools.test_cli import run


def refused(*words: str) -> str:
    result = run(*words)
    assert result.exit_code in (2, 3), (words, result.exit_code, result.stderr[-2000:])
    assert "Traceback" not in result.stderr and 0 < len(result.stderr) < 1000, (words, result.stderr)
    assert not result.stdout, words
    return result.stderr


def test_a_model_that_raises_is_told_from_a_crash_of_the_compiler(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("import torch\ndef model(x):\n    return x @ torch.ones(3)\ninputs = (torch.ones(2, 2),)")
    said = refused("explain", str(path))
    assert "in eager too" in said and "wrong.py:3: return x @ torch.ones(3)" in said and "size mismatch" in said


NORMALIZED = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
inputs = (torch.randn(1, 8),)
"""
ONCE = """
import torch
used = []
def model(x):
    if used:
        raise RuntimeError("called twice")
    used.append(x)
    return x.relu()
inputs = (torch.randn(4),)
"""
LATER = """
import torch
def model(x):
    x = x.relu()
    torch._dynamo.graph_break()
    raise RuntimeError("of the model")
inputs = (torch.randn(4),)
"""
NO_TRAINING = """
import torch
class Model(torch.nn.Linear):
    def forward(self, x):
        if self.training:
            raise RuntimeError("not in training")
        return super().forward(x)
model, inputs = Model(8, 8), (torch.randn(4, 8),)
"""


@pytest.mark.parametrize("text", [NORMALIZED, ONCE], ids=["raises in training", "raises when called again"])
def test_a_crash_of_the_compiler_is_told_from_a_model_that_raises(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise KeyError("of the compiler")

    (tmp_path / "model.py").write_text(text)
    monkeypatch.setattr("fusec.pipeline.Pipeline.run", broken)
    said = run("explain", str(tmp_path / "model.py"))
    assert said.exit_code == 3 and "no graph of the model could be compiled" in said.stderr
    assert "of the compiler" in said.stderr
    torch._dynamo.reset()
    monkeypatch.setenv("FUSEC_STRICT", "1")
    result = run("explain", str(tmp_path / "model.py"))
    assert result.exit_code == 4 and "of the compiler" in result.stderr


def test_a_crash_of_the_compiler_comes_before_an_error_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise KeyError("of the compiler")

    (tmp_path / "model.py").write_text(LATER)
    assert "of the model" in refused("explain", str(tmp_path / "model.py"))
    torch._dynamo.reset()
    monkeypatch.setattr("fusec.pipeline.Pipeline.run", broken)
    monkeypatch.setenv("FUSEC_STRICT", "1")
    result = run("explain", str(tmp_path / "model.py"))
    assert result.exit_code == 4 and "of the compiler" in result.stderr


def test_a_model_that_raises_in_training_alone(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(NO_TRAINING)
    assert "in eager too" in refused("explain", str(tmp_path / "model.py"), "--train")
    assert run("explain", str(tmp_path / "model.py")).exit_code == 0


def test_a_model_goes_to_opt_by_way_of_capture(tmp_path: Path) -> None:
    assert "fusec capture models:llama/tiny | fusec opt" in refused("opt", "models:llama/tiny")


def test_applications_that_there_are_none_of(tmp_path: Path) -> None:
    path = str(tmp_path / "llama.fir")
    run("capture", "models:llama/tiny", "-o", path)
    assert "no application 900" in refused("opt", path, "--apply", "0,900")
    assert run("opt", path, "--apply", "0..900").exit_code == 0


def test_times_in_the_interpreter_are_told_from_those_of_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "relu.py"
    path.write_text("import torch\nmodel, inputs = torch.nn.ReLU(), (torch.ones(4),)")
    for target, said in (("triton", True), ("cpp", False)):
        assert ("Triton's interpreter" in run("explain", str(path), "--target", target, "--time").stderr) == said


def test_the_version() -> None:
    assert run("--version").stdout.startswith("fusec ")
