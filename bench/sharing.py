"""Does a model keep its pace beside a busy process, its results under many threads, and to the threads it is given?

``python -m bench.sharing``

The busy process is Python in an endless loop, bound to no core, which goes and stops by signals, so that a candidate's
quiet calls and those beside it alternate. Every single call is timed: a rare one that waits for a preempted thread is
what this is about.
"""

import argparse
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from bench.harness import OURS, console, print_promises, report
from bench.machine import wait_until_idle
from bench.numerics import DTYPES
from bench.peers import peer
from bench.record import write_result
from bench.workloads import HIDDEN, LAYERS, Call, calls, decode, llama

PEERS = ("eager", "inductor")
MOST = 3.0
"""Time of a step beside a busy process over a quiet one's, at most: the median, and nine of ten."""
PRESENT = 0.25
"""Share of a core that the busy process has to have had; with less it was not there."""
CALLERS, PROMPT = 8, 16
"""Threads that call one model, and tokens of what each gives it."""
AT_WORK = 0.1
"""Share of the process's time on cores that a thread has when it counts as one at work."""


class BusyProcess:
    """One that does nothing else than use a core; it stands still but within `going`."""

    def __enter__(self) -> "BusyProcess":
        self.process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        self.process.send_signal(signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def go(self) -> None:
        """Be busy, and let the scheduler notice."""
        self.process.send_signal(signal.SIGCONT)
        time.sleep(0.1)

    def stop(self) -> None:
        """Stand still."""
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(0.02)

    @property
    def seconds(self) -> float:
        """Time it has had on cores."""
        return _on_core(Path(f"/proc/{self.process.pid}"))


@dataclass(frozen=True)
class Beside:
    """A candidate's calls, quiet and beside a busy process."""

    quiet_ms: float
    median_ms: float
    slow_ms: float
    """Nine of ten calls beside the process take no longer."""
    calls: int
    """Beside the process."""
    busy: float
    """Share of a core that the process had meanwhile."""

    @property
    def ratio(self) -> float:
        """The median's, over the quiet one."""
        return self.median_ms / self.quiet_ms

    @property
    def slow(self) -> float:
        """That of nine in ten."""
        return self.slow_ms / self.quiet_ms


def main(words: list[str] | None = None) -> int:
    """Answer all three; status 1 where a promise is broken."""
    options = _parser().parse_args(words)
    warnings.filterwarnings("ignore")
    wait_until_idle(options.allow_busy)
    dtype = DTYPES[options.dtype]
    prepared = decode(dtype, options.seed, hidden=options.hidden, layers=options.layers)
    candidates, failed = calls(prepared, OURS, filter(None, options.peers.split(",")))
    console.print("  beside a busy process, and by numbers of threads", style="dim")
    with torch.no_grad():
        found = beside(candidates, options.rounds, options.seconds)
        threads = {n: at_work(candidates[OURS], n, options.seconds) for n in (1, 2)}
        elsewhere = {n: at_work(candidates[OURS], n, options.seconds, in_a_thread=True) for n in (1, 2)}
        results = {n: _logits(candidates[OURS], n) for n in (1, 2)}
    console.print(f"  called by {CALLERS} threads", style="dim")
    together = {name: callers(name, dtype, options) for name in dict.fromkeys((OURS, "eager"))}
    shown = report(options.width)
    shown.print(_table(found))
    for name, one in together.items():
        shown.print(f"{name}: {one['one']:.1f} calls a second by one thread, {one['many']:.1f} by {CALLERS}")
    ours = found[OURS]
    promises = {
        f"beside a busy process at most {MOST} times as long, median": ours.ratio <= MOST,
        f"beside a busy process at most {MOST} times as long, nine of ten": ours.slow <= MOST,
        "the busy process was there": all(one.busy >= PRESENT for one in found.values()),
        f"{CALLERS} threads that call one model have the results of one": together[OURS]["same"],
        "one thread gives the bits of two": torch.equal(results[1], results[2]),
        **{f"set_num_threads({n}): {n} at work": threads[n] == n for n in threads},
        **{f"set_num_threads({n}), called by another thread: {n} at work": elsewhere[n] == n for n in elsewhere},
    }
    print_promises(shown, promises)
    content = {
        "hidden": options.hidden, "layers": options.layers, "dtype": options.dtype,
        "beside a busy process": {name: asdict(one) | {"ratio": one.ratio, "slow": one.slow}
                                  for name, one in found.items()},
        "callers": together, "threads at work": {"caller": threads, "another": elsewhere},
        "not measured": failed, "promises": promises,
    }  # fmt: skip
    console.print(f"written to {write_result('sharing', options.seed, content, options.json)}", style="dim")
    return int(not all(promises.values()))


def beside(candidates: dict[str, Call], rounds: int, seconds: float) -> dict[str, Beside]:
    """Each in turn for some seconds, quiet and then beside the process, in interleaved rounds."""
    quiet, slow = ({name: list[float]() for name in candidates} for _ in range(2))
    had, passed = dict.fromkeys(candidates, 0.0), dict.fromkeys(candidates, 0.0)
    for call in candidates.values():
        _timed(call, seconds / 2)
    with BusyProcess() as process:
        for _ in range(rounds):
            for name, call in candidates.items():
                quiet[name] += _timed(call, seconds / 2)
                process.go()
                before, start = process.seconds, time.perf_counter()
                slow[name] += _timed(call, seconds)
                had[name] += process.seconds - before
                passed[name] += time.perf_counter() - start
                process.stop()
    return {
        name: Beside(
            1e3 * statistics.median(quiet[name]),
            1e3 * statistics.median(slow[name]),
            1e3 * statistics.quantiles(slow[name], n=10, method="inclusive")[-1],
            len(slow[name]),
            had[name] / passed[name],
        )
        for name in candidates
    }


def at_work(call: Call, threads: int, seconds: float, in_a_thread: bool = False) -> int:
    """How many threads of this process are on cores while the call runs again and again, where torch has so many."""

    def count() -> int:
        with torch.no_grad():
            call()
            before, end = _tasks(), time.process_time() + seconds
            while time.process_time() < end:  # of cores, as a thread that has no work left still spins for a while
                call()
            used = [seconds - before.get(task, 0.0) for task, seconds in _tasks().items()]
        return sum(one > AT_WORK * sum(used) for one in used)

    return _with_threads(threads, lambda: _in_thread(count) if in_a_thread else count())


def callers(name: str, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """Calls a second of one model by one thread and by many, each with inputs of its own, and whether all is the same.

    What each gives it is given by one thread first.
    """
    torch._dynamo.reset()
    model = llama(dtype, options.seed, options.hidden, options.layers)
    run, draw = peer(name, model), torch.Generator().manual_seed(options.seed)
    given = [torch.randint(3, model.config.vocab_size, (1, PROMPT), generator=draw) for _ in range(CALLERS)]

    def call(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return run(tokens, use_cache=False).logits

    def again(tokens: Tensor, want: Tensor) -> tuple[int, bool]:
        together.wait()
        same, done, end = True, 0, time.perf_counter() + options.seconds
        while not done or time.perf_counter() < end:
            same &= torch.equal(call(tokens), want)
            done += 1
        return done, same

    alone, found = [call(tokens) for tokens in given], {}
    for threads in (1, CALLERS):
        together, start = threading.Barrier(threads), time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            done = list(pool.map(again, given[:threads], alone))
        found[threads] = sum(n for n, _ in done) / (time.perf_counter() - start), all(same for _, same in done)
    different = not any(torch.equal(alone[0], other) for other in alone[1:])
    return {"one": found[1][0], "many": found[CALLERS][0], "same": found[1][1] and found[CALLERS][1] and different}


def _logits(call: Call, threads: int) -> Tensor:
    return _with_threads(threads, lambda: call().logits.clone())  # type: ignore[attr-defined]


def _with_threads(threads: int, run: Callable[[], Any]) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


def _in_thread(run: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def _timed(call: Call, seconds: float) -> list[float]:
    """Seconds of every call until so many have passed; two at least."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 2 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _tasks() -> dict[str, float]:
    """Seconds on cores of every thread of this process."""
    return {task.name: _on_core(task) for task in Path("/proc/self/task").iterdir()}


def _on_core(process: Path) -> float:
    return int((process / "schedstat").read_text().split()[0]) / 1e9


def _table(found: dict[str, Beside]) -> Table:
    shown = Table(title="A step of decoding, quiet and beside a busy process on the same cores")
    for column in ("", "quiet", "median beside", "nine of ten", "the process had"):
        shown.add_column(column, justify="right" if column else "left")
    for name, one in found.items():
        shown.add_row(
            name, f"{one.quiet_ms:.2f} ms", f"{one.median_ms:.2f} ms (× {one.ratio:.2f})",
            f"{one.slow_ms:.2f} ms (× {one.slow:.2f})", f"{one.busy:.0%} of a core",
        )  # fmt: skip
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=__doc__)
    add = parser.add_argument
    add("--peers", default=",".join(PEERS), metavar="A,B")
    add("--hidden", type=int, default=HIDDEN)
    add("--layers", type=int, default=LAYERS)
    add("--dtype", default="float32", choices=sorted(DTYPES))
    add("--rounds", type=int, default=8)
    add("--seconds", type=float, default=1.0, help="of each candidate beside the process, in each round")
    add("--seed", type=int, default=0)
    add("--allow-busy", action="store_true", help="measure beside other processes, to see that the command runs")
    add("--json", default="", metavar="FILE", help="by default bench/results/sharing.json")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
