"""Memory: what a call takes is seen, and what it leaves is not; the promise is held against eager."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from bench import memory, quantized_memory
from bench.workloads import Prepared, Workload

MIB = 2**20


class Takes(torch.nn.Module):
    """A model of one MiB that takes 64 more in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(MIB // 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(64 * MIB // 4)[: x.shape[0]]


def peaks() -> dict[str, float]:
    model, x = Takes().eval(), torch.ones(8)
    workload = Workload("takes", torch.float32, lambda *_: Prepared(model, lambda run: partial(run, x), 1), (0.0, 0.0))
    return memory.peaks(workload, "eager", 0)


def test_what_a_call_takes_is_seen() -> None:
    """In a fresh process, as the command measures: in this one threads and garbage of other tests come and go."""
    code = "import json; from tests.bench.test_memory import peaks; print(json.dumps(peaks()))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["weights"] == 1.0
    assert 63 <= found["calls"] - found["weights"] <= 72 and found["process"] >= found["calls"]


@pytest.mark.parametrize(
    ("calls", "process", "holds"),
    [(104.0, 125.0, [True, True]), (106.0, 125.0, [False, True]), (104.0, 127.0, [True, False])],
)
def test_calls_are_held_against_eager_and_the_process_against_an_empty_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: float, process: float, holds: list[bool]
) -> None:
    taken = {
        "eager": {"calls": 100.0, "process": 100.0},
        "aot_eager": {"calls": 200.0, "process": 120.0},
        "fusec": {"calls": calls, "process": process},
    }
    monkeypatch.setattr(memory, "_in_fresh_process", lambda title, name, seed: taken[name])
    file = tmp_path / "memory.json"
    status = memory.main(["--workloads", "decode 1, float32", "--peers", "", "--json", str(file)])
    found = json.loads(file.read_text())
    assert status == (not all(holds)) and list(found["promises"].values()) == holds


@pytest.mark.parametrize(("ratio", "holds"), [(1.1, True), (1.2, False)])
def test_quantized_models_are_held_against_their_packed_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: float, holds: bool
) -> None:
    """Eager may take more, as may a model that is not quantized."""
    asked = []

    def answer(module: str, *words: str) -> dict[str, float]:
        asked.append((given := dict(zip(words[::2], words[1::2], strict=True)))["--name"])
        model = torch.load(given["--file"], weights_only=False)
        packed = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        ours = given["--name"] == "fusec" and given["--one"] != "bfloat16"
        return {"packed": packed, "peak": 1.0, "ratio": ratio if ours else 9.0}

    monkeypatch.setattr(quantized_memory, "answer_of", answer)
    file = tmp_path / "memory.json"
    sizes = ["--hidden", "64", "--layers", "1", "--mlp", "128"]
    status = quantized_memory.main(["--formats", "int8", *sizes, "--json", str(file)])
    found = json.loads(file.read_text())
    assert status == (not holds) and list(found["promises"].values()) == [holds]
    assert found["formats"]["int8"]["fusec"]["packed"] < found["formats"]["bfloat16"]["fusec"]["packed"]
    assert asked == ["eager", "fusec"] * 2
