"""Does the model still run, right and with the reason told, whichever function of fusec raises during a compile?

``python -m tests.campaigns.injection``: each function that some workload calls raises once, in a process of its own.
"""

import argparse
import logging
import tempfile
import time
from itertools import groupby
from unittest import mock

from rich.table import Table

from bench.harness import progress, report
from tests.campaigns.injection.fork import prepare
from tests.campaigns.injection.planting import Key
from tests.campaigns.injection.trial import Outcome, trial
from tests.campaigns.injection.workloads import WORKLOADS
from tests.campaigns.record import write_result


def main(words: list[str] | None = None) -> int:
    """Inject into every function that some workload calls; status 1 where one breaks the model, or nobody says so."""
    options = _parser().parse_args(words)
    console, start = report(options.width), time.perf_counter()
    logging.getLogger("fusec").propagate = False
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(tempfile, "tempdir", folder):
        found = _outcomes(options)  # what other processes have abandoned elsewhere is not swept
    stages = _by_stage(found)
    passed = bool(found) and all(o.fired and o.passed for o in found)
    console.print(_table(stages))
    content = {
        "passed": passed, "seconds": round(time.perf_counter() - start), "stages": stages,
        "outcomes": [o.to_json() for o in found],
    }  # fmt: skip
    console.print(f"written to {write_result('injection', 0, content, options.json)}", style="dim", highlight=False)
    return int(not passed)


def _outcomes(options: argparse.Namespace) -> list[Outcome]:
    """Inject each exception into each function in the first workload in which it raises."""
    places, found, raised = prepare(), list[Outcome](), set[tuple[Key, type[Exception]]]()
    chosen = [w for w in WORKLOADS if not options.workloads or w.name in options.workloads.split(",")]
    named = {key: place for key, place in places.items() if options.only in place.name}
    with progress() as bar:
        for workload in chosen:
            with trial(workload) as attempt:
                called = attempt.called()
                todo = [p for key, p in named.items() if key in called and (key, workload.error) not in raised]
                for place in bar.track(list(filter(workload.takes, todo)), description=workload.name):
                    found.append(outcome := attempt(place))
                    if outcome.fired or outcome.error:
                        raised.add((place.key, workload.error))
                    if not (outcome.fired and outcome.passed):
                        bar.console.print(outcome)
    return found


def _by_stage(found: list[Outcome]) -> dict[str, dict[str, int]]:
    """Count outcomes by package of fusec."""
    stages = {}
    for stage, group in groupby(sorted(found, key=lambda o: o.stage), key=lambda o: o.stage):
        mine = list(group)
        ran = [o for o in mine if o.fired and not o.error]
        stages[stage] = {
            "functions": len(mine),
            "right, with a reason": sum(o.passed for o in ran),
            "right, no reason": sum(o.right and not o.passed for o in ran),
            "wrong": sum(not o.right for o in ran),
            "model fails": sum(bool(o.error) for o in mine),
            "did not raise": sum(not o.fired and not o.error for o in mine),
        }
    return stages


def _table(stages: dict[str, dict[str, int]]) -> Table:
    totals = {name: sum(row[name] for row in stages.values()) for name in next(iter(stages.values()), {})}
    shown = Table("stage", *totals)
    for stage, row in {**stages, "all": totals}.items():
        shown.add_row(stage, *map(str, row.values()))
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.injection", description=__doc__)
    parser.add_argument("--workloads", default="", metavar="A,B", help=", ".join(w.name for w in WORKLOADS))
    parser.add_argument("--only", default="", metavar="TEXT", help="functions with TEXT in their names")
    parser.add_argument("--json", default="", metavar="FILE", help="by default tests/campaigns/results/injection.json")
    parser.add_argument("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
