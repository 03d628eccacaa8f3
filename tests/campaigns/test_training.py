"""The command that checks training runs from end to end."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.campaigns import training


@pytest.mark.thorough
def test_training_runs_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "training.json"
    words = ["--models", "llama", "--dtypes", "float32", "--steps", "2", "--backend", "aot_eager"]
    assert training.main([*words, "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["models"]
    assert len(found["losses"]) == 2 and found["drift"] <= training.TOLERANCE
