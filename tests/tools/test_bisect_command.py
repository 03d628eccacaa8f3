"""A search for the application with which a program fails, by its exit code."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from fusec.cli import app
from fusec.debug.bisect_command import CommandSucceeds, bisect_command
from tests.tools.command_line import CliRunner

PROGRAM = """
import os, sys, torch
from typing import Annotated
from torch import Tensor
from torch.nn import functional as F
from fusec import rewrite
from fusec.rewriting.fusion import Dims

@rewrite
def squared_sine(x: Annotated[Tensor, Dims("*batch cols")]) -> Tensor:
    return torch.sin(x) * torch.sin(x)

@squared_sine.to
def _(x: Annotated[Tensor, Dims("*batch cols")]) -> Tensor:
    return torch.sin(x)

def model(x):
    return F.silu(x) + torch.sin(x) * torch.sin(x)

x = torch.randn(4, 16)
found = torch.compile(model, backend="fusec", options={"cache": False})(x)
if not torch.allclose(found, model(x), atol=1e-4):
    os.abort() if len(sys.argv) > 1 else sys.exit(1)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("crash", [False, True])
def test_the_rewrite_is_found_by_an_exit_code(tmp_path: Path, crash: bool) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = f"{sys.executable} {program}{' crash' * crash}"
    done = CliRunner().invoke(app, ["bisect", "--command", command, "--json"])
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    (application,) = found["applications"]
    assert application["subject"] == "squared_sine" and "program.py:18" in application["sources"][0]
    assert found["fix"] == f"!{found['number']}" and found["runs"] <= (12 if crash else 5)


def searched(bad: set[int], count: int) -> list[object]:
    from fusec.selector import Selector

    runs: list[str] = []

    def fails(settings: Mapping[str, str], folder: Path) -> bool:
        selector = settings["FUSEC_APPLY"]
        runs.append(selector)
        chosen = Selector.parse(selector)
        return any(chosen.allows(number) for number in bad if number < count)

    found = bisect_command(fails, Path("missing"))
    return [found.number, found.fix, len(runs)]


@pytest.mark.parametrize("number", [0, 1, 2, 3, 7, 8, 31, 63, 64, 300, 999])
def test_any_number_is_found_in_few_runs(number: int) -> None:
    found, fix, runs = searched({number}, 1000)
    assert found == number and fix == f"!{number}" and isinstance(runs, int) and runs <= 4 + 2 * 10


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 1000, 1023, 1024])
def test_runs_are_few_where_a_trace_tells_the_number(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusec.debug.bisect_command._Search.last", lambda self: count - 1)
    for number in {0, 1, count // 2, count - 2, count - 1} & set(range(count)):
        found, fix, runs = searched({number}, count)
        assert found == number and fix == f"!{number}"
        assert isinstance(runs, int) and runs <= 2 + math.ceil(math.log2(count + 1))


def test_a_command_that_fails_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def fails(settings: Mapping[str, str], folder: Path) -> bool:
        runs.append(selector := settings["FUSEC_APPLY"])
        return selector == ""

    for last in (None, 999):
        runs.clear()
        monkeypatch.setattr("fusec.debug.bisect_command._Search.last", lambda self, last=last: last)
        with pytest.raises(CommandSucceeds, match="does not fail every time"):
            bisect_command(fails, Path("missing"))
        assert len(runs) < 20


def test_several_and_none() -> None:
    assert searched({5, 9}, 100)[:2] == [5, ""]
    with pytest.raises(CommandSucceeds):
        searched(set(), 100)


@pytest.mark.parametrize(
    ("bad", "disable", "most"),
    [({1: "sine", 2: "sine"}, "sine", 6), ({1: "sine", 2: "sine", 5: "cosine", 6: "gelu"}, "sine,cosine,gelu", 18)],
)
def test_rewrites_that_are_at_fault_together_are_disabled(
    bad: dict[int, str], disable: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusec.remarks import Remark
    from fusec.selector import Selector

    def fails(settings: Mapping[str, str], folder: Path) -> bool:
        chosen, left_out = Selector.parse(settings.get("FUSEC_APPLY", "")), settings.get("FUSEC_DISABLE", "")
        return any(chosen.allows(number) for number, name in bad.items() if name not in left_out.split(","))

    def named(search: object, number: int) -> list[Remark]:
        return [Remark("passed", "raise", bad[number], subject=bad[number], application=number)]

    monkeypatch.setattr("fusec.debug.bisect_command._Search.last", lambda self: 7)
    monkeypatch.setattr("fusec.debug.bisect_command._Search.named", named)
    found = bisect_command(fails, Path("missing"))
    assert found.disable == disable and found.runs <= most and f"FUSEC_DISABLE={disable}" in str(found)
    assert [remark.subject for remark in found.applications] == disable.split(",")
    left = set(bad.values()) - {"sine"}
    if left:
        found = bisect_command(fails, Path("missing"), "sine")  # disabled in all runs
        assert set(found.disable.split(",")) == {"sine", *left}


def test_the_fix_has_what_is_disabled_in_all_runs() -> None:
    from fusec.selector import Selector

    def fails(settings: Mapping[str, str], folder: Path) -> bool:
        return settings["FUSEC_DISABLE"] == "sine" and Selector.parse(settings["FUSEC_APPLY"]).allows(5)

    found = bisect_command(fails, Path("missing"), "sine")
    assert (found.fix, found.disable) == ("!5", "sine") and "FUSEC_DISABLE=sine FUSEC_APPLY=!5" in str(found)


def test_a_command_that_always_fails_and_wrong_use(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bisect", "--command", "false"])
    assert done.exit_code == 1 and "fails without any" in done.stdout
    assert CliRunner().invoke(app, ["bisect", "--command", "true"]).exit_code == 3
    assert CliRunner().invoke(app, ["bisect", "--command", "no-such-program"]).exit_code == 2
    assert CliRunner().invoke(app, ["bisect"]).exit_code == 2
    assert CliRunner().invoke(app, ["bisect", "model.py", "--command", "true"]).exit_code == 2


FROZEN = """
import sys, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).eval()
compiled = torch.compile(model, backend="fusec", options={"freeze": True, "small_m": 8})
x = torch.randn(4, 16)
with torch.no_grad():
    compiled(x)
    model[0].weight.data.mul_(3)  # which frozen weights do not notice
    sys.exit(not torch.allclose(compiled(x), model(x), atol=1e-4))
"""


@pytest.mark.thorough
def test_an_option_in_the_source_of_a_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It overrides the environment, but not ``unset``."""
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path / "cache"))
    program = tmp_path / "program.py"
    program.write_text(FROZEN)
    done = CliRunner().invoke(app, ["bisect", "--command", f"{sys.executable} {program}"])
    assert done.exit_code == 1 and "cause: option freeze=True" in done.stdout, done.output
    assert "FUSEC_UNSET=freeze" in done.stdout


@pytest.mark.thorough
def test_the_number_of_threads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch\n"
        "torch.compile(torch.sin, backend='fusec')(torch.ones(4))\n"
        "sys.exit(torch.get_num_threads() > 1)\n"
    )
    done = CliRunner().invoke(app, ["bisect", "--command", f"{sys.executable} {program}"])
    assert done.exit_code == 1 and "cause: option threads=2" in done.stdout and "OMP_NUM_THREADS=1" in done.stdout
