"""Causes that are no rewrite: a kernel of one target, eager itself, and the graph that is captured."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusec
from fusec.cli import app
from fusec.codegen.cpp import printer
from fusec.codegen.program import constant_folding
from fusec.config import Config
from fusec.debug.capture import capture
from fusec.debug.trial import Trial
from fusec.debug.wrong_code import wrong_code
from fusec.frontend.lowering import Lowering
from fusec.reference.contract import as_far_as_eager
from tests.machines import profile
from tests.tools.command_line import CliRunner


@pytest.fixture
def wrong_sine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of C++ compute a cosine instead of a sine."""
    print_kernel = printer.print_kernel
    monkeypatch.setattr("fusec.codegen.cpp.target.print_kernel", lambda k: print_kernel(k).replace("sin(", "cos("))


def model(x: Tensor) -> Tensor:
    return (torch.sin(x) + x) @ torch.exp(x.softmax(0)).T


OPTIONS = {"cache": False, "small_m": 0}


def test_a_kernel_of_one_target(wrong_sine: None) -> None:
    """Sizes that are symbols have the values of the run."""
    (found,) = fusec.bisect(model, torch.randn(4, 16), options=OPTIONS, dynamic=True)
    (name,) = found.kernels
    assert "sin" in name and found.code.target == "cpp" and found.code.right_on == "triton"
    assert f"code:  the kernel {name} of target cpp; right in the reference interpreter and on target triton" in str(
        found
    )


def test_a_graph_file(wrong_sine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On random inputs, as a failed compile leaves one."""
    monkeypatch.setenv("FUSEC_SMALL_M", "0")
    path = tmp_path / "graph.fir"
    path.write_text(str(capture(model, torch.randn(4, 16))[0]))
    done = CliRunner().invoke(app, ["bisect", str(path)])
    assert done.exit_code == 1 and "code:  the kernel " in done.stdout, done.output
    assert f"fusec reduce {path}" in done.stderr and "or graph alone" not in done.stderr
    found = json.loads(CliRunner().invoke(app, ["bisect", str(path), "--disable", "fuse", "--json"]).stdout)
    assert [graph["code"]["target"] for graph in found["graphs"]] == ["cpp"]
    assert CliRunner().invoke(app, ["bisect", str(path), "--train"]).exit_code == 2


def chain(x: Tensor, w: Tensor) -> Tensor:
    """16 kernels with a vendor's matmul after each."""
    for i in range(16):
        x = torch.sin(x * (1 + (i + 1) / 64)) @ w
    return x


@pytest.mark.parametrize("faulty", [(3,), (0, 9, 15)], ids=str)
def test_wrong_kernels_are_found_by_halves(faulty: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in log₂(n) + 2 runs."""
    print_kernel, runs = printer.print_kernel, list[str]()

    def wrong(kernel: Any) -> str:
        text = print_kernel(kernel)
        return text.replace(" sin(", " cos(") if any(f" {1 + (i + 1) / 64}f" in text for i in faulty) else text

    monkeypatch.setattr("fusec.codegen.cpp.target.print_kernel", wrong)
    monkeypatch.setattr("fusec.debug.wrong_code._right_on", lambda *about: "")
    arguments = [torch.randn(4, 16), torch.eye(16)]
    trial = Trial(capture(chain, *arguments)[0], arguments, Config(cache=False, small_m=0), runs.append)
    found = wrong_code(trial)
    assert found.kernels == tuple("mul_sin" + (f"_{i + 1}" if i else "") for i in faulty)
    assert len(runs) <= len(faulty) * (math.log2(16) + 2)


def test_sizes_that_no_operand_of_a_kernel_has(wrong_sine: None) -> None:
    def summed(x: Tensor) -> Tensor:
        return (x.logcumsumexp(0).sum(0) / x.shape[0]).sin() + 1

    (found,) = fusec.bisect(summed, torch.randn(5, 16), options=OPTIONS, dynamic=True)
    assert len(found.kernels) == 1 and "sin" in found.kernels[0]


def test_nan_of_the_model_itself_is_traced_to_its_operation() -> None:
    def logarithm(x: Tensor) -> Tensor:
        return nn.functional.silu(torch.log(x)) * 2

    (found,) = fusec.bisect(logarithm, torch.tensor([[1.0, -1.0, 2.0, -2.0]]), options=OPTIONS)
    assert not found.wrong and "output 0 has 2 NaN of 4 in eager, too; the first are of `log` at" in str(found)
    (found,) = fusec.bisect(logarithm, torch.tensor([[1.0, torch.nan]]), options=OPTIONS)
    assert not found.wrong and "the first are in input x" in found.eager
    (found,) = fusec.bisect(logarithm, torch.tensor([[1.0, 0.0]]), options=OPTIONS)
    assert "inf" not in found.eager


def test_a_false_rewrite_is_no_fault_of_the_code(wrong_rewrite: None) -> None:
    (found,) = fusec.bisect(lambda x: torch.sin(x) * torch.sin(x) + 1, torch.randn(4, 16))
    assert found.culprits and not found.code.target


@pytest.mark.parametrize("freeze", [False, True])
def test_frozen_weights(freeze: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option is applied to the captured graph, whose weights it packs, and named."""
    compute = constant_folding._compute
    monkeypatch.setattr(constant_folding, "_compute", lambda *args: compute(*args) * 2)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU()).eval()
    options = {"freeze": freeze, "cache": False, "cache_dir": profile(f32=120.0).cache_dir}  # no library packs it
    (found,) = fusec.bisect(model, torch.randn(64, 64), options=options)
    assert bool(found.wrong) == freeze and found.option == ("freeze=True" if freeze else "")
    assert found.fix == ((("freeze", False),) if freeze else ())


def test_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is right with one thread."""
    print_kernel, declared = printer.print_kernel, 'extern "C" int omp_get_max_threads();\n'
    raced = " (float)omp_get_max_threads() * sin("
    monkeypatch.setattr(
        "fusec.codegen.cpp.target.print_kernel", lambda k: declared + print_kernel(k).replace(" sin(", raced)
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (found,) = fusec.bisect(lambda x: torch.sin(x).softmax(-1), torch.randn(4, 16), options={"cache": False})
    finally:
        torch.set_num_threads(threads)
    assert found.option == "threads=2" and "cause: option threads=2" in str(found)
    assert "fix:   torch.set_num_threads(1)" in str(found) and found.code.target == "cpp"


OVERFLOWS = "import torch\nmodel = lambda x: (x * x) / x\ninputs = [torch.full((4, 16), 300.0, dtype=torch.float16)]\n"


def test_eager_is_farther_from_float64(tmp_path: Path) -> None:
    """Its square is infinite in float16, and not inside of a kernel."""
    path = tmp_path / "model.py"
    path.write_text(OVERFLOWS)
    done = CliRunner().invoke(app, ["bisect", str(path)])
    assert done.exit_code == 0, done.stdout
    assert "not fusec: output 0: eager is off by 64 elements, fusec by 0" in done.stdout


def test_inputs_that_are_updated_have_a_reference_in_float64() -> None:
    """A sum of many, which rounds in another order than eager's."""

    def update(total: Tensor, x: Tensor) -> Tensor:
        return total.add_((x * 1.1).sum(1))

    (found,) = fusec.bisect(update, torch.zeros(64), torch.randn(64, 1000))
    assert not found.wrong


def test_figures_where_both_are_far_from_float64() -> None:
    reference = torch.linspace(0, 1, 64, dtype=torch.float64)
    eager, compiled = (reference + 0.1).float(), (reference - 0.11).float()
    assert as_far_as_eager([eager], [compiled], [reference]) == "output 0: eager is off by 0.1, fusec by 0.11"
    assert not as_far_as_eager([eager], [(reference - 0.3).float()], [reference])
    assert not as_far_as_eager([eager], [eager + 1e-7], [reference]), "hardly different from eager"
    chosen = torch.tensor([1, 2, 3])
    said = "output 0: eager is off by 1 elements, fusec by 1 elements"
    assert as_far_as_eager([chosen], [torch.tensor([0, 2, 4])], [torch.tensor([0, 2, 3])]) == said
    assert not as_far_as_eager([chosen], [torch.tensor([0, 0, 4])], [torch.tensor([0, 2, 3])])


class Branch(nn.Module):
    """Another result under torch.compile, which Dynamo takes for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) + (1 if torch.compiler.is_compiling() else 0)


def test_a_graph_that_dynamo_specializes() -> None:
    model = Branch()
    (captured, graph) = fusec.bisect(model, torch.randn(4, 16))
    assert captured.wrong.startswith("output 0: error is") and captured.stage == "Dynamo" and not graph.wrong
    assert "Dynamo: the captured graph differs from eager before any pass" in str(captured)
    assert 'check: torch.compile(model, backend="eager") is wrong, too' in str(captured)
    assert model.calls == 0, "copies are called"


def test_a_wrong_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emit = Lowering.emit
    monkeypatch.setattr(Lowering, "emit", lambda self, op, *args: emit(self, "cos" if op == "sin" else op, *args))
    path = tmp_path / "model.py"
    path.write_text("import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(4, 4))\n"
                    "model.append(type('Sine', (torch.nn.Module,), {'forward': lambda self, x: x.sin()})())\n"
                    "inputs = [torch.randn(2, 4)]\n")  # fmt: skip
    done = CliRunner().invoke(app, ["bisect", str(path), "--json"])
    captured, graph = json.loads(done.stdout)["graphs"]
    assert done.exit_code == 1 and not graph["wrong"] and "reduce" not in done.stderr
    assert "import" in captured["stage"] and 'backend="aot_eager") is right' in captured["check"]


@pytest.mark.parametrize("train", [False, True])
def test_captured_graphs_that_are_right(train: bool) -> None:
    """Updates in place, and gradients in any order."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.register_buffer("total", torch.zeros(16))

        def forward(self, x: Tensor) -> Any:
            first, second, third = self.layers
            x = self.step(first, x)
            torch._dynamo.graph_break()
            x = self.step(third, self.step(second, x))
            return {"x": x, "total": self.total * 1}

        def step(self, layer: nn.Module, x: Tensor) -> Tensor:
            x = layer(x).tanh()
            self.total.add_(x.detach().sum(0))
            return x

    found = fusec.bisect(Steps(), torch.randn(4, 16), train=train)
    assert len(found) == 2 + 2 * train and not any(one.wrong for one in found)
