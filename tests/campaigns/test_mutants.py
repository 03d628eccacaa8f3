"""Mutants of the compiler: each is Python and another program, the sample is the same each time, nothing is left."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.campaigns import mutants, mutation

ROOT = Path(__file__).parents[2]
SOURCE = b'''
"""A text that says 1 < 2."""
LIMIT = 16

def between(low: int, x: int, high: int) -> bool:
    """Whether low <= x < high."""
    assert low <= high
    if x is None or not x:
        raise ValueError(f"{low} and {high}")
    return low <= x and x < high + 1 - 0

def joined(a: str, b: str) -> str:
    return f"{a} - {b}"
'''


def made(operator: str) -> list[str]:
    found = [m for m in mutation.mutants("x.py", SOURCE) if m.operator == operator and m.changes(SOURCE)]
    added = [line for m in found for line in m.difference(SOURCE).splitlines() if line.startswith("+")]
    return [line[1:].strip() for line in added]


def test_mistakes_are_what_they_are_called() -> None:
    assert "return (low < x) and x < high + 1 - 0" in made("comparison")
    assert "if (x is not None) or not x:" in made("comparison")
    assert "return (low <= x or x < high + 1 - 0)" in made("and for or")
    assert "return (x < high + 1 - 0)" in made("condition dropped")
    assert "pass" in made("condition dropped")
    assert "if x is None or x:" in made("not dropped")
    assert made("number")[:2] == ["LIMIT = 17", "LIMIT = 15"]
    assert "return low <= x and x < (high + 1 + 0)" in made("arithmetic")
    assert "return low <= x and x < (0 - (high + 1))" in made("operands swapped")
    assert made("text's values swapped") == ["return f'{b} - {a}'"]


def test_what_is_said_or_only_checked_is_left_alone() -> None:
    lines = {line for m in mutation.mutants("x.py", SOURCE) for line in m.lines}
    assert not lines & {2, 6, 7, 9}


def test_keys_are_those_of_the_function_wherever_it_lies() -> None:
    moved = {m.key for m in mutation.mutants("x.py", b"import math\n\n" + SOURCE)}
    assert moved == {m.key for m in mutation.mutants("x.py", SOURCE)}
    assert len(moved) == len(mutation.mutants("x.py", SOURCE))


def test_the_sample_has_something_of_every_file_and_is_the_same_each_time() -> None:
    first = mutation.sampled(ROOT, 60, 3)
    assert first == mutation.sampled(ROOT, 60, 3) != mutation.sampled(ROOT, 60, 4)
    full = {name for name in mutation.files(ROOT) if mutation.mutants(name, (ROOT / name).read_bytes())}
    assert {m.path for m in first} == full
    assert all(m.changes((ROOT / m.path).read_bytes()) for m in first)


def test_every_file_has_tests_and_a_module() -> None:
    for name in mutation.files(ROOT):
        assert mutants.concerned(ROOT, name), name
    assert mutants.module_of("passes/canonicalize/__init__.py") == "fusec.passes.canonicalize"
    assert mutants.module_of("fusec/loops/affine.py") == "fusec.loops.affine"


def test_named_tests_exist() -> None:
    names = {name for tests in mutants.CONCERNED.values() for name in tests} | set(mutants.UNCONCERNED)
    assert not [name for name in sorted(names) if not (ROOT / "tests" / name).exists()]


def test_arguments_are_about_mutants_that_there_are() -> None:
    known = {m.key for name in mutation.files(ROOT) for m in mutation.mutants(name, (ROOT / name).read_bytes())}
    assert not set(mutants.argued()) - known
    assert all(len(reason) > 20 for reason in mutants.argued().values())


def project(folder: Path) -> Path:
    """A tree with a package, one test that notices a mistake and one that runs on for ever with another."""
    (folder / "fusec" / "analysis").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "fusec" / "__init__.py").write_text("")
    (folder / "fusec" / "analysis" / "__init__.py").write_text("")
    (folder / "fusec" / "analysis" / "sums.py").write_text(
        "def total(n):\n    s = 0\n    while n > 0:\n        s += n\n        n -= 1\n    return s\n"
    )
    (folder / "tests" / "test_sums.py").write_text(
        "from fusec.analysis.sums import total\n\n\ndef test_total():\n    assert total(3) == 6\n"
    )
    return folder


@pytest.mark.thorough
def test_outcomes_and_nothing_is_left(tmp_path: Path) -> None:
    tree = project(tmp_path / "tree")
    (tmp_path / "work").mkdir()
    server = mutants.Server.start(tmp_path / "work" / "server", "pytest")
    place = "fusec/analysis/sums.py"
    baseline = mutants.Baseline(tree, tmp_path / "none", ["tests/test_sums.py"], {}, {}, 1.0)
    baseline.limit = lambda tests: 5.0  # type: ignore[method-assign]
    found = {m.operator + m.text: m for m in mutation.mutants(place, (tree / place).read_bytes())}
    assert mutants.judge(found["comparison(n >= 0)"], server, baseline)["outcome"] == "survived"
    row = mutants.judge(found["number1"], server, baseline)
    assert row["outcome"] == "killed" and row["by"] == "tests/test_sums.py::test_total"
    assert mutants.judge(found["statement droppedpass"], server, baseline)["by"] == "time"
    assert (tree / place).read_text().count("n -= 1") == 1
    server.process.communicate(timeout=60)
    assert not server.folder.exists()


def test_what_survived_is_judged_again_and_what_it_was_judged_with_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "fusec/analysis/sums.py"
    monkeypatch.setattr(mutation, "SCOPE", (place,))
    monkeypatch.setattr(mutants, "argued", lambda: {"settled": "for a reason"})
    tree = project(tmp_path)
    key = mutation.mutants(place, (tree / place).read_bytes())[0].key
    outcomes = {key: "survived", "gone": "survived", "settled": "argued", "no longer argued": "argued", "x": "killed"}
    rows = {k: {"key": k, "path": place, "outcome": o, "by": ""} for k, o in outcomes.items()}
    content: dict[str, Any] = {"seed": 3, "commit": "before", "mutants": rows}
    assert [m.key for m in mutants.unnoticed(tree, content)] == [key]
    assert [row["outcome"] for row in rows.values()] == ["survived", "removed", "argued", "removed", "killed"]
    assert content["commit"] == "before" and content["again"]["commit"] == rows["gone"]["again"] != "before"


@pytest.mark.slow
def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    tree = project(tmp_path / "tree")
    (tree / "tests" / "test_sums.py").write_text("def test_it():\n    while True:\n        pass\n")
    script = f"""
from pathlib import Path
from tests.campaigns import mutants
server = mutants.Server.start(Path({str(tmp_path / "server")!r}), "pytest")
print(server.process.pid, flush=True)
server.ask(Path({str(tree)!r}), ["tests/test_sums.py"], 500)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert caller.stdout is not None
    server = int(caller.stdout.readline())
    log, end = tmp_path / "server" / "log", time.monotonic() + 120
    while not log.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert log.exists()
    caller.kill()
    caller.communicate()
    while (Path(f"/proc/{server}").exists() or log.exists()) and time.monotonic() < end:
        time.sleep(0.1)
    assert not log.exists()


def test_work_is_shared_and_stops_when_one_fails() -> None:
    done: list[tuple[int, str]] = []
    mutants.side_by_side(lambda m, s: done.append((m, s)), [1, 2, 3], ["a", "b"])  # type: ignore[arg-type, list-item]
    assert sorted(m for m, _ in done) == [1, 2, 3] and {s for _, s in done} <= {"a", "b"}

    def fail(mutant: int, server: str) -> None:
        done.append((mutant, server))
        raise RuntimeError("out of order")

    done.clear()
    with pytest.raises(RuntimeError, match="out of order"):
        mutants.side_by_side(fail, [1, 2, 3], ["a"])  # type: ignore[arg-type, list-item]
    assert len(done) == 1


def test_tests_that_run_the_place_come_first() -> None:
    mutant = mutation.mutants("x.py", SOURCE)[0]
    lines = {"x.py": {str(mutant.lines[0]): [0, 1, 2]}}
    seconds = {"tests/a.py::slow": 9.0, "tests/a.py::quick": 1.0, "tests/b.py::other": 5.0, "tests/c.py::not": 0.1}
    baseline = mutants.Baseline(ROOT, ROOT, list(seconds), seconds, lines, 15.1)
    assert baseline.running(mutant) == ["tests/a.py::quick", "tests/b.py::other", "tests/a.py::slow"]
    assert baseline.limit(["tests/a.py"]) == 60 + mutants.LIMIT * 10


def test_shares_leave_out_what_is_argued_or_invalid() -> None:
    rows = {str(i): {"outcome": o, "by": b, "path": "x.py"} for i, (o, b) in enumerate(
        [("killed", "t"), ("killed", "time"), ("survived", ""), ("argued", "why"), ("invalid", "import")])}  # fmt: skip
    found = mutants._counts(rows)
    assert found["rate"] == 2 / 3 and found["counts"]["killed_by_time"] == 1
    assert mutants.table(rows).row_count == 2
