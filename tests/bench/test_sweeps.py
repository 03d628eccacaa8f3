"""Sweeps: what counts as a cliff; the command runs to its end, and its pictures are the same for the same figures."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench import pictures, sweeps
from bench.pictures import Curve, Line, Panel, draw_panels, draw_ratios
from bench.sweeps import Point, cliffs
from bench.workloads import Prepared, calls, decode


def points(*ratios: float, noise: float = 0.02) -> list[Point]:
    return [Point(2**number, {"fusec": 1.0}, ratio, noise) for number, ratio in enumerate(ratios)]


@pytest.mark.parametrize(
    ("ratios", "at"),
    [
        ((2.0, 1.5, 1.1, 1.0, 0.99), []),  # less and less, but by little each time, and a tie is no defeat
        ((2.0, 0.97, 1.4), [2]),
        ((3.0, 1.8, 1.7), [2]),
        ((1.7, 1.8, 3.0), [2]),  # a pit is one from either side
        ((3.0, 3.0, 1.8), [4]),
        ((1.8,), []),
        ((0.9,), [1]),
    ],
)
def test_a_cliff_is_a_defeat_or_a_drop(ratios: tuple[float, ...], at: list[int]) -> None:
    assert list(cliffs(points(*ratios))) == at


def test_what_noise_explains_is_no_cliff() -> None:
    assert cliffs(points(3.0, 1.8)) and not cliffs(points(3.0, 1.8, noise=0.05))
    assert cliffs(points(0.9)) and not cliffs(points(0.9, noise=0.15))


def linear(dtype: torch.dtype, seed: int, batch: int, hidden: int, *_: int) -> Prepared:
    model, x = torch.nn.Linear(hidden, hidden).to(dtype), torch.randn(batch, hidden, dtype=dtype)
    model.config = type("Config", (), {"vocab_size": 7})  # type: ignore[assignment]
    return Prepared(model, lambda run: partial(run, x), batch)


def test_sweeps_run_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "OURS", "aot_eager")
    monkeypatch.setattr(sweeps, "decode", linear)
    words = ["--context", "8,16", "--batch", "1,2", "--layers", "1", "--hidden", "16", "--peers", "eager"]
    file = tmp_path / "sweeps.json"
    sweeps.main([*words, "--rounds", "2", "--allow-busy", "--json", str(file)])
    found = json.loads(file.read_text())
    assert {axis: [p["at"] for p in ps] for axis, ps in found["axes"]["float32"].items()} == {
        "context": [8, 16], "batch": [1, 2], "layers": [1],
    }  # fmt: skip
    assert len(found["measurements"]) == 3 and len(found["promises"]) == 3  # all axes share a point
    assert found["vocabulary"] == 7 and "<svg" in (tmp_path / "sweeps_float32.svg").read_text()


def test_every_candidate_decodes_beside_a_cache_of_its_own() -> None:
    prepared = decode(torch.float32, 0, batch=2, hidden=64, layers=1, valid=5, capacity=8)
    first, second = (calls(prepared, "eager", ())[0]["eager"] for _ in range(2))
    with torch.no_grad():
        want = first().logits
        second().past_key_values.layers[0].keys.zero_()
        assert want.shape[:2] == (2, 1) and torch.equal(first().logits, want)


def drawn(file: Path) -> str:
    curves = [Curve("fusec", (1, 2, 4), (1.0, 1.5, 2.0)), Curve("eager", (1, 2, 4), (2.0, 2.5, 2.1))]
    draw_panels(file, "Title", "ms", [Panel("rows", curves, Curve("", (1, 2, 4), (2.0, 1.7, 1.05), (0.1,) * 3))] * 2)
    return file.read_text()


def test_the_same_figures_are_the_same_picture(tmp_path: Path) -> None:
    text = drawn(tmp_path / "one.svg")
    assert text == drawn(tmp_path / "two.svg")
    assert all(f">{word}<" in text for word in ("Title", "fusec", "eager", "1.05"))  # as text, not as outlines


def test_what_was_not_measured_has_no_mark(tmp_path: Path) -> None:
    lines = [Line("decode", {"a": 2.17, "b": None}, {"a": 2.2, "b": 1.5}), Line("prefill", {"a": 1.3, "b": 1.42})]
    draw_ratios(tmp_path / "ratios.svg", "Title", lines)
    text = (tmp_path / "ratios.svg").read_text()
    assert all(f">{word}<" in text for word in ("decode", "prefill", "2.17", "1.30", "1.42", "a", "b"))
    assert "1.50" not in text


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = draw_ratios(tmp_path / "ratios.svg", "Title", [Line("decode", {"a": 1.0})])
    pictures.say_drawn(picture)
    assert picture is None and list(tmp_path.iterdir()) == []
    assert "matplotlib is not installed" in capsys.readouterr().err
