"""The command that spoils caches: a small run of it finds nothing, and it finds a cache that believes everything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaigns.cache_faults import FAULTS, Found
from tests.campaigns.cache_worker import Report

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, *words: str, before: str = "") -> tuple[int, dict[str, dict[str, object]]]:
    """The processes are forked, which one in which tests have run cannot do."""
    file = tmp_path / "found.json"
    call = f"import sys\n{before}\nfrom tests.campaigns.cache_faults import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", call, *words, "--runs", "1", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert file.exists(), done.stderr
    return done.returncode, json.loads(file.read_text())["faults"]


@pytest.mark.thorough
def test_a_small_run_finds_nothing(tmp_path: Path) -> None:
    names = ["kill -9", "many at once", "full disks", "truncated", "stale", "forged", "FIFO", "writable directory"]
    code, found = run(tmp_path, "--faults", ",".join(names), "--kills", "3", "--processes", "3")
    assert (code, list(found)) == (0, names), found
    assert all(one["runs"] and not one["bad"] for one in found.values())


@pytest.mark.thorough
def test_a_cache_that_believes_everything_is_found_out(tmp_path: Path) -> None:
    code, found = run(
        tmp_path, "--faults", "stale", before="import fusec.cache\nfusec.cache._is_whole = lambda name, entry: True"
    )
    assert code == 1 and found["stale"]["bad"]


@pytest.mark.parametrize(
    "answer, may_fall_back, bad",
    [
        (Report(True, True, ()), False, ""),
        (Report(True, False, ("no space",)), True, ""),
        (Report(True, False, ("no space",)), False, "no space"),
        (Report(True, False, ()), True, "without a reason"),
        (Report(False, True, ()), True, "wrong"),
        ("it died with code -11", True, "died"),
    ],
)
def test_each_process_is_judged(answer: Report | str, may_fall_back: bool, bad: str) -> None:
    found = Found()
    found.judge(answer, may_fall_back)
    assert [bad in reason for reason in found.bad] == ([True] if bad else []) and found.runs == 1


def test_every_fault_says_what_it_is() -> None:
    assert len(FAULTS) >= 20 and all(getattr(one, "func", one).__doc__ for one in FAULTS.values())
