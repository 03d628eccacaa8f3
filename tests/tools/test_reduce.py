"""Graphs that fail are reduced to a few operations, and to a script that fails alone."""

import json
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fusec.cli import app
from fusec.config import Config
from fusec.debug.reduce import Case, NothingFails, Reduced, failing_case, fails_with, reduce
from fusec.debug.synthetic import SyntheticTensor, describe, draw
from fusec.frontend import trace
from fusec.rewriting.fusion import Dims
from fusec.rewriting.rule import REWRITES
from tests.tools.command_line import CliRunner
from tests.tools.test_cli import run

Rows = Annotated[Tensor, Dims("*batch cols")]


class Deep(nn.Module):
    """Layers, in one of which is what a wrong rewrite matches."""

    def __init__(self, layers: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            y = nn.functional.rms_norm(x, x.shape[-1:])
            x = x + nn.functional.silu(layer(y)) * y
            if i == 2 * len(self.layers) // 3:
                s = torch.sin(x)
                x = x + s * s
        return x


def case_of(model: Any, *inputs: Tensor) -> Case:
    return failing_case(model, inputs, {}, fails_with(Config()))


def names(found: Reduced) -> list[str]:
    return [node.op.name for node in found.case.graph.nodes]


def test_a_wrong_rewrite_is_left_with_what_it_matches(
    wrong_rewrite: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = case_of(Deep(3), torch.randn(8, 16))
    found = reduce(case, fails_with(Config()))
    assert found.failure == "wrong" and found.operations == case.size and found.case.size <= 3
    assert "sin" in names(found) and found.case.drawn
    assert sum(x.numel() for x in found.case.inputs) < 8 * 16
    found.script(tmp_path / "reduced.py")
    module = runpy.run_path(str(tmp_path / "reduced.py"))
    assert "squared" not in module["GRAPH"] and isinstance(module["INPUTS"][0], SyntheticTensor)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tmp_path / "reduced.py"), run_name="__main__")
    assert ended.value.code == 1
    assert not fails_alone(tmp_path / "reduced.py") and capsys.readouterr().out.strip().endswith("right")


@pytest.mark.thorough
def test_a_thousand_operations_become_few(wrong_rewrite: None) -> None:
    case = case_of(Deep(140, 8), torch.randn(4, 8))
    assert case.size > 1000
    found = reduce(case, fails_with(Config()), seconds=120)
    assert found.case.size < 10 and found.tests < 100


class SquaredSine(nn.Module):
    """What the wrong rewrite matches, as an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * torch.sin(x)


@pytest.mark.thorough
@pytest.mark.parametrize("layers", [[5], range(16)], ids=["one", "all"])
def test_a_decoder_that_is_wrong_in_some_layers(wrong_rewrite: None, layers: Sequence[int]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=16, vocab_size=256)).eval()
    for layer in layers:
        model.model.layers[layer].mlp.act_fn = SquaredSine()
    words = {"input_ids": torch.arange(16)[None], "use_cache": False}
    with torch.no_grad():
        found = reduce(failing_case(model, (), words, fails_with(Config())), fails_with(Config()), seconds=120)
    assert found.operations > 900 and found.case.size < 10 and found.tests < 100


def test_a_crash_stays_the_same_crash() -> None:
    """The graph has an operation that is wrong in another way, too."""

    def fails(case: Case) -> str:
        ops = [node.op.name for node in case.graph.nodes]
        return "KeyError" if "tanh" in ops and "exp" in ops else "wrong" if "tanh" in ops else ""

    graph = trace(lambda x, w: torch.tanh(torch.exp(x @ w).sum(-1) * 2) + 1, [torch.randn(6, 4), torch.randn(4, 4)])
    found = reduce(Case(graph, (torch.randn(6, 4), torch.randn(4, 4))), fails)
    assert found.failure == "KeyError" and {"tanh", "exp"} <= set(names(found)) and "contraction" not in names(found)


def test_values_that_matter_are_kept_beside_the_script(tmp_path: Path) -> None:
    """Synthetic inputs with the same statistics do not fail, so that those that do are stored."""
    special = torch.randn(4, 8)

    def fails(case: Case) -> str:
        return "wrong" if any(torch.equal(x, special) for x in case.inputs if isinstance(x, Tensor)) else ""

    graph = trace(lambda x: torch.sin(torch.exp(x)), [special])
    found = reduce(Case(graph, (special,)), fails)
    assert found.case.size <= 1 and not found.case.drawn
    found.script(tmp_path / "reduced.py")
    (stored,) = torch.load(tmp_path / "reduced.pt")
    assert torch.equal(stored, special)
    assert torch.equal(runpy.run_path(str(tmp_path / "reduced.py"))["INPUTS"][0], special)


def test_what_is_right_is_said() -> None:
    graph = trace(torch.sin, [torch.randn(4)])
    with pytest.raises(NothingFails, match="the graph is right"):
        reduce(Case(graph, (torch.randn(4),)), fails_with(Config()))
    with pytest.raises(NothingFails, match="the model is right"):
        case_of(Deep(1), torch.randn(4, 16))


def test_writes_are_kept_in_order(wrong_rewrite: None) -> None:
    def write(x: Tensor, cache: Tensor) -> Tensor:
        cache[:, :4] = torch.sin(x) * torch.sin(x)
        return cache.exp().cumsum(0) + 1

    found = reduce(case_of(write, torch.randn(4, 4), torch.zeros(4, 8)), fails_with(Config()))
    assert found.case.size <= 3


SAMPLES = [
    torch.randn(64, 32) * 3 + 1, torch.randn(64, 32).bfloat16().t(), torch.randint(5, 9, (300,)), torch.arange(3, 90),
    torch.rand(400) < 0.25, torch.randn(50).masked_fill(torch.arange(50) % 2 == 0, -torch.inf),
    torch.randn(1, 50).expand(4, 50), torch.zeros(0, 3), torch.tensor(2.5), torch.full((3,), torch.nan),
]  # fmt: skip


def test_what_has_no_statistics_is_kept() -> None:
    assert describe([torch.randn(3, dtype=torch.complex64)]) == []
    largest = torch.tensor([2**63 - 1, -(2**63)])
    assert draw(describe([largest]))[0].dtype is torch.int64


@pytest.mark.parametrize("x", SAMPLES, ids=lambda x: f"{tuple(x.shape)} {x.dtype}")
def test_drawn_tensors_have_the_type_and_statistics_of_the_recorded_ones(x: Tensor) -> None:
    (described,) = describe([x])
    (found,) = draw(eval(repr([described])))
    assert (found.shape, found.stride(), found.dtype) == (x.shape, x.stride(), x.dtype)
    if not x.numel():
        return
    a, b = found.double(), x.double()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert abs(float(kind(a).double().mean() - kind(b).double().mean())) < 0.2
    a, b = a[a.isfinite()], b[b.isfinite()]
    if len(b):
        assert b.min() <= a.min() and a.max() <= b.max()
        assert abs(float(a.mean() - b.mean())) < 0.3 * (float(b.std(correction=0)) + 0.2)
    if x.dtype is torch.int64 and bool((x == torch.arange(len(x)) + x[0]).all()):
        assert torch.equal(found, x)


def test_the_command(tmp_path: Path, wrong_rewrite: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "def model(x):\n    y = torch.sin(x)\n    return (y * y).softmax(-1) + x.exp()\n"
        "def inputs():\n    return (torch.randn(4, 16),)\n"
    )
    done = CliRunner().invoke(app, ["reduce", "model.py"])
    assert done.exit_code == 0 and "operations after" in done.stdout and (tmp_path / "reduced.py").exists(), done.output
    assert CliRunner().invoke(app, ["capture", "model.py", "-o", "model.fir"]).exit_code == 0
    done = CliRunner().invoke(app, ["reduce", "model.fir", "-o", "other.py", "--command", "grep -vq exp {}"])
    assert done.exit_code == 3, done.output
    probe = tmp_path / "probe.py"
    probe.write_text("import sys; sys.exit('max(' in open(sys.argv[1]).read())")
    done = CliRunner().invoke(app, ["reduce", "model.fir", "-o", "o.py", "--command", f"{sys.executable} {probe} {{}}"])
    assert done.exit_code == 0 and "→ 1 operations" in done.stdout, done.output
    assert CliRunner().invoke(app, ["reduce", "model.fir", "--command", "true"]).exit_code == 2
    assert CliRunner().invoke(app, ["reduce", "model.py", "-o", "missing/x.py"]).exit_code == 2


def fails_alone(path: Path) -> bool:
    """Whether a script fails where only it declares anything."""
    REWRITES.pop("squared_sine", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    return ended.value.code == 1


@pytest.fixture
def no_declarations() -> Iterator[None]:
    """Remove what a script has declared."""
    yield
    REWRITES.pop("squared_sine", None)


@pytest.mark.usefixtures("no_declarations")
def test_a_script_carries_the_declarations_of_the_model_and_json_names_the_files(tmp_path: Path) -> None:
    result = run("reduce", "examples/wrong_rewrite.py", "-o", str(tmp_path / "reduced.py"), "--json")
    data = json.loads(result.stdout)
    assert data["failure"] == "wrong" and data["left"] <= 3 < data["operations"] and "sin(" in data["graph"]
    assert data["files"] == [str(tmp_path / name) for name in ("reduced.py", "reduced_declarations.py")]
    done = subprocess.run([sys.executable, str(tmp_path / "reduced.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stderr, done.stderr
    (tmp_path / "reduced_declarations.py").unlink()
    assert not fails_alone(tmp_path / "reduced.py")


@pytest.mark.usefixtures("no_declarations")
def test_declarations_apply_to_a_graph(tmp_path: Path) -> None:
    graph = tmp_path / "sines.fir"
    graph.write_text("graph g(%x: f32[4]) {\n  %a: f32[4] = sin(%x)\n  %y: f32[4] = mul(%a, %a)\n  return %y\n}\n")
    words = ("reduce", str(graph), "-o", str(tmp_path / "reduced.py"))
    assert run(*words).exit_code == 3
    assert run(*words, "--declare", "examples/wrong_rewrite.py").exit_code == 0
    assert fails_alone(tmp_path / "reduced.py")


@pytest.mark.thorough
def test_declarations_of_an_imported_module_are_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script fails alone, in a process that has never seen the module."""
    monkeypatch.chdir(tmp_path)
    Path("rules.py").write_text(RULES)
    Path("model.py").write_text(
        "import torch, rules\n"
        "def model(x):\n    return torch.sin(x) * torch.sin(x) + 1\n"
        "inputs = [torch.linspace(0, 1, 4).reshape(2, 2)]\n"
    )
    try:
        assert CliRunner().invoke(app, ["reduce", "model.py", "-o", "reduced.py"]).exit_code == 0
    finally:
        REWRITES.pop("imported_sine", None)
        sys.modules.pop("rules", None)
    Path("rules.py").unlink()
    done = subprocess.run([sys.executable, "reduced.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr


RULES = """
from typing import Annotated
import torch
from torch import Tensor
from fusec import rewrite
from fusec.rewriting.fusion import Dims

Rows = Annotated[Tensor, Dims("*batch cols")]

@rewrite
def imported_sine(x: Rows) -> Tensor:
    return torch.sin(x) * torch.sin(x)

@imported_sine.to
def _(x: Rows) -> Tensor:
    return torch.sin(x)
"""
