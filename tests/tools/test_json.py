"""The data that commands print has the fields that docs/debugging.md names."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.main import get_command

from fusec.cli import app
from fusec.rewriting.rule import REWRITES
from tests.test_documentation import section
from tests.tools.test_cli import run

SCRIPT = """
import torch
from torch.nn import functional as F

def model(x, w):
    h = torch.logcumsumexp(F.rms_norm(x, (16,), w), 0).exp() @ x.T
    return h + 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044 * h**3)))

def inputs():
    return torch.randn(8, 16), torch.randn(16)
"""
TRACED = "import torch, fusec\nfusec.compile(torch.nn.ReLU())(torch.randn(8))\n"
COMMANDS = (
    "env", "doctor", "machine show", "machine forget", "cache show", "cache verify", "cache prune",
    "explain model.py --time", "why model.py everything", "view model.py -o page.html", "bisect model.py",
    "bisect --command false", "capture model.py -o graph.fir", "kernels list model.py", "kernels show model.py linear",
    "kernels bench model.py linear --seconds 0.1", "kernels edit model.py linear --path", "kernels revert",
    "opt --list-passes", "opt graph.fir -o opt.fir --verify-each", "diff graph.fir opt.fir", "diff model.py graph.fir",
    "check model.py --against report.json --update", "check wrong.py --against report.json", "trace --json traced.py",
    f"reduce {Path(__file__).parents[2]}/examples/wrong_rewrite.py -o reduced.py", "cache clear --yes",
)  # fmt: skip
NAMED = ("packages", "settings", "kinds", "regions", "peaks", "sizes", "figures", "turns", "bad")
"""Fields whose members have names of fusions, packages and the like."""


def fields(data: Any, within: str = "") -> Iterator[str]:
    """Yield the names of all fields of printed data."""
    members = data.items() if isinstance(data, dict) else ((within, one) for one in data)
    for name, value in members:
        if isinstance(data, dict) and within not in NAMED:
            yield name
        if isinstance(value, dict | list):
            yield from fields(value, name)


@pytest.mark.slow
def test_every_field_is_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path / "cache"))
    for name, text in {"model": SCRIPT, "wrong": SCRIPT.replace("0.044", "0.04"), "traced": TRACED}.items():
        Path(f"{name}.py").write_text(text)
    page = Path(__file__).parents[2] / "docs" / "debugging.md"
    known = set(re.findall(r"[\w+]+", " ".join(re.findall(r"`([^`]+)`", section(page, "Data")))))
    for command in COMMANDS:
        words = command.split()
        with patch.dict(REWRITES):  # a script may declare some
            said = run(*words, *([] if "--json" in words else ["--json"]))
        assert said.stdout, (command, said.stderr)
        unknown = {name for name in fields(json.loads(said.stdout)) if name not in known}
        assert not unknown, (command, unknown)


def test_every_command_is_walked() -> None:
    groups = get_command(app).commands  # type: ignore[attr-defined]
    names = {f"{n} {s}" if s else n for n, one in groups.items() for s in getattr(one, "commands", {"": one})}
    walked = {name for name in names if any(command.startswith(name) for command in COMMANDS)}
    assert names - walked == {"machine measure"}  # it prints what machine show does, after seconds
