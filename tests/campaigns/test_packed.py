"""Random layers with packed weights are compiled right; what is not is told."""

import json
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import pytest

from tests.campaigns import packed
from tests.campaigns.packed import drawn, examine

LAYERS = list(drawn(0, 40))


def test_a_seed_gives_the_same_layers() -> None:
    assert list(islice(drawn(0, 60), 40)) == LAYERS != list(drawn(1, 40))


@pytest.mark.parametrize("first", [0, *(pytest.param(i, marks=pytest.mark.thorough) for i in range(5, 40, 5))])
def test_random_layers_are_right(first: int) -> None:
    """Among them are all ways to pack codes, and half have sizes that are not known."""
    found = [examine(layer, index) for index, layer in enumerate(LAYERS[first : first + 5], first)]
    assert [(verdict.outcome, verdict.detail) for verdict in found] == [("right", "")] * 5


def test_they_reach_everything() -> None:
    assert {layer.codes for layer in LAYERS} == {*packed.UNPACKED}
    for name in ("codebook", "group", "split", "zero", "inputs", "rows", "layout", "epilogue", "dtype", "dynamic"):
        assert len({getattr(layer, name) for layer in LAYERS}) > 1, name


def test_what_is_not_right_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fusec.frontend.fx.multiples_as_products", lambda graph: nullcontext())
    assert packed.main(["--count", "1", "--json", str(tmp_path / "found.json")]) == 1
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["layers"] == 1 and not result["passed"] and sum(result["outcomes"].values()) == 1
    assert result["found"][0]["codes"] == LAYERS[0].codes and result["found"][0]["detail"]
