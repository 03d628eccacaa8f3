"""Judges the programs of a batch in a process of its own, since one that dies must not take the others along."""

import faulthandler
import json
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from tests.campaigns.fuzz.draws import Program, drawn, shrunk
from tests.campaigns.fuzz.faults import FAULTS
from tests.campaigns.fuzz.judge import judge_graph
from tests.campaigns.fuzz.reproducer import write_reproducer
from tests.campaigns.fuzz.targets import TARGETS, build_ahead
from tests.campaigns.fuzz.wide import wide_graph
from tests.campaigns.op_db.judge import Verdict

SECONDS = 120
"""A program that takes longer ends the process."""
SOUND = ("right", "fallback", "undefined", "torch", "refused")
SHRUNK = 4
"""How many failures of a batch are shrunk."""


def judge_of(target: str) -> Callable[[Program], Verdict]:
    """What judges programs for a target."""
    if target in TARGETS:
        return lambda program: judge_graph(program, target)
    from tests.campaigns.fuzz.programs import judge_program

    return judge_program


def judged(
    target: str, seed: int, indices: Sequence[int], tell: Callable[[dict[str, Any]], None], folder: Path, shrinking: int
) -> None:
    """Judge programs, and tell of each that it begins and what became of it; the first failures are shrunk."""
    judge, programs = judge_of(target), drawn(seed, indices)
    if target == "cpp":
        faulthandler.dump_traceback_later(5 * SECONDS, exit=True)
        build_ahead([wide_graph(program) for program in programs])
    for index, program in zip(indices, programs, strict=True):
        tell({"begins": index})
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        verdict = judge(program)
        row: dict[str, Any] = {"index": index, "outcome": verdict.outcome, "detail": verdict.detail}
        if verdict.outcome not in SOUND and shrinking:
            shrinking -= 1
            faulthandler.dump_traceback_later(5 * SECONDS, exit=True)
            smallest = shrunk(seed, index, partial(_has_outcome, judge, verdict.outcome))
            row["shrunk"] = judge(smallest).detail
            row["file"] = str(write_reproducer(folder, target, seed, index, smallest, row["shrunk"]))
        faulthandler.cancel_dump_traceback_later()
        tell(row)


def _has_outcome(judge: Callable[[Program], Verdict], outcome: str, program: Program) -> bool:
    return judge(program).outcome == outcome


def main(words: Sequence[str]) -> None:
    """Judge the programs from one index to another, and append lines to a file."""
    target, seed, first, last, log, folder, fault = words
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with Path(log).open("a", buffering=1) as out, FAULTS[fault].planted() if fault else nullcontext():
        tell = partial(_tell, out)
        judged(target, int(seed), range(int(first), int(last)), tell, Path(folder), 0 if fault else SHRUNK)


def _tell(out: IO[str], row: dict[str, Any]) -> None:
    out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
