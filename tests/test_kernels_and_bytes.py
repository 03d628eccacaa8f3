"""How many kernels each model of transformers takes, and the bytes they move: to see what a change does."""

from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from bench.families import FAMILIES
from fusec.analysis.memory import moved_bytes
from fusec.debug.explanation import KINDS
from fusec.debug.subject import kind_of, subject_of
from fusec.debug.traffic import traffic
from fusec.ir.graph import Graph
from tests.golden_models import optimized

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
VERSION = f"transformers {metadata.version('transformers')}"


def line(family: str, graphs: list[Graph]) -> str:
    """Launches and bytes of one model, by kind, and those of values that one writes and another reads."""
    launches, moved, subjects = Counter[str](), Counter[str](), list(map(subject_of, graphs))
    for subject in subjects:
        for node in subject.final:
            if kind := kind_of(node, subject):
                launches[kind] += 1
                moved[kind] += int(moved_bytes(node))
    cells = [f"{launches[kind]:3} {kind} {moved[kind]:9,} B" for kind in KINDS]
    cells += [f"together {sum(moved.values()):9,} B", f"between {traffic(subjects, {}).bytes:9,} B"]
    return "  ".join([f"{family:11}", *cells])


def _title(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 16), pytest.param((3, 40), marks=pytest.mark.thorough)], ids=_title)
def test_kernels_and_bytes(shape: tuple[int, int], golden: str) -> None:
    of, _, _ = golden.partition("\n")
    if golden and of != VERSION:
        assert of.replace(" ", "==") in CONSTRAINTS.read_text(), "`make golden` with the pinned transformers"
        pytest.skip(f"what a model hands over differs between versions; the expected text is of {of}")
    lines = [line(family, optimized(family, *shape)) for family in FAMILIES]
    assert "\n".join([VERSION, *lines, ""]) == golden
