"""Is every operator of PyTorch's operator database right through the backend, alone and among generated neighbours?

``python -m tests.campaigns.op_db``; a run that was stopped goes on where it was. Batches of cases run in processes of
their own; one that dies is a finding, and the rest of its batch goes on in another.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.harness import progress, report
from bench.record import provenance
from tests.campaigns.op_db.cases import DTYPES, VARIANTS, operators
from tests.campaigns.op_db.worker import OUTCOMES, cases
from tests.campaigns.record import write_result

BATCH = 100
"""Cases per process."""
ROOT = Path(__file__).parents[3]
FAULTS = ("crash", "wrong", "raised")


def main(words: list[str] | None = None) -> int:
    """Run; the exit status is 1 where something is wrong, raises or dies."""
    options = _parser().parse_args(words)
    console = report(options.width)
    chosen = operators(options.only.split(",") if options.only else ())
    todo = list(cases(chosen, options.dtypes.split(","), options.variants.split(",")))
    log = Path(options.log)
    rows = _known(log, options)
    with progress() as bar:
        task = bar.add_task("op_db", total=len(todo), completed=len([c for c in todo if tuple(c) in rows]))
        left = [c for c in todo if tuple(c) not in rows]
        while left:
            for key, row in _batch(left[:BATCH], log, options.samples).items():
                rows[key] = row
                bar.advance(task)
                if row and row["outcome"] in (*FAULTS, *options.show.split(",")):
                    bar.console.print(_line(row), highlight=False, soft_wrap=True, markup=False)
            left = [c for c in left if tuple(c) not in rows]
    found = [row for row in rows.values() if row]
    console.print(_table(found))
    passed = not any(row["outcome"] in FAULTS for row in found)
    content = {"samples": options.samples, **_summary(found), "passed": passed}
    if options.json != "none":
        console.print(f"written to {write_result('op_db', 0, content, options.json)}", style="dim", highlight=False)
    return int(not passed)


Key = tuple[str, ...]
Rows = dict[Key, "dict[str, Any] | None"]


def _known(log: Path, options: argparse.Namespace) -> Rows:
    """The rows of a run of the same sources that was stopped; the log begins anew for others."""
    head = {"commit": provenance(0)["commit"], "samples": options.samples}
    if not options.resume or not log.exists() or json.loads(log.read_text().splitlines()[0]) != head:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(json.dumps(head) + "\n")
    return _rows(log.read_text().splitlines()[1:])


def _rows(lines: Iterable[str]) -> Rows:
    rows: Rows = {}
    for line in lines:
        told = json.loads(line)
        if "op" in told:
            rows[told["op"], told["dtype"], told["variant"]] = told
        elif "skips" in told:
            rows[tuple(told["skips"])] = None
    return rows


def _batch(batch: Sequence[Sequence[str]], log: Path, samples: int) -> Rows:
    """Run cases in a process of their own; the case in which it dies is a crash."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as listed:
        json.dump(batch, listed)
        listed.flush()
        before = len(log.read_text().splitlines())
        words = [sys.executable, "-m", "tests.campaigns.op_db.worker", listed.name, str(log), str(samples)]
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines = log.read_text().splitlines()[before:]
    begun = [tuple(told["begins"]) for told in map(json.loads, lines) if "begins" in told]
    if done.returncode and (not begun or begun[-1] in _rows(lines)):
        raise SystemExit(f"a worker died between cases:\n{done.stderr[-2000:]}")
    if done.returncode:
        op, dtype, variant = begun[-1]
        reason = f"the process ended with {done.returncode}: {done.stderr.strip()[-300:]}"
        row = {"op": op, "dtype": dtype, "variant": variant, "outcome": "crash", "calls": {"crash": 1}, "steps": {}}
        lines.append(json.dumps(row | {"detail": reason}))
        with log.open("a") as out:
            out.write(lines[-1] + "\n")
    return _rows(lines)


# -- what is said of it -----------------------------------------------------------------------------------------


def _line(row: dict[str, Any]) -> str:
    return f"{row['outcome']:8} {row['op']} {row['dtype']} {row['variant']}: {row['detail']}"


def how(steps: dict[str, int]) -> str:
    """How an operator that is right is run: ``generated``, ``vendor``, ``opaque``, ``mixed`` or as ``views``."""
    kinds = {"kernel": "generated", "vendor": "vendor", "opaque": "opaque", "interpreted": "opaque"}
    found = {kinds[kind] for kind in steps if kind in kinds}
    return found.pop() if len(found) == 1 else "mixed" if found else "views"


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    by_dtype = {
        dtype: {variant: _counts(r for r in rows if (r["dtype"], r["variant"]) == (dtype, variant))
                for variant in VARIANTS}
        for dtype in DTYPES
    }  # fmt: skip
    alone = [r for r in rows if r["variant"] == "plain" and r["outcome"] == "right"]
    ways = {dtype: Counter(how(r["steps"]) for r in alone if r["dtype"] == dtype) for dtype in DTYPES}
    steps = sum((Counter(r["steps"]) for r in alone), Counter[str]())
    names = dict.fromkeys(r["op"] for r in rows)
    return {
        "cases": len(rows),
        "outcomes": _counts(rows),
        "by_dtype": by_dtype,
        "ways": ways,
        "steps": steps,
        "operators": {op: _of_operator([r for r in rows if r["op"] == op]) for op in names},
    }


def _counts(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    counts = Counter(row["outcome"] for row in rows)
    return {name: counts[name] for name in OUTCOMES if counts[name]}


def _of_operator(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """How it is run in each dtype, and which variants are not right there."""
    found = {}
    for dtype in dict.fromkeys(r["dtype"] for r in rows):
        mine = [r for r in rows if r["dtype"] == dtype]
        way = next((how(r["steps"]) for r in mine if r["variant"] == "plain" and r["outcome"] == "right"), "")
        others = [f"{r['variant']} {r['outcome']}" for r in mine if r["outcome"] != "right"]
        found[dtype] = ", ".join(filter(None, [way, *others]))
    return found


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title=f"{len({r['op'] for r in rows})} operators, {len(rows)} cases")
    names = OUTCOMES[::-1]
    for column in ("dtype", "variant", *names):
        shown.add_column(column, justify="left" if column in ("dtype", "variant") else "right")
    for dtype in DTYPES:
        for variant in VARIANTS:
            counts = _counts(r for r in rows if (r["dtype"], r["variant"]) == (dtype, variant))
            if counts:
                shown.add_row(dtype, variant, *(str(counts.get(n, "")) for n in names))
    shown.add_row("all", "", *(str(_counts(rows).get(n, "")) for n in names))
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.op_db", description=__doc__)
    add = parser.add_argument
    add("--only", default="", metavar="A,B", help="operators by name; by default all")
    add("--dtypes", default=",".join(DTYPES), metavar="A,B", help="by default all: %(default)s")
    add("--variants", default=",".join(VARIANTS), metavar="A,B",
        help="; ".join(f"{name}: {what}" for name, what in VARIANTS.items()))  # fmt: skip
    add("--samples", type=int, default=6, help="of each operator and dtype, at most")
    add("--show", default="", metavar="OUTCOMES", help=f"list these too; of {', '.join(OUTCOMES)}")
    add("--log", default=str(ROOT / "build" / "op_db.jsonl"), metavar="FILE", help="the outcome of each case")
    add("--no-resume", dest="resume", action="store_false", help="begin anew")
    add("--json", default="", metavar="FILE", help="by default tests/campaigns/results/op_db.json; or none")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
