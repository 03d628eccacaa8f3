"""Sanitizers report accesses out of bounds and conversions that are not defined, and nothing of a sound kernel."""

import shutil
from pathlib import Path

import pytest

from tests.campaigns.sanitize.__main__ import TESTS, main

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="the sanitizers are GCC's")
def test_planted_faults_are_reported_and_nothing_else() -> None:
    assert main(["--graphs", "2", "--tests", "", "--json", "none"]) == 0


def test_named_tests_exist() -> None:
    assert not [test for test in TESTS if not (ROOT / test).exists()]
