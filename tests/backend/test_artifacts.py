"""Kernels travel by ``torch.compiler.save_cache_artifacts()``, whole; where they arrive nothing is built."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusec import artifacts
from fusec.cache import Cache, key_of

ROOT = Path(__file__).parents[2]
MODEL = """
import sys
import torch

folder = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU()).eval()
compiled = torch.compile(model, backend="fusec", options={"strict": True})
"""
SAVE = """
with torch.no_grad():
    torch.save(compiled(torch.randn(3, 64)), f"{folder}/result")
saved, info = torch.compiler.save_cache_artifacts()
open(f"{folder}/artifacts", "wb").write(saved)
print(*sorted(info.fusec_artifacts), sep="\\n")
"""
LOAD = """
info = torch.compiler.load_cache_artifacts(open(f"{folder}/artifacts", "rb").read())
from fusec.codegen.cpp import build

def refuse(text, compiler):
    raise AssertionError("built again:\\n" + text)

def refuse_passes(pipeline, graph, context):
    raise AssertionError("passed again")

from fusec.pipeline import Pipeline

build._compile, Pipeline.run = refuse, refuse_passes
with torch.no_grad():
    assert torch.equal(compiled(torch.randn(3, 64)), torch.load(f"{folder}/result"))
print(*sorted(info.fusec_artifacts), sep="\\n")
"""


def run(script: str, folder: Path, cache: Path) -> list[str]:
    caches = {"FUSEC_CACHE_DIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    command = [sys.executable, "-c", MODEL + script, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | caches, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_nothing_is_built_where_artifacts_were_loaded(tmp_path: Path) -> None:
    saved = run(SAVE, tmp_path, tmp_path / "one")
    assert run(LOAD, tmp_path, tmp_path / "two") == saved
    here, there = (
        {path.name: path.read_bytes() for path in (tmp_path / place).iterdir() if path.suffix in (".so", ".passes")}
        for place in ("one", "two")
    )
    assert saved == sorted(here) and here == there
    kernels = [name for name in saved if name.endswith(".so")]
    assert len(kernels) >= 2  # theirs, and that of what launches them
    assert len(saved) == len(kernels) + 1  # and what the passes made of the graph


KEY = key_of(["text"])


@pytest.fixture
def entry(tmp_path: Path) -> bytes:
    cache = Cache(tmp_path)
    cache.publish(KEY, ".so", b"content")
    found = cache.entry(KEY, ".so")
    assert found is not None
    return found


def test_only_whole_entries_are_taken(
    tmp_path: Path, entry: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "cache"
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(place))
    refused = {
        "flipped": (KEY + ".so", bytes([entry[0] ^ 1]) + entry[1:]),
        "cut": (KEY + ".so", entry[:-1]),
        "empty": (KEY + ".so", b""),
        "another's": (key_of(["other"]) + ".so", entry),
        "a path": ("../" + KEY + ".so", entry),
        "no key": ("k.so", entry),
        "another kind": (KEY + ".lock", entry),
    }
    for what, (name, content) in refused.items():
        with caplog.at_level(logging.WARNING, logger="fusec.artifacts"):
            artifacts.take(name, content)
        assert "is ignored" in caplog.text, what
        caplog.clear()
    assert not place.exists() or list(place.iterdir()) == []
    artifacts.take(KEY + ".so", entry)
    assert Cache(place).read(KEY, ".so") == b"content" and not caplog.text


def test_a_full_disk_is_no_reason_to_fail(
    entry: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> bool:
        raise OSError("No space left")

    monkeypatch.setattr(Cache, "admit", full)
    artifacts.take(KEY + ".so", entry)
    assert "No space left" in caplog.text


def test_a_torch_that_carries_nothing_is_no_reason_to_fail(
    entry: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fusec.frontend.torch_internals import carried_by_torch

    monkeypatch.setitem(sys.modules, "torch.compiler._cache", None)
    carried_by_torch("elsewhere", artifacts.take)(KEY, entry)
    assert "cannot save artifacts" in caplog.text
