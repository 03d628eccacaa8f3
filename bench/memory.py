"""Does a compiled model take more memory than eager?

``python -m bench.memory``

Every figure is of a fresh process, of its resident memory. *Calls*: the weights, and how far calls after the first ones
rise above what lies there before them; held against eager. *Process*: the peak of all its life, with every import, the
making of the model and the compile; held against ``torch.compile`` that compiles nothing, since what Dynamo and
AOTAutograd take is torch's own, and some 40 MiB, whatever the model.
"""

import argparse
import ctypes
import gc
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from rich.table import Table

from bench.harness import BASELINE, OURS, print_promises, progress, report
from bench.peers import peer
from bench.record import write_result
from bench.workloads import WORKLOADS, Workload

TITLES = "decode 1, float32;prefill 128, float32;BERT-base 8×128, float32"
MOST = 1.05
"""Of ours over another's, at most."""
NOTHING = "aot_eager"
"""The backend that compiles nothing."""
AGAINST = {"calls": BASELINE, "process": NOTHING}
"""Whose memory each kind is held against."""
CALLS = 3
"""How many go before those that are measured, and how many are."""
MARK = "memory "


def main(words: list[str] | None = None) -> int:
    """Measure each candidate on each workload; status 1 where ours takes more than promised."""
    options = _parser().parse_args(words)
    if options.one:
        title, name = options.one.split("/")
        print(MARK + json.dumps(peaks(_workload(title), name, options.seed)))
        return 0
    titles = options.workloads.split(";")
    names = list(dict.fromkeys((BASELINE, NOTHING, OURS, *filter(None, options.peers.split(",")))))
    found: dict[str, dict[str, dict[str, float]]] = {title: {} for title in titles}
    with progress() as bar:
        task = bar.add_task("measure", total=len(titles) * len(names))
        for title in titles:
            for name in names:
                bar.update(task, description=f"{title}, {name}")
                found[title][name] = _in_fresh_process(title, name, options.seed)
                bar.advance(task)
    shown = report(options.width)
    shown.print(_table(found, names))
    promises = {
        f"{title}, {kind}: at most {MOST} of {other}'s memory": one[OURS][kind] <= MOST * one[other][kind]
        for title, one in found.items()
        for kind, other in AGAINST.items()
    }
    print_promises(shown, promises)
    path = write_result("memory", options.seed, {"mib": found, "promises": promises}, options.json)
    shown.print(f"written to {path}", style="dim", highlight=False)
    return int(not all(promises.values()))


def peaks(workload: Workload, name: str, seed: int) -> dict[str, float]:
    """Peaks of this process, in MiB: up to where it is warm, and in calls from there on."""
    warnings.filterwarnings("ignore")
    prepared = workload.prepare(workload.dtype, seed)
    call = prepared.call(peer(name, prepared.model, prepared.dynamic))
    with torch.no_grad():
        for _ in range(CALLS):
            call()
        process = mib("VmHWM")
        rest = at_rest()  # or calls would take what the first ones left to the allocator
        for _ in range(CALLS):
            call()
        peak = mib("VmHWM")
    weights = sum(x.nbytes for x in (*prepared.model.parameters(), *prepared.model.buffers())) / 2**20
    return {"calls": weights + peak - rest, "process": max(process, peak), "at rest": rest, "weights": weights}


def at_rest() -> float:
    """Return what this process holds, in MiB, once all that is free went back to the system; its peak begins here."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return mib("VmRSS")


def mib(name: str) -> float:
    """An entry of this process's status."""
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) / 1024


def _workload(title: str) -> Workload:
    return next(workload for workload in WORKLOADS if workload.title == title)


def _in_fresh_process(title: str, name: str, seed: int) -> dict[str, float]:
    return answer_of("bench.memory", "--one", f"{title}/{name}", "--seed", str(seed))


def answer_of(*words: str) -> dict[str, float]:
    """Return what a module measures in a process of its own, and prints after MARK."""
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    answer = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if answer is None:
        raise SystemExit(f"python -m {' '.join(words)} measured nothing\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(answer.removeprefix(MARK))
    return result


def _table(found: dict[str, dict[str, dict[str, float]]], names: list[str]) -> Table:
    shown = Table(title="Most memory in MiB (over eager's)")
    shown.add_column("")
    for kind in AGAINST:
        for name in names:
            shown.add_column(f"{kind}, {name}", justify="right")
    for title, one in found.items():
        pairs = [(one[name][kind], one[BASELINE][kind]) for kind in AGAINST for name in names]
        shown.add_row(title, *(f"{mib:.0f} ({mib / eager:.2f})" for mib, eager in pairs))
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    add = parser.add_argument
    add("--workloads", default=TITLES, metavar="A;B", help="as bench.cpu names them")
    add("--peers", default="inductor", metavar="A,B", help="others beside eager, aot_eager and fusec")
    add("--seed", type=int, default=0)
    add("--one", default="", help=argparse.SUPPRESS)
    add("--json", default="", metavar="FILE", help="by default bench/results/memory.json")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
