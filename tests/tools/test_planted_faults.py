"""Faults of a compiler, a model and a kernel, each named by one command."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from click.testing import Result
from torch import Tensor

from fusec.cli import app
from fusec.pipeline import Context
from fusec.rewriting.fusion import Dims
from tests.tools.command_line import CliRunner

Rows = Annotated[Tensor, Dims("*batch cols")]
HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\ntorch.manual_seed(0)\n"
PLAIN = "def model(x, w):\n    return {}\ndef inputs():\n    return torch.randn(4, 16), torch.randn(16)\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fusec(*words: str) -> Result:
    torch._dynamo.reset()
    return CliRunner().invoke(app, list(words))


def runs(found: Result) -> int:
    """Return the number of compiles that a search made to find a rewrite or pass."""
    return sum(line.startswith("graph: ") and "kernels" not in line for line in found.stderr.splitlines())


def written(text: str, name: str = "model.py") -> str:
    Path(name).write_text(HEAD + text)
    return name


def of(expression: str) -> str:
    return written(PLAIN.format(expression))


def test_a_false_rewrite_at_one_site(wrong_rewrite: None) -> None:
    found = fusec("bisect", of("torch.sin(x) * torch.sin(x) + F.silu(x) * w"))
    assert found.exit_code == 1 and "squared_sine at model.py:6" in found.stdout and "'apply': '!" in found.stdout
    assert runs(found) <= 2 + math.ceil(math.log2(4))


def test_a_false_rewrite_at_two_sites(wrong_rewrite: None) -> None:
    found = fusec("bisect", of("torch.sin(x) * torch.sin(x) + torch.sin(x + w) * torch.sin(x + w)"))
    assert found.stdout.count("squared_sine at") == 2 and "'disable': 'squared_sine'" in found.stdout


def test_a_pass_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    application = Context.application

    def raising(self: Context, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "rms_norm":
            raise IndexError("planted")
        return application(self, name, *args, **kwargs)

    monkeypatch.setattr(Context, "application", raising)
    script = of("F.rms_norm(x, (16,), w) + F.silu(x)")
    found = fusec("bisect", script)
    assert "pass raise was undone: IndexError: planted" in " ".join(found.stdout.split()) and runs(found) == 1


def kernel_of(script: str) -> str:
    (row,) = json.loads(fusec("kernels", "list", script, "--json").stdout)
    return str(row["name"])


def test_a_slow_kernel() -> None:
    """An edit that waits: the kernel alone is slower than a kernel for each operation."""
    script = of("torch.exp(x) * w + torch.tanh(x)")
    path = Path(fusec("kernels", "edit", script, kernel_of(script), "--path").stdout.strip())
    head, entry, rest = path.read_text().partition(f"{kernel_of(script)}(")
    before, brace, body = rest.partition("{")
    path.write_text(f'{head}{entry}{before}{brace}\n  for (int i = 0; i < 1 << 22; i++) asm volatile("");{body}')
    found = fusec("kernels", "bench", script, kernel_of(script), "--seconds", "0.2", "--json")
    ways = {one["name"]: one["us"] for one in json.loads(found.stdout)["alternatives"]}
    assert ways["as it is"] > 2 * ways["a kernel for each operation"]


MISSES = {
    "an operation out of place": (
        "x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * w", "rms_norm", "operation", "eps inside",
    ),
    "an operand out of place": (
        "(x.mean(-1, keepdim=True) - x) * torch.rsqrt(x.var(-1, correction=0, keepdim=True) + 1e-5) * w", "layer_norm",
        "operation", "sub",
    ),
    "another reader": (
        "(p := torch.softmax((h := x.reshape(1, 2, 2, 16)) @ h.mT, -1)) @ h, p", "attention", "returned",
        "return only the result",
    ),
    "a constant": (
        "0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044 * x**3)))", "gelu_tanh", "constant", "0.044715",
    ),
    "another dim": ("x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * w", "rms_norm", "", "dims"),
    "a view in between": ("torch.softmax(x @ x.T, -1).T @ x", "attention", "softmax", "softmax|scores|weights|keys"),
    "statistics in another dtype": (
        "(x * torch.rsqrt(x.to(torch.bfloat16).pow(2).mean(-1, keepdim=True) + 1e-6)) * w",
        "rms_norm", "dtype", "leave out the cast to bf16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSES)
def test_a_missed_fusion(name: str) -> None:
    expression, what, code, said = MISSES[name]
    found = fusec("why", of(expression), what)
    assert found.exit_code == 0 and "fused" not in found.stdout.splitlines()[0], found.stdout
    assert "model.py:6" in found.stdout and (not code or f"[{code}]" in found.stdout), found.stdout
    assert re.search(said, found.stdout), found.stdout


def test_a_site_that_a_change_of_the_model_loses() -> None:
    heads = "torch.softmax((h := x.reshape(1, 2, 2, 16)) @ h.mT, -1)"
    script = of(f"{heads} @ h * w")
    assert fusec("check", script, "--against", "kept.json", "--update").exit_code == 0
    of(f"(p := {heads}) @ h * w + p.sum()")
    found = fusec("check", script, "--against", "kept.json")
    assert found.exit_code == 1 and "kernels of attention: 1 → 0" in found.stdout


def test_a_stale_edit_of_a_kernel() -> None:
    script = of("torch.exp(x) * w")
    fusec("kernels", "edit", script, kernel_of(script), "--path")
    assert "edited" in fusec("explain", script).stdout
    of("torch.exp(x) * w + 1")
    assert "edited" not in fusec("explain", script).stdout


def test_a_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusec.codegen.cpp import printer

    print_kernel = printer.print_kernel
    monkeypatch.setattr("fusec.codegen.cpp.target.print_kernel", lambda k: print_kernel(k).replace("exp(", "log("))
    found = fusec("bisect", of("torch.exp(x) * w"))
    assert found.exit_code == 1 and "NaN" in found.stdout and "group" in found.stdout
    assert runs(found) <= 2 + math.ceil(math.log2(4))


def test_a_graph_break() -> None:
    script = written(
        "def function(x):\n    y = x.exp()\n    print('here')\n    return y + 1\n"
        "torch.compile(function, backend='fusec')(torch.randn(4))\n"
    )
    done = subprocess.run([sys.executable, "-m", "fusec", "trace", script], capture_output=True, text=True, check=False)
    assert "Graph breaks" in done.stdout and "model.py:7" in done.stdout
