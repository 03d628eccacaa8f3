"""Judges cases one after another in a process of its own, since one that dies must not take the others along."""

import faulthandler
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.campaigns.op_db.cases import Operator, operators
from tests.campaigns.op_db.exclusions import excluded, undefined
from tests.campaigns.op_db.judge import Ran, Subject, Verdict, judge, run

SECONDS = 240
"""A case that takes longer ends the process."""
OUTCOMES = ("crash", "wrong", "raised", "fallback", "torch", "refused", "excluded", "right")
"""From the worst on; ``judge.Verdict`` and ``exclusions`` say what they mean."""


@dataclass
class Row:
    """What became of a variant of an operator in a dtype."""

    op: str
    dtype: str
    variant: str
    outcome: str = "right"
    """The worst of all calls."""
    calls: Counter[str] = field(default_factory=Counter)
    """How many have which outcome."""
    detail: str = ""
    steps: Counter[str] = field(default_factory=Counter)

    def add(self, verdict: Verdict, calls: int, where: str = "") -> None:
        """Count calls that were judged together."""
        self.calls[verdict.outcome] += calls
        self.steps += verdict.steps
        if OUTCOMES.index(verdict.outcome) < OUTCOMES.index(self.outcome):
            self.outcome, self.detail = verdict.outcome, where + verdict.detail


def judged(operator: Operator, dtype: str, variant: str, count: int) -> Row | None:
    """Judge samples of a variant together, and one by one where that is not right; None where there are none."""
    row = Row(operator.name, dtype, variant)
    if reason := excluded(operator.name, dtype, variant):
        row.add(Verdict("excluded", reason), 1)
        return row
    samples = operator.samples(dtype, variant, count)
    subjects = [Subject.of(operator.call(variant), [x], variant, undefined(operator.name)) for x in samples]
    taken = [x for x, subject in zip(samples, subjects, strict=True) if eager(subject).error is None]
    together = Subject.of(operator.call(variant), taken, variant, undefined(operator.name))
    verdict = judge(together) if taken else Verdict("right")
    if verdict.outcome == "right":
        row.add(verdict, len(taken))
    for i, (x, subject) in enumerate(zip(samples, subjects, strict=True)):
        if verdict.outcome != "right" or not any(x is other for other in taken):
            row.add(judge(subject), 1, f"sample {i}: ")
    if verdict.outcome not in ("right", row.outcome) and row.outcome == "right":
        row.add(verdict, len(taken), "together: ")
    return row if samples else None


def eager(subject: Subject) -> Ran:
    """A function as torch runs it."""
    return run(subject.called(subject.function), subject)


def main(words: Sequence[str]) -> None:
    """Judge the cases that a file lists, and append a line to another before and after each."""
    listed, told, count = Path(words[0]), Path(words[1]), int(words[2])
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known = {operator.name: operator for operator in operators()}
    with told.open("a", buffering=1) as out:
        for op, dtype, variant in json.loads(listed.read_text()):
            out.write(json.dumps({"begins": [op, dtype, variant]}) + "\n")
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            row = judged(known[op], dtype, variant, count)
            faulthandler.cancel_dump_traceback_later()
            out.write(json.dumps(vars(row) if row else {"skips": [op, dtype, variant]}) + "\n")


def cases(chosen: Sequence[Operator], dtypes: Sequence[str], variants: Sequence[str]) -> Iterator[list[str]]:
    """Operator, dtype and variant of every case."""
    for operator in chosen:
        for dtype in dtypes:
            if operator.supports(dtype):
                yield from ([operator.name, dtype, v] for v in operator.variants(dtype) if v in variants)


if __name__ == "__main__":
    main(sys.argv[1:])
