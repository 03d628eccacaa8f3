"""Are random programs compiled right? Graphs of the IR, and programs of torch, shrunk where they are not.

``python -m tests.campaigns.fuzz --target interpreter|cpp|triton|backend --count N --seed S``: the same seed gives the
same programs. ``interpreter`` runs what the passes make of a graph, ``cpp`` and ``triton`` its kernels, ``backend`` a
program of torch through ``torch.compile``. Batches run in processes of their own; one that dies is a finding, and the
rest of its batch goes on in another. ``--plant FAULT`` plants a fault in the compiler, which must then be found.

A campaign may be run in parts: each run is added to the file of results, with its own commit and seed; one that is
interrupted adds the batches that are done. ``--again`` judges by the present commit what earlier runs have found.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.harness import progress, report
from bench.record import provenance
from tests.campaigns.fuzz.faults import FAULTS
from tests.campaigns.fuzz.targets import TARGETS
from tests.campaigns.fuzz.worker import SOUND
from tests.campaigns.record import RESULTS, write_result

BATCH = {"interpreter": 4000, "cpp": 200, "triton": 250, "backend": 50}
"""Programs per process."""
ROOT = Path(__file__).parents[3]


def main(words: list[str] | None = None) -> int:
    """Run a campaign; the exit status is 1 where a program is not compiled right, or a planted fault is not found."""
    options = _parser().parse_args(words)
    path = Path(options.json or RESULTS / f"fuzz_{options.target}.json")
    known = json.loads(path.read_text()) if path.exists() and options.json != "none" and not options.plant else {}
    runs, found = known.get("runs", []), known.get("found", [])
    console = report(options.width)
    if options.again:
        _judge_again(options, found)
    else:
        rows, seconds = _run(options)
        commit = provenance(options.seed)["commit"]
        for row in _wrong(rows):
            row.pop("file", None)  # of this machine
            found.append({"commit": commit, "seed": options.seed, **row})
        runs.append(_summary(options, rows, seconds))
        said = ", ".join(f"{name} {count}" for name, count in runs[-1]["outcomes"].items())
        rate = runs[-1]["rate"]
        console.print(f"{len(rows)} programs for {options.target}, seed {options.seed}: {said}; {rate} a second")
    unmended = [row for row in found if "mended" not in row]
    if options.plant:
        return int(not unmended)
    if options.json != "none":
        outcomes: Counter[str] = sum((Counter(run["outcomes"]) for run in runs), Counter())
        content = {
            "target": options.target, "programs": sum(run["programs"] for run in runs),
            "outcomes": dict(outcomes.most_common()), "passed": not unmended, "found": found, "runs": runs,
        }  # fmt: skip
        write_result(path.stem, options.seed, content, str(path))
        console.print(f"written to {path}: {content['programs']} programs in all, {len(unmended)} not right")
    return int(bool(unmended))


def _run(options: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Judge the programs, and return a row for each and the seconds that it took; a planted fault ends when found."""
    fault = FAULTS[options.plant] if options.plant else None
    last = options.first + (min(options.count, fault.within) if fault else options.count)
    rows: list[dict[str, Any]] = []
    begun = time.perf_counter()
    with progress() as bar, suppress(KeyboardInterrupt):
        task, at = bar.add_task(f"fuzz {options.target}", total=last - options.first), options.first
        while at < last and not (fault and _wrong(rows)):
            new = _batch(options, options.seed, at, min(last, at + BATCH[options.target]))
            for row in _wrong(new):
                bar.console.print(_line(row), highlight=False, soft_wrap=True, markup=False)
            rows += new
            at += len(new)
            bar.update(task, completed=at - options.first)
    return rows, time.perf_counter() - begun


def _judge_again(options: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """Judge what was found by the present commit; what is right now bears it."""
    for row in [row for row in found if "mended" not in row]:
        (now,) = _batch(options, row["seed"], row["index"], row["index"] + 1)
        if now["outcome"] in SOUND:
            row["mended"] = provenance(options.seed)["commit"]
        else:
            print(_line(now))


def _batch(options: argparse.Namespace, seed: int, first: int, last: int) -> list[dict[str, Any]]:
    """Judge programs in a process of its own; if it dies, those until then, and that in which it died."""
    with tempfile.TemporaryDirectory(prefix="fusec-fuzz-") as folder:
        log = Path(folder) / "log.jsonl"
        words = [options.target, *map(str, (seed, first, last, log, options.keep)), options.plant]
        done = subprocess.run(
            [sys.executable, "-m", "tests.campaigns.fuzz.worker", *words], cwd=ROOT, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    rows = [line for line in lines if "outcome" in line]
    if done.returncode and len(lines) == 2 * len(rows):
        raise SystemExit(f"a worker died between programs:\n{done.stderr[-2000:]}")
    if done.returncode:
        hung = "Timeout" in done.stderr
        reason = f"the process ended with {done.returncode}: {done.stderr.strip()[-600:]}"
        rows.append({"index": lines[-1]["begins"], "outcome": "hang" if hung else "crash", "detail": reason})
    return rows


def _wrong(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["outcome"] not in SOUND]


def _line(row: dict[str, Any]) -> str:
    return f"{row['outcome']:8} {row['index']}: {row.get('shrunk') or row['detail']}  {row.get('file', '')}"


def _summary(options: argparse.Namespace, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    said = provenance(options.seed)
    return {key: said[key] for key in ("commit", "changed", "seed", "time", "versions", "cpu")} | {
        "first": options.first, "programs": len(rows),
        "outcomes": dict(Counter(row["outcome"] for row in rows).most_common()),
        "rate": round(len(rows) / seconds, 2),
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", default="interpreter", choices=[*TARGETS, "backend"])
    add("--count", type=int, default=1000, help="programs")
    add("--seed", type=int, default=0)
    add("--first", type=int, default=0, help="index of the first program")
    add("--plant", default="", choices=["", *FAULTS], metavar="FAULT", help=f"one of: {', '.join(FAULTS)}")
    add("--keep", default=str(ROOT / "build" / "fuzz"), metavar="DIR", help="where files that show a failure go")
    add("--again", action="store_true", help="judge what earlier runs have found by the present commit")
    add("--json", default="", metavar="FILE", help="by default one for each target in tests/campaigns/results; or none")
    add("--width", type=int, default=None, help="of what is printed")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
