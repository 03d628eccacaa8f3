"""The pages of docs/golden show what the compiler does."""

import difflib
import re

import pytest

from fusec.config import Config, option_table
from fusec.passes import default_pipeline, known_passes
from tests.golden_examples import EXAMPLES, Example
from tests.golden_pages import COMMAND, FOLDER, PAGES


@pytest.mark.parametrize("path", PAGES)
def test_page(path: str) -> None:
    file = FOLDER / path
    expected = file.read_text(encoding="utf-8") if file.exists() else ""
    found = PAGES[path]()
    if found != expected:
        name = file.relative_to(FOLDER.parents[1])
        diff = difflib.unified_diff(expected.splitlines(), found.splitlines(), str(name), "the compiler", lineterm="")
        pytest.fail("\n".join([*diff, f"{name} is out of date; if the change is meant: {COMMAND}"]), pytrace=False)


def test_every_page_has_an_example() -> None:
    assert {file.relative_to(FOLDER).as_posix() for file in FOLDER.rglob("*.md")} == PAGES.keys()


def test_every_pass_has_a_page() -> None:
    passes = dict.fromkeys(step.name for step in default_pipeline(Config()).passes)
    assert list(passes) == [example.name for example in EXAMPLES if example.folder == "passes"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.path)
def test_what_a_note_names_is_on_its_page(example: Example) -> None:
    blocks = re.findall(r"^```\w+$(.*?)^```$", (FOLDER / f"{example.path}.md").read_text(encoding="utf-8"), re.M | re.S)
    known = {*known_passes(), *(name for name, *_ in option_table())}
    named = set(re.findall(r"`([^`]+)`", " ".join(example.note.split()))) - known
    assert not {name for name in named if not any(name in block for block in blocks)}
