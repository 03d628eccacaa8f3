"""The benchmark of quantized caches runs, in kernels that read what is stored."""

import json
from pathlib import Path

import pytest
import torch

from bench import quantized_caches
from fusec.dynamo import compiled_graphs


def test_every_format_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, heads = next(iter(quantized_caches.HEADS.items()))
    monkeypatch.setattr(quantized_caches, "HEADS", {name: heads})
    torch._dynamo.reset()
    file = tmp_path / "caches.json"
    words = f"--tokens 64 --megabytes 1 --rounds 2 --allow-busy --json {file}"
    assert quantized_caches.main(words.split()) == 0
    found = json.loads(file.read_text())["heads"]
    assert list(found) == [name]
    for content in found.values():
        rows = {row["name"]: row for row in content["rows"]}
        assert list(rows) == ["bfloat16", *quantized_caches.FORMATS] and rows["bfloat16"]["ratio"] == 1
        assert rows["int4-g32"]["bytes"] < 0.31 * rows["bfloat16"]["bytes"]
    kinds = [[kernel.kind for kernel in c.program.kernels.values()] for c in compiled_graphs()]
    assert kinds == [["attention"]] * (1 + len(quantized_caches.FORMATS))
