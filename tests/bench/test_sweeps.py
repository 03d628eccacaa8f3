"""Sweeps: what counts as a cliff; the command runs to its end, and its pictures are the same for the same figures."""

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench import pictures, sweeps
from bench.pictures import Curve, Line, Panel, draw_panels, draw_ratios
from bench.sweeps import Point, cliffs, trend
from bench.workloads import Prepared, calls, decode


def points(ours: list[float], peers: list[float], noise: float = 0.02) -> list[Point]:
    """Steps of ours and of the best peer, each with twice the work of the one before."""
    return [
        Point(2**number, {"fusec": mine, "slow": 90.0, "best": theirs}, theirs / mine, noise)
        for number, (mine, theirs) in enumerate(zip(ours, peers, strict=True))
    ]


FLAT = [1.0, 1.0, 1.0, 1.0]
THRICE = [3.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("ours", "peers", "at"),
    [
        (FLAT, [2.0, 1.5, 1.1, 0.99], []),  # less and less, but by little each time, and a tie is no defeat
        (FLAT, [1.4, 1.4, 0.97, 1.4], [4]),  # a defeat
        ([1.0], [1.8], []),
        ([1.0], [0.9], [1]),
        ([1.0, 1.0, 1.7, 1.7], THRICE, [4]),  # ours jumps, and stays there
        ([1.0, 1.0, 1.7, 1.0], THRICE, [4]),  # or comes back
        ([1.7, 1.0, 1.0, 1.0], THRICE, [1]),  # less work takes longer
        ([1.0, 1.0, 1.0, 1.7], THRICE, [8]),
        ([1.0, 1.0, 3.0, 3.0], [3.0, 3.0, 9.0, 9.0], [4]),  # the peers jump with it
        ([1.0, 1.0, 1.0, 3.3], [3.0, 3.0, 3.0, 9.9], [8]),
        ([3.0, 1.0, 1.0, 1.0], [9.0, 3.0, 3.0, 3.0], [1]),
        ([1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 1.7, 1.7], [4]),  # the peers gain there, and we do not
        ([2.0, 2.0, 4.0, 8.0], [3.0, 6.0, 12.0, 24.0], [1]),  # half the work should take us less
        (FLAT, [3.0, 1.8, 1.7, 1.7], [2]),
        (FLAT, [3.0, 7.0, 6.0, 6.5], []),  # the peers are slow at one point, which is no pit of ours beside it
        ([2.1, 1.9, 2.4, 2.9], [4.8, 9.9, 9.2, 9.6], []),
        (FLAT, [1.6, 1.6, 3.2, 3.2], []),  # or from there on
        ([1.0, 1.0, 1.7, 1.7], [3.0, 9.0, 3.0, 3.0], [4]),  # and where they are, a jump of ours is still seen
        ([1.0, 2.0, 4.0, 8.0], [3.0, 6.0, 12.0, 24.0], []),  # twice the work, twice the time
        ([1.0, 1.0, 2.0, 4.0], [3.0, 3.0, 6.0, 12.0], []),  # from flat to in proportion
    ],
)
def test_a_cliff_is_a_defeat_a_jump_of_ours_or_a_drop_that_is_not_the_peers(
    ours: list[float], peers: list[float], at: list[int]
) -> None:
    assert list(cliffs(points(ours, peers))) == at
    rows = [replace(p, ms={name: ms / p.at for name, ms in p.ms.items()}) for p in points(ours, peers)]
    assert list(cliffs(rows, shared=True)) == at


def test_the_reason_of_a_cliff_says_what_is_off() -> None:
    (defeat,) = cliffs(points([1.0], [0.9])).values()
    assert defeat == "a peer takes 0.90 of our time"
    (drop,) = cliffs(points([1.0, 1.0, 1.7, 1.7], THRICE)).values()
    assert drop == "the ratio is 1.76, and 3.00 at 2"
    (jump,) = cliffs(points([1.0, 1.0, 3.0, 1.0], [3.0, 3.0, 9.0, 3.0])).values()
    assert jump == "by the points beside it, our step should take 0.33 of its time"


def test_what_noise_explains_is_no_cliff() -> None:
    drop, jump, defeat = ([1.0, 1.0], [3.0, 1.8]), ([1.0, 1.6, 1.0], [3.0, 4.8, 3.0]), ([1.0], [0.9])
    for (ours, peers), noise in ((drop, 0.05), (jump, 0.05), (defeat, 0.15)):
        assert cliffs(points(ours, peers, 0.005)) and not cliffs(points(ours, peers, noise))


def test_a_trend_is_that_of_the_neighbours() -> None:
    assert trend([1, 2, 4, 16], [1.0, 9.0, 4.0, 72.0]) == pytest.approx([9.0, 2.0, 18.0, 16.0])
    assert trend([3], [5.0]) == [5.0]


def test_results_are_judged_again_without_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "_measure", lambda *_: pytest.fail("measured"))
    kept = {"question": "sweeps", "commit": "abc", "measurements": {"m": 1.5}}
    for ours, status in ((FLAT, 0), ([1.0, 1.0, 1.7, 1.7], 1)):
        file = tmp_path / "sweeps.json"
        axes = {"float32": {"context": [asdict(p) for p in points(ours, THRICE)]}}
        file.write_text(json.dumps(kept | {"axes": axes, "promises": {"old": True}}))
        assert sweeps.main(["--again", "--json", str(file)]) == status
        found = json.loads(file.read_text())
        assert found["promises"] == {"float32, context 1 to 8: no cliff": not status}
        assert kept.items() <= found.items() and found["axes"] == axes


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
