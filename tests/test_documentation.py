"""What the pages show runs and is what is shown; what they name exists."""

import importlib.util
import json
import re
import shutil
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from fusec.cli import app
from fusec.config import option_table
from fusec.rewriting.rule import REWRITES
from tests.tools.command_line import CliRunner

ROOT = Path(__file__).parents[1]
README, OPTIONS, PERFORMANCE = ROOT / "README.md", ROOT / "docs" / "options.md", ROOT / "docs" / "performance.md"
PAGES = [README, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG"))]
PAGES += [ROOT / name / "README.md" for name in ("bench", "tests/campaigns")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
WRITTEN = ("build/", "model.py", "report.html")
"""What the pages name that commands write, or that is the reader's own."""
CUT = "…"
CheckBlock = Callable[[Path, str, str, str], None]

each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def section(page: Path, heading: str) -> str:
    """Return what follows a heading, with its subsections' text."""
    found = re.search(rf"^#+ {heading}$\n(.*?)(?=^##? |\Z)", page.read_text(encoding="utf-8"), re.M | re.S)
    assert found, f"no section {heading!r} in {page.name}"
    return found[1]


def block(page: Path, heading: str, language: str = "python") -> str:
    """Return the first code block of a language under a heading."""
    found = re.search(
        rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8").split(f"# {heading}\n")[1], re.M | re.S
    )
    assert found, f"no {language} under {heading!r}"
    return found[1]


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def spans(page: Path) -> list[str]:
    """Return the code spans of a page."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def squeezed(text: str) -> list[str]:
    """Return the lines of a text, with single spaces."""
    return [" ".join(line.split()) for line in text.splitlines()]


# What is shown.


@pytest.mark.slow
def test_the_quickstart_gives_what_eager_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two layers, as the other ten are the same."""
    import torch
    import transformers

    from fusec.dynamo import backend

    monkeypatch.setattr(transformers, "BertConfig", partial(transformers.BertConfig, num_hidden_layers=2))
    torch._dynamo.reset()
    if "fusec" not in torch._dynamo.list_backends():  # not installed, so torch does not know the entry point
        torch._dynamo.register_backend(backend, name="fusec")
    names: dict[str, Any] = {}
    exec(block(README, "Quickstart"), names)
    tokens = torch.arange(1000, 1012)[None]
    with torch.no_grad():
        expected, found = (names[which](tokens).last_hidden_state for which in ("model", "compiled"))
    torch.testing.assert_close(found, expected)


def test_the_tools_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block(OPTIONS, "From Python"), names)
    assert [record.name for record in names["raised"].records] == ["canonicalize", "raise"]
    assert names["explanation"].launches("generated") and (tmp_path / "report.html").stat().st_size


def test_the_page_on_quantization_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(block(ROOT / "docs" / "quantization.md", "Quantized weights and activations"), names)
    assert "int4-g32" in capsys.readouterr().out and len(names["report"].layers) == 2


def test_a_fusion_of_ones_own_is_declared() -> None:
    from fusec.rewriting.fusion import FUSIONS, Fusion

    names: dict[str, Any] = {}
    try:
        exec(compile(block(README, "A fusion of your own"), "user_file.py", "exec"), names)
        assert isinstance(names["scaled_tanh_gate"], Fusion)
    finally:
        FUSIONS.pop("scaled_tanh_gate", None)


def test_the_example_of_contributing_is_in_the_source() -> None:
    shown = re.search(r"^ +```python\n(.*?)^ +```$", section(ROOT / "CONTRIBUTING.md", "Add a fusion"), re.M | re.S)
    assert shown
    source = (ROOT / "passes" / "fusion" / "norms.py").read_text(encoding="utf-8")
    assert textwrap.dedent(shown[1]) in source


def test_explain_prints_what_the_readme_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = squeezed(block(README, "What it shows", "console"))
    command, *lines = (line for line in shown if line != CUT)
    result = CliRunner().invoke(app, command.removeprefix("$ fusec ").split())
    assert result.exit_code == 0, result.output
    assert not [line for line in lines if line not in squeezed(result.output)]


@pytest.mark.parametrize("title", ["A wrong model", "A slow model", "A missed fusion"])
def test_causes_are_found_as_the_page_shows(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    text = section(ROOT / "docs" / "debugging.md", title)
    blocks = re.findall(r"^```console\n(.*?)^```$", text, re.M | re.S)
    count = 0
    for shown in blocks:
        for part in re.split(r"^\$ fusec ", shown, flags=re.M)[1:]:
            command, *lines = part.rstrip().splitlines()
            count += 1
            torch._dynamo.reset()
            output = CliRunner().invoke(app, command.split()).output
            for line in lines:
                wanted = r"\s+.*".join(r"\s+".join(map(re.escape, piece.split())) for piece in line.split("…"))
                assert re.search(wanted, output), (command, line, output)
    assert 0 < count <= 5
    REWRITES.pop("squared_sine", None)


def test_the_kernel_of_the_readme_is_generated() -> None:
    """Printed for registers of 16 floats, as shown, whatever this machine has."""
    from fusec.analysis.machine import assumed_cpu
    from fusec.cli.models import compiled_model
    from fusec.codegen.cpp.legality import limits
    from fusec.codegen.cpp.printer import print_kernel
    from fusec.codegen.cpp.schedules import schedule
    from fusec.codegen.tile.rows import Tiling
    from fusec.config import Config
    from fusec.debug.capture import CaptureOptions
    from fusec.loops.plan import plan_kernel

    lines = [line for line in squeezed(block(README, "What it shows", "cpp")) if line != CUT]
    (subject,) = compiled_model(str(ROOT / "examples" / "block.py"), Config(target="cpp"), CaptureOptions()).subjects
    allowed = limits(Config(), assumed_cpu(), lanes=16)
    plans = [plan_kernel(n.body, allowed) for n in subject.final.nodes if n.attributes.get("kind") == "kernel"]
    texts = [squeezed(print_kernel(schedule(plan, "shown", Tiling(16)))) for plan in plans]
    assert any(set(lines) <= set(text) for text in texts)


def test_the_option_table_is_true(check_block: CheckBlock) -> None:
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    rows += [f"| `{name}` | {kind} | `{default}` | {doc} |" for name, kind, default, doc in option_table()]
    begin, end = "<!-- options: written by `make golden` -->", "<!-- end of options -->"
    check_block(OPTIONS, begin, end, "\n".join(["", *rows, ""]))


@pytest.mark.parametrize("name", ["speed", "cpu", "cpu_intel", "cpu_avx2"])
def test_the_measured_tables_are_those_of_the_results(name: str, check_block: CheckBlock) -> None:
    from bench.performance_page import TABLES

    result = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    check_block(PERFORMANCE, f"<!-- {name}.json -->\n", f"<!-- end of {name}.json -->\n", TABLES[name](result))


def test_the_speeds_of_the_readme_are_those_of_the_page() -> None:
    rows = [line for line in section(README, "How fast it is").splitlines() if line.startswith("|")]
    assert len(rows) > 5 and set(rows) <= set(PERFORMANCE.read_text(encoding="utf-8").splitlines())


# What is named.


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    def leads(link: str) -> bool:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        return target.exists() and (not anchor or anchor in anchors(target))

    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(page))
    assert not [link for link in links if not leads(link)]


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p.name != "CHANGELOG.md" and "golden" not in p.parts],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_paths_exist(page: Path) -> None:
    """Files and folders in code spans, relative to the root or to the page.

    A changelog names what was, and the notes of docs/golden what is on their page.
    """

    def is_path(span: str) -> bool:
        first, slash, _ = span.partition("/")
        is_file = re.fullmatch(r"[\w./-]+\.(py|h|md|json|txt|toml|svg|png|html|css|js)", span) is not None
        return is_file or (bool(slash) and (ROOT / first).is_dir() and re.fullmatch(r"[\w./-]+", span) is not None)

    named = [span for span in spans(page) if is_path(span) and not span.startswith(WRITTEN)]
    assert not [span for span in named if not (ROOT / span).exists() and not (page.parent / span).exists()]


@each_page
def test_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"`make ([a-z]+)", text)) <= targets
    modules = set(re.findall(r"python -m\s+((?:bench|tests)[\w.]*)", text))
    assert not [name for name in modules if importlib.util.find_spec(name.rstrip(".")) is None]
    known: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    groups = {name: [command, *getattr(command, "commands", {}).values()] for name, command in known.items()}
    options = {name: {o for one in group for p in one.params for o in p.opts} for name, group in groups.items()}
    shown = "\n".join(re.findall(r"^```console\n(.*?)^```$", text, re.M | re.S)).splitlines()
    for line in {*spans(page), *shown}:
        for name, rest in re.findall(r"^(?:\$ )?fusec ([a-z]+)(.*)", line):
            assert name in known, line
            assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= options[name], line
    alone = {span.split()[0] for span in spans(page) if span.startswith("--")}
    if page in (README, OPTIONS):  # other pages name options of bench, too
        assert alone <= {"--help"}.union(*options.values())


def test_the_map_names_what_is_there() -> None:
    """Each name in a row of "Where to find things" stands in a file that the row links to."""
    tables = (section(page, "Where to find things") for page in (README, ROOT / "CONTRIBUTING.md"))
    for row in (line for table in tables for line in table.splitlines()[3:] if line.startswith("|")):
        links = [ROOT / link for link in re.findall(r"\]\(([^)#]+)\)", row)]
        texts = " ".join(link.read_text(encoding="utf-8") for link in links)
        names = [name for name in re.findall(r"`([A-Za-z_]+)`", row) if name != "group"]
        assert not [name for name in names if not re.search(rf"(def|class) {name}\b", texts)], row


def test_the_first_pages_are_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130
    assert len((ROOT / "docs" / "design.md").read_text(encoding="utf-8").split()) < 2500
