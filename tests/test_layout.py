"""The rules of the source tree that no other tool checks."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HARD_LIMIT = 500
LONG = "Longer than 500 lines:"
"""In the first ten lines of a longer file, followed by the reason."""
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc", "handler"}


def project_files() -> list[Path]:
    """Files that are tracked, or will be."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        names = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:  # an archive without history
        names = [p for p in ROOT.rglob("*") if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)]
    return [p for p in names if p.is_file() and not p.is_symlink()]


FILES = project_files()
PYTHON_FILES = [p for p in FILES if p.suffix == ".py"]


def shown(paths: list[Path]) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in paths)


def test_python_files_are_short() -> None:
    def excused(text: str) -> bool:
        return any(LONG in line for line in text.splitlines()[:10])

    texts = {p: p.read_text(encoding="utf-8") for p in PYTHON_FILES}
    assert not shown([p for p, text in texts.items() if len(text.splitlines()) > HARD_LIMIT and not excused(text)])


def test_names_say_what_a_file_is() -> None:
    def banned(stem: str) -> bool:
        return stem in BANNED_NAMES or re.search(r"_(impl|utils|helpers|v?\d+)$", stem) is not None

    assert not shown([p for p in PYTHON_FILES if banned(p.stem) or any(part in BANNED_NAMES for part in p.parts)])


def test_nothing_is_left_unfinished() -> None:
    unfinished = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")))
    assert not shown([p for p in PYTHON_FILES if unfinished.search(p.read_text(encoding="utf-8"))])


@pytest.mark.parametrize("name", ["passes", "codegen", "models"])
def test_links_lead_to_the_folders(name: str) -> None:
    link = ROOT / "fusec" / name
    assert link.is_symlink(), f"fusec/{name} has to be a link; on Windows check out with core.symlinks=true"
    assert os.readlink(link) == f"../{name}"


@pytest.mark.parametrize("name", ["passes", "codegen", "models"])
def test_folders_refuse_their_bare_name(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / name / "__init__.py")
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=f"fusec.{name}"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_every_folder_of_modules_is_a_package() -> None:
    """Otherwise the wheel leaves it out."""
    folders = {
        p.parent for p in PYTHON_FILES if p.relative_to(ROOT).parts[0] in ("fusec", "passes", "codegen", "models")
    }
    assert not shown([folder for folder in folders if not (folder / "__init__.py").exists()])


def test_no_path_of_a_machine_is_in_a_file() -> None:
    path = re.compile(
        rb"(?<![\w.~}\-])/(?:" + b"|".join((b"ro" + b"ot", b"wo" + b"rk", b"tm" + b"p", rb"home/\w+")) + rb")/"
    )
    texts = [p for p in FILES if p.suffix not in (".png", ".safetensors")]
    assert not shown([p for p in texts if path.search(p.read_bytes())])


def test_modules_to_run_exist() -> None:
    """Those of the Makefile and the documents, and those that Python files name after ``python -m``."""
    named: set[str] = set()
    for path in FILES:
        if path.suffix in (".md", ".py") or path.name == "Makefile":
            start = r"python -m " if path.suffix == ".py" else r"\b"
            named.update(re.findall(start + r"((?:bench|tests)\.[a-z_.]*[a-z_])\b", path.read_text(encoding="utf-8")))
    paths = {name: ROOT.joinpath(*name.split(".")) for name in named}
    assert len(named) > 20
    assert not [name for name, path in paths.items() if not (path.with_suffix(".py").exists() or path.is_dir())]
