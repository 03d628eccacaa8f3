"""One run of ``bench.gpu``: what it is asked, what it has found, what failed, and where that is written."""

import argparse
import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.devices import Budget, Device, Toy
from bench.gpu_report import CLAIM, Claim, claims
from bench.harness import OURS, console
from bench.record import RESULTS, provenance, write_result
from bench.workloads import described
from fusec.provenance import own_code


@dataclass(frozen=True)
class Stage:
    """A part of the command."""

    share: float
    """Of the time of all; it takes none of those behind it."""
    least: float
    """Seconds without which nothing of it is begun."""


STAGES = {
    "kernels": Stage(0.28, 10), "sanitizer": Stage(0.14, 60), "launching": Stage(0.07, 30), "rows": Stage(0.08, 15),
    "models": Stage(0.26, 45), "compile": Stage(0.17, 45),
}  # fmt: skip
"""In order. Each has time to begin, however long those before it took."""
BUDGET_S = 460
"""Seconds of the command, by default."""
TOO_LATE = "time ran out"
DONE = "done"
"""What an earlier run came to the end of; ``--continue`` does not begin it again."""


@dataclass
class Run:
    """One run of the command: what it was asked, and what it has found so far."""

    options: argparse.Namespace
    device: Device
    budget: Budget
    found: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """What of ours is wrong or does not run."""
    lost: str = ""
    """What left the device in a state in which nothing runs any more."""
    earlier_s: float = 0
    """Seconds of the runs that this one continues."""

    @property
    def modes(self) -> list[str]:
        """Those that fusec is run in."""
        return self.options.modes.split(",")

    @property
    def ours(self) -> list[str]:
        """The names of fusec in each of its modes."""
        return [OURS if mode == "default" else f"{OURS} {mode}" for mode in self.modes]

    @property
    def peers(self) -> list[str]:
        """All others but eager, which is always there."""
        return list(filter(None, self.options.peers.split(",")))

    @property
    def small(self) -> bool:
        """Whether sizes are such that no time means anything."""
        return bool(self.options.toy or self.options.small)

    @property
    def claims(self) -> list[Claim]:
        """What is asked, with what is found so far; of toy sizes nothing is said."""
        return claims({} if self.small else self.found, self.ours)

    @property
    def ends(self) -> dict[str, float]:
        """The stages that are asked for, and by which part of the time each has to end."""
        names = self.options.stages.split(",")
        shares = [STAGES[name].share for name in names]
        return {name: total / sum(shares) for name, total in zip(names, accumulate(shares), strict=True)}

    def chosen(self, given: Sequence[Any]) -> list[Any]:
        """Those that ``--only`` names."""
        return [one for one in given if self.options.only.lower() in one.title.lower()]

    def part(self, what: str, seconds: float, do: Callable[[], object]) -> None:
        """Do one thing that takes about so long, unless an earlier run did, or too little time is left.

        What fails within is a failure, and the command goes on.
        """
        done, missing = self.found.setdefault(DONE, []), self.found.setdefault("not measured", {})
        if what in done or self.late(what, seconds):
            return
        self.step(what)
        missed = len(missing)
        try:
            do()
        except Exception as problem:
            traceback.print_exc()
            self.fails(what, described(problem))
        if len(missing) == missed:
            done.append(what)
        self.device.clear()
        self.write()

    def step(self, what: str) -> None:
        """Say what is done next."""
        console.print(f"{self.budget.spent:6.1f} s  {what}", style="dim", highlight=False)

    def late(self, what: str, seconds: float) -> bool:
        """Whether too little time is left for something that takes about so long, which is noted then."""
        late = bool(self.lost) or self.budget.left < seconds
        if late:
            self.leaves_out(what, f"after {self.lost} nothing runs any more" if self.lost else TOO_LATE)
        return late

    def leaves_out(self, what: str, why: str = TOO_LATE) -> None:
        """Something is not measured."""
        self.found.setdefault("not measured", {})[what] = why

    def fails(self, what: str, why: str) -> None:
        """Something of ours is wrong."""
        if (failure := f"{what}: {why}") not in self.failures:
            self.failures.append(failure)
        self.lost = self.lost or ("" if self.device.lives() else what)
        console.print(f"[red]FAIL[/] {what}: {why}", highlight=False, soft_wrap=True)

    def write(self) -> Path:
        """Everything so far."""
        content = {
            **self.setting(), "seconds": round(self.earlier_s + self.budget.spent), **self.found,
            "failures": self.failures, CLAIM: self.claims,
        }  # fmt: skip
        return write_result(self.question, self.options.seed, content, self.options.json)

    @property
    def question(self) -> str:
        """What the file is called."""
        return "gpu_toy" if isinstance(self.device, Toy) else "gpu"

    def setting(self) -> dict[str, Any]:
        """What all figures of a file have in common."""
        return {
            **self.device.facts(), "code": own_code(), "toy": isinstance(self.device, Toy), "small": self.options.small,
            "layers": "all" if self.options.whole else "some stand in for all", "modes": self.modes,
            "peers": self.peers, "rounds": self.options.rounds,
        }  # fmt: skip

    def goes_on(self) -> None:
        """Take up what an earlier run wrote.

        Raises:
            SystemExit: it measured something else, or with something else.
        """
        file = Path(self.options.json) if self.options.json else RESULTS / f"{self.question}.json"
        if not file.exists():
            return
        earlier = json.loads(file.read_text())
        asked = json.loads(json.dumps(provenance(self.options.seed) | self.setting()))
        for name in ("seed", "versions", *self.setting()):
            if (was := earlier.get(name)) != (now := asked[name]) or now == "":
                raise SystemExit(
                    f"bench.gpu cannot continue {file}: {name} was {was!r} and is {now!r}\n"
                    "  fix:   leave --continue out to begin anew, or write to another file with --json"
                )
        self.found = {name: earlier[name] for name in (*STAGES, DONE) if name in earlier}
        self.failures, self.earlier_s = earlier["failures"], earlier["seconds"]
