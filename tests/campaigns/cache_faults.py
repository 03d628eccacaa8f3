"""Does a cache that was killed, filled, damaged or forged ever give a wrong result, or hold a process up?

``python -m tests.campaigns.cache_faults``

Each process compiles a small function whose result says which one it is. It has to be right, by generated kernels, or
where none can be built or loaded by ATen with the reason; and afterwards the cache holds whole entries only.
"""

import argparse
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.table import Table

from bench.harness import console, report
from fusec.cache import read_entry
from fusec.pruning import entries
from fusec.scratch import sweep
from tests.campaigns import cache_damage
from tests.campaigns.cache_worker import Report, Worker, warm_up
from tests.campaigns.record import write_result

LONGEST_KILL = 2.0
"""Seconds after which a process is killed at the latest; many of them are done by then."""
KILLED = "it died with code -9"
Spoil = Callable[[Path, random.Random], None]


@dataclass
class Found:
    """What came of one fault."""

    runs: int = 0
    kernels: int = 0
    aten: int = 0
    """Right by ATen, with the reason."""
    bad: list[str] = field(default_factory=list)
    note: str = ""

    def judge(self, answer: Report | str, may_fall_back: bool = False) -> None:
        """Count one process."""
        self.runs += 1
        if isinstance(answer, str):
            self.bad.append(answer)
        elif not answer.right:
            self.bad.append("its result is wrong")
        elif answer.kernels:
            self.kernels += 1
        elif may_fall_back and answer.reasons:
            self.aten += 1
        else:
            self.bad.append(f"through ATen: {'; '.join(answer.reasons) or 'without a reason'}")

    def check_whole(self, cache: Path) -> None:
        """Hold every entry against its digest."""
        for entry in entries(cache):
            try:
                read_entry(entry.path)
            except OSError as error:
                self.bad.append(f"{entry.path.suffix}: {error.strerror}")


@dataclass
class Lab:
    """Where caches are made and spoiled."""

    folder: Path
    options: argparse.Namespace
    rng: random.Random
    made: int = 0

    def new(self) -> Path:
        """Return the path of a cache that is not there yet."""
        self.made += 1
        return self.folder / f"cache-{self.made}"

    def warm(self) -> Path:
        """Return a cache that knows functions 0 and 1."""
        template, copy = self.folder / "template", self.new()
        if not template.exists():
            Worker(0, template).report()
            Worker(1, template).report()
        shutil.copytree(template, copy)
        return copy


def killed(lab: Lab) -> Found:
    """Two processes that build the same kernel are killed at random moments, until one of them is done."""
    found, cache, number, kills = Found(), lab.new(), 0, 0
    while kills < lab.options.kills:
        workers = [Worker(number, cache), Worker(number, cache)]
        for worker in workers:
            worker.kill(lab.rng.uniform(0, LONGEST_KILL) / len(workers))
        done = [answer for worker in workers if (answer := worker.report()) != KILLED]
        kills += len(workers) - len(done)
        number += bool(done)
        for answer in done:
            found.judge(answer)
        found.check_whole(cache)
    for again in range(number + 1):
        found.judge(Worker(again, cache).report())
    for place in (cache, lab.folder / "tmp"):
        sweep(place)
        found.bad += [f"left behind: {path.name}" for path in place.glob("fusec-scratch-*")]
    found.note = f"besides {kills} that were killed"
    return found


def concurrent(lab: Lab) -> Found:
    """Processes build one kernel at once: it is compiled once."""
    found, cache, log, program = Found(), lab.new(), lab.folder / "compiled", lab.folder / "cxx"
    program.write_text(f'#!/bin/sh\ncase "$*" in *-c*) echo . >> {log};; esac\nexec c++ "$@"\n')
    program.chmod(0o700)
    workers = [
        Worker(7, cache, partial(os.environ.__setitem__, "CXX", str(program))) for _ in range(lab.options.processes)
    ]
    for worker in workers:
        found.judge(worker.report())
    compiled = len(log.read_text().split())
    found.note = f"{compiled} compiled, 2 are needed"
    found.bad += [found.note] if compiled != 2 else []
    found.check_whole(cache)
    return found


def removed_meanwhile(lab: Lab) -> Found:
    """Entries and all go while processes build."""
    found, cache = Found(), lab.warm()
    workers = [Worker(i % 3, cache) for i in range(min(8, lab.options.processes))]
    while any(worker.process.is_alive() and not worker.answer.poll(0.02) for worker in workers):
        shutil.rmtree(cache, ignore_errors=True)
    for worker in workers:
        found.judge(worker.report())
    return found


def spoiled(spoil: Spoil, lab: Lab) -> Found:
    """Each entry of a cache is spoiled; the next processes are right, and replace them."""
    found = Found()
    for _ in range(lab.options.runs):
        cache = lab.warm()
        for entry in sorted(entries(cache)):
            spoil(entry.path, lab.rng)
        for number in (0, 1, 0):
            found.judge(Worker(number, cache).report())
        found.check_whole(cache)
    return found


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[None]:
    """Mount a file system in memory."""
    place.mkdir(mode=0o700, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(("mode=700", *options)), "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


def full_disk(lab: Lab) -> Found:
    """The cache's file system (32 KiB of memory) is full; that of $TMPDIR is not."""
    found, place = Found(), lab.new()
    with mounted(place, "size=32k"):
        for number in range(lab.options.runs):
            found.judge(Worker(number, place / "cache").report())
        found.check_whole(place / "cache")
    return found


def full_disks(lab: Lab) -> Found:
    """No file may be longer than 2,000 bytes (RLIMIT_FSIZE), be it the compiler's."""
    found, limit = Found(), partial(resource.setrlimit, resource.RLIMIT_FSIZE, (2000, 2000))
    for cache in (lab.new(), lab.warm()):
        found.judge(Worker(0, cache, limit).report(), may_fall_back=True)
        found.check_whole(cache)
        found.judge(Worker(0, cache).report())
    return found


def read_only(lab: Lab) -> Found:
    """The cache's file system is mounted read-only, warm."""
    found, place = Found(), lab.new()
    with mounted(place):
        shutil.copytree(lab.warm(), place / "cache")
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        for number in (0, 5):
            found.judge(Worker(number, place / "cache").report())
    return found


def not_executable(lab: Lab) -> Found:
    """The file systems of the cache and of $TMPDIR are mounted noexec."""
    found, place = Found(), lab.new()
    with mounted(place, "noexec"):
        (place / "tmp").mkdir()
        before = partial(setattr, tempfile, "tempdir", str(place / "tmp"))
        for number in (0, 0, 5):
            found.judge(Worker(number, place / "cache", before).report())
    return found


def _directory(spoil: Callable[[Path], object], lab: Lab) -> Found:
    """The cache's directory is not to be trusted, or none; kernels are kept elsewhere, with a warning."""
    found, cache = Found(), lab.warm()
    spoil(cache)
    answer = Worker(0, cache).report()
    found.judge(answer)
    if isinstance(answer, Report) and not any("temporary directory" in reason for reason in answer.reasons):
        found.bad.append("nothing is said of the directory")
    return found


def _replace(cache: Path, make: Callable[[Path], object]) -> None:
    shutil.rmtree(cache)
    make(cache)


ROOTS = {"full disk", "read-only", "noexec", "foreign entry", "foreign directory"}
"""What only root can make."""
FAULTS: dict[str, Callable[[Lab], Found]] = {
    "kill -9": killed,
    "many at once": concurrent,
    "removed meanwhile": removed_meanwhile,
    "full disk": full_disk,
    "full disks": full_disks,
    "read-only": read_only,
    "noexec": not_executable,
    "truncated": partial(spoiled, cache_damage.cut),
    "bit flipped": partial(spoiled, cache_damage.flip),
    "empty": partial(spoiled, cache_damage.empty),
    "stale": partial(spoiled, cache_damage.exchange),
    "forged": partial(spoiled, cache_damage.forge),
    "FIFO": partial(spoiled, cache_damage.fifo),
    "FIFO as lock": partial(spoiled, cache_damage.lock_fifo),
    "socket": partial(spoiled, cache_damage.socket_file),
    "folder": partial(spoiled, cache_damage.folder),
    "link": partial(spoiled, cache_damage.link),
    "writable entry": partial(spoiled, cache_damage.let_others_write),
    "foreign entry": partial(spoiled, cache_damage.give_away),
    "foreign directory": partial(_directory, lambda cache: os.chown(cache, cache_damage.NOBODY, cache_damage.NOBODY)),
    "writable directory": partial(_directory, lambda cache: cache.chmod(0o777)),
    "FIFO as directory": partial(_directory, lambda cache: _replace(cache, os.mkfifo)),
    "file as directory": partial(_directory, lambda cache: _replace(cache, Path.touch)),
    "link as directory": partial(_directory, lambda cache: _replace(cache, lambda c: c.symlink_to(c.parent))),
}


def main(words: list[str] | None = None) -> int:
    """Run the command."""
    options = _parser().parse_args(words)
    shown, found = report(), dict[str, Found]()
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder), options, random.Random(options.seed))
        warm_up(lab.folder)
        for name in filter(None, options.faults.split(",")):
            console.print(name, style="dim")
            if name in ROOTS and os.geteuid() != 0:
                found[name] = Found(note="not run: only root can make it")
            else:
                found[name] = FAULTS[name](lab)
    shown.print(_table(found))
    for name, one in found.items():
        for reason in dict.fromkeys(one.bad):
            shown.print(f"[red]BROKEN[/]: {name}: {reason}", highlight=False)
    content = {"faults": {name: one.__dict__ for name, one in found.items()}}
    path = write_result("cache_faults", options.seed, content, options.json)
    shown.print(f"written to {path}", style="dim", highlight=False)
    return int(any(one.bad for one in found.values()))


def _table(found: dict[str, Found]) -> Table:
    table = Table("fault", title="A cache under faults")
    for title in ("processes", "by kernels", "by ATen, with the reason", "faults"):
        table.add_column(title, justify="right")
    table.add_column("")
    for name, one in found.items():
        table.add_row(name, *map(str, (one.runs, one.kernels, one.aten, len(one.bad))), one.note)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.cache_faults", description=__doc__)
    add = parser.add_argument
    add("--faults", default=",".join(FAULTS), metavar="A,B", help="of those that are there, all by default")
    add("--kills", type=int, default=1000, help="processes that are killed")
    add("--processes", type=int, default=64, help="that build one kernel at once")
    add("--runs", type=int, default=8, help="caches that are spoiled in one way")
    add("--seed", type=int, default=0)
    add("--json", default="", metavar="FILE", help="by default tests/campaigns/results/cache_faults.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
