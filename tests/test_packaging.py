"""What an installed fusec consists of, and how it starts."""

import configparser
import importlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "tests", "bench", "docs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this tree, built in a copy of it."""
    source, target = tmp_path_factory.mktemp("source") / "fusec", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, source, symlinks=True, ignore=IGNORED)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        target,
    ]
    subprocess.run([*map(str, build), str(source)], check=True, capture_output=True)
    return zipfile.ZipFile(next(target.glob("fusec-*.whl")))


@pytest.mark.parametrize("folder", ["passes", "codegen", "models"])
def test_the_linked_folders_are_in_the_wheel(wheel: zipfile.ZipFile, folder: str) -> None:
    expected = {
        f"fusec/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".h")
    }
    assert expected <= set(wheel.namelist())


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fusec"}
    data = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "fusec" / "viz").rglob("*")
        if path.suffix in (".html", ".js", ".css")
    }
    assert {"fusec/py.typed", *data} <= set(names)


def test_the_entry_points_lead_somewhere(wheel: zipfile.ZipFile) -> None:
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))).decode())
    for group, name in ("console_scripts", "fusec"), ("torch_dynamo_backends", "fusec"):
        module, attribute = entries[group][name].split(":")
        assert callable(getattr(importlib.import_module(module), attribute))


def test_the_command_line_starts_without_torch() -> None:
    """Its import takes seconds, and most commands and every ``--help`` can do without."""
    found = "import sys, fusec.cli; print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", found], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"


def test_the_module_runs() -> None:
    run = subprocess.run([sys.executable, "-m", "fusec", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "explain" in run.stdout
