"""Sanitizers report accesses out of bounds and conversions that are not defined, and nothing of a sound kernel."""

import shutil

import pytest

from tests.campaigns.sanitize.__main__ import main


@pytest.mark.skipif(shutil.which("g++") is None, reason="the sanitizers are GCC's")
def test_planted_faults_are_reported_and_nothing_else() -> None:
    assert main(["--graphs", "2", "--tests", "", "--json", "none"]) == 0
