"""Would the tests notice a mistake in the compiler? Small mistakes are made mechanically, one at a time.

``python -m tests.campaigns.mutants``; a run that was stopped goes on where it was.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.syntax import Syntax
from rich.table import Table

from bench.harness import progress, report
from bench.record import provenance
from tests.campaigns.mutation import Mutant, files, mutants, sampled
from tests.campaigns.mutation_server import INVALID
from tests.campaigns.record import RESULTS, write_result

ROOT = Path(__file__).parents[2]
ARGUED = Path(__file__).parent / "mutants_argued.json"
"""Mutants that change no behaviour a test could see, by key, each with its reason."""
PROMISED = 0.98
SOURCES = ("fusec", "passes", "codegen", "models", "tests", "bench", "examples", "docs", "pyproject.toml", "README.md",
           "CONTRIBUTING.md", "Makefile")  # fmt: skip

_OF_LOOPS = (
    "analysis",
    "passes/test_grouping.py",
    "codegen/test_attention.py",
    "codegen/test_attention_caches.py",
    "codegen/test_dynamic_indices.py",
    "codegen/test_lookups.py",
    "codegen/test_products.py",
    "codegen/test_program.py",
    "codegen/test_schedule_reductions.py",
)
CONCERNED: dict[str, tuple[str, ...]] = {
    "fusec/rewriting": ("rewriting", "passes", "test_user_fusions.py", "test_fusions.py"),
    "passes/canonicalize": ("passes", "rewriting", "verify/test_rewrites.py", "test_fusions.py"),
    "passes/raising": ("passes/test_spellings.py", "test_fusions.py"),
    "passes/fusion": ("passes/test_spellings.py", "test_fusions.py"),
    "passes": ("passes", "codegen/test_attention.py", "codegen/test_program.py", "test_compiler.py"),
    "fusec/loops": _OF_LOOPS,
    "fusec/analysis": _OF_LOOPS,
    "codegen/triton": ("codegen/test_triton_printer.py", "codegen/test_triton_regions.py",
                       "codegen/test_triton_compile.py", "codegen/test_triton_contractions.py",
                       "codegen/test_triton_attention.py", "codegen/test_dynamic_indices.py"),
    "codegen/triton/schedules": ("codegen/test_triton_contractions.py", "codegen/test_triton_attention.py",
                               "codegen/test_triton_compile.py"),
    "codegen/cpp": ("codegen/test_cpp.py", "codegen/test_cpp_functions.py", "codegen/test_dots.py",
                    "codegen/test_many_rows.py", "codegen/test_program.py", "codegen/test_launch_batches.py"),
    "codegen": ("codegen/test_bounds.py", "codegen/test_schedule_reductions.py", "codegen/test_attention.py",
                "codegen/test_attention_caches.py", "codegen/test_many_rows.py", "codegen/test_dynamic_indices.py",
                "codegen/test_lookups.py", "codegen/test_products.py", "codegen/test_program.py",
                "codegen/test_sizes.py", "codegen/test_launch_batches.py"),
}  # fmt: skip
"""The tests (below tests/) that a folder's files are the subject of: they run first."""
UNCONCERNED = (
    "test_layout.py",
    "test_packaging.py",
    "test_documentation.py",
    "bench",
    "campaigns",
    "models/test_weights.py",
)
"""Tests of something else than the compiler."""
STAGES = 4
"""See ``_stages``: the last is all tests."""
LIMIT = 5.0
"""A mistake may make the tests this much slower, and then counts as found."""


@dataclass
class Server:
    """A warm process (``mutation_server``) and its folder."""

    process: subprocess.Popen[str]
    folder: Path

    @classmethod
    def start(cls, folder: Path, *modules: str) -> "Server":
        """Start one that has imported these modules, by default what the tests need; it ends when this process does."""
        folder.mkdir()
        script = Path(__file__).parent / "mutation_server.py"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, str(script), str(folder), *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, cwd=folder, env=environment,
        )  # fmt: skip
        return cls(process, folder)

    def ask(self, tree: Path, tests: list[str], seconds: float, module: str = "", **more: Any) -> dict[str, Any]:
        """Run tests on a tree; how it ended, and what was told about it."""
        scratch, told = self.folder / "scratch", self.folder / "report.json"
        told.unlink(missing_ok=True)
        request = {
            "tree": str(tree), "tests": tests, "module": module, "cpu_seconds": int(seconds), "seconds": 4 * seconds,
            "log": str(self.folder / "log"), "report": str(told), "scratch": str(scratch), "known": {}, "kernels": "",
            "cover": [],
        }  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request | more), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("the process that runs the tests is gone")
        known = json.loads(told.read_text()) if told.exists() else {"seconds": {}, "failed": "", "lines": {}}
        return json.loads(answer) | known | {"log": (self.folder / "log").read_text(errors="replace")[-4000:]}


@dataclass
class Baseline:
    """What the tests do on the unchanged tree."""

    tree: Path
    kernels: Path
    tests: list[str]
    seconds: dict[str, float]
    """By test."""
    lines: dict[str, dict[str, list[int]]]
    """By file and line, the tests that run it, as positions in ``seconds``."""
    cpu_seconds: float

    def running(self, mutant: Mutant) -> list[str]:
        """The tests that run the place of a mutant, quickest first."""
        known, names = self.lines.get(mutant.path, {}), list(self.seconds)
        tests = {names[i] for line in mutant.lines for i in known.get(str(line), ())}
        return sorted(tests, key=self.seconds.__getitem__)

    def limit(self, tests: list[str]) -> float:
        """Seconds of CPU that tests may take."""
        usual = sum(s for name, s in self.seconds.items() if any(name.startswith(t) for t in tests))
        return 60 + LIMIT * usual


def main(words: list[str] | None = None) -> int:
    """Run what is asked; the exit status is 1 when too many mistakes go unnoticed."""
    options = _parser().parse_args(words)
    console = report(options.width)
    target = Path(options.json) if options.json else RESULTS / "mutants.json"
    lock = threading.Lock()
    with workplace() as folder:
        tree = copied(folder / "unchanged")
        if options.again:
            content = json.loads(target.read_text())
            left = unnoticed(tree, content)
        else:
            chosen = [m for m in sampled(tree, options.count, options.seed) if options.only in f"{m.path} {m.key}"]
            content = {"count": options.count, "stages": options.stages, "tree": fingerprint(tree)}
            content["mutants"] = _known(target, content["tree"], chosen, options.keep)
            left = [m for m in chosen if m.key not in content["mutants"]]
        servers = [Server.start(folder / f"server-{i}") for i in range(options.workers)]
        if left:
            near = list(dict.fromkeys(t for m in left for t in concerned(tree, m.path)))
            tests = near if options.stages < STAGES else all_tests(tree)
            baseline = measure(servers[0], tree, tests, Path(options.baseline) if options.baseline else None)
            if not options.again:
                content["baseline_cpu_seconds"] = baseline.cpu_seconds

        def work(mutant: Mutant, server: Server) -> None:
            row = judge(mutant, server, baseline, options.stages)
            if options.again:
                row["again"] = content["again"]["commit"]
            with lock:
                content["mutants"][mutant.key] = row
                write_result("mutants", options.seed, content | _counts(content["mutants"]), str(target))
                bar.console.print(
                    f"{row['outcome']:9} {row['cpu_seconds']:6.1f} s  {mutant.path} {mutant.function}: "
                    f"{mutant.operator}", highlight=False, soft_wrap=True,
                )  # fmt: skip
                bar.advance(task)

        with progress() as bar:
            task = bar.add_task("mutants", total=len(left))
            side_by_side(work, left, servers)
    content |= _counts(content["mutants"])
    console.print(table(content["mutants"]))
    for row in content["mutants"].values():
        if row["outcome"] == "survived":
            console.print(f"[red]survived[/] {row['key']} {row['function']}: {row['operator']}", highlight=False)
            console.print(Syntax(row["difference"], "diff", background_color="default"))
    content["passed"] = content["rate"] >= PROMISED
    console.print(f"written to {write_result('mutants', options.seed, content, str(target))}", style="dim")
    return int(not content["passed"])


def unnoticed(tree: Path, content: dict[str, Any]) -> list[Mutant]:
    """The mutants of an earlier run that survived it, as they are in the tree of today.

    Where the code is gone or another one the row says ``removed``. What the earlier run was made with stays as it is,
    and with what it is judged again stands beside it.
    """
    now = provenance(content["seed"])
    content["again"] = {name: now[name] for name in ("commit", "changed", "command", "time")}
    there = {m.key: m for name in files(tree) for m in mutants(name, (tree / name).read_bytes())}
    rows = content["mutants"]
    survived = [k for k, r in rows.items() if r["outcome"] in ("survived", "argued") and not _settled(r)]
    for key in survived:
        if key not in there:
            rows[key] |= {"outcome": "removed", "by": "", "again": now["commit"]}
    return [there[key] for key in survived if key in there]


def _settled(row: dict[str, Any]) -> bool:
    return row["outcome"] == "argued" and row["key"] in argued()


def side_by_side(work: Callable[[Mutant, Server], None], mutants: list[Mutant], servers: list[Server]) -> None:
    """Do the work on every mutant, each server one at a time; what stops this process stops all of it at once."""
    waiting, failed = deque(mutants), list[BaseException]()

    def keep_working(server: Server) -> None:
        try:
            while waiting and not failed:
                work(waiting.popleft(), server)
        except BaseException as problem:
            failed.append(problem)

    threads = [threading.Thread(target=keep_working, args=(server,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not failed:
        time.sleep(0.1)
    if failed:
        raise failed[0]


def judge(mutant: Mutant, server: Server, baseline: Baseline, stages: int = STAGES) -> dict[str, Any]:
    """What the tests say of a mutant, the likeliest to notice it first."""
    source = (baseline.tree / mutant.path).read_bytes()
    tree = server.folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(baseline.tree, tree, symlinks=True)
    (tree / mutant.path).write_bytes(mutant.applied(source))
    for compiled in (tree / mutant.path).parent.glob(f"__pycache__/{Path(mutant.path).stem}.*.pyc"):
        compiled.unlink()
    row: dict[str, Any] = {
        "key": mutant.key, "path": mutant.path, "function": mutant.function, "operator": mutant.operator,
        "difference": mutant.difference(source), "outcome": "survived", "by": "", "cpu_seconds": 0.0,
        "stages": stages,
    }  # fmt: skip
    for tests in _stages(mutant, baseline, stages):
        found = server.ask(
            tree, tests, baseline.limit(tests), module_of(mutant.path), known=baseline.seconds,
            kernels=str(baseline.kernels),
        )  # fmt: skip
        row["cpu_seconds"] += round(found["cpu_seconds"], 1)
        if found["status"] == 0:
            continue
        row["outcome"], row["by"] = "killed", found["failed"] or ("crash" if found["status"] < 0 else "")
        if found["late"]:
            row["by"] = "time"
        elif found["status"] == INVALID:
            row["outcome"], row["by"] = "invalid", found["log"].strip().splitlines()[-1]
        break
    if row["outcome"] == "survived" and mutant.key in argued():
        row["outcome"], row["by"] = "argued", argued()[mutant.key]
    return row


_EACH = 6
"""Tests of each file that come first."""


def _stages(mutant: Mutant, baseline: Baseline, count: int) -> list[list[str]]:
    """The tests in the order in which they are asked.

    Of those that run the place of the mutant the quickest of each file; then the others that run it; then those that
    its file is the subject of; then all there are. The later ones are asked since some places run once in a process,
    for whatever test comes first. What the first ``count`` of these stages do not find, later ones may.
    """
    running = baseline.running(mutant)
    first, seen = [], Counter[str]()
    for name in running:
        seen[name.partition("::")[0]] += 1
        first += [name] if seen[name.partition("::")[0]] <= _EACH else []
    stages = [first, [name for name in running if name not in first]]
    stages.append(subjects := concerned(baseline.tree, mutant.path))
    stages.append([t for t in baseline.tests if t not in subjects])
    return [tests for tests in stages[:count] if tests]


def concerned(tree: Path, path: str) -> list[str]:
    """The test files that a source file is the subject of."""
    folder = next(name for name in CONCERNED if path.startswith(name))
    found = dict.fromkeys(t for name in CONCERNED[folder] for t in _test_files(tree, name))
    return [t for t in found if t in all_tests(tree)]


def all_tests(tree: Path) -> list[str]:
    """Every test file of the compiler."""
    left_out = {t for name in UNCONCERNED for t in _test_files(tree, name)}
    return [t for t in _test_files(tree, "") if t not in left_out]


def _test_files(tree: Path, name: str) -> list[str]:
    place = tree / "tests" / name
    found = [place] if place.is_file() else sorted(place.rglob("test_*.py"))
    return [p.relative_to(tree).as_posix() for p in found]


def module_of(path: str) -> str:
    """The name that a source file is imported by."""
    parts = Path(path).with_suffix("").parts
    parts = parts if parts[0] == "fusec" else ("fusec", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def copied(tree: Path) -> Path:
    """A copy of the sources as they are now, each compiled whatever the time of its file is."""
    tree.mkdir()
    for name in SOURCES:
        there = ROOT / name
        if there.is_dir():
            shutil.copytree(there, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "results"))
        elif there.exists():
            shutil.copy2(there, tree / name)
    folders = (*SOURCES[:4], "bench", "examples", "tests/campaigns")
    words = ["compileall", "-q", "--invalidation-mode", "unchecked-hash", *folders]
    subprocess.run([sys.executable, "-m", *words], cwd=tree, check=True)
    return tree


def measure(server: Server, tree: Path, tests: list[str], kept: Path | None) -> Baseline:
    """Run tests on the copy of the tree as it is; they have to pass. What is kept of the same tree is not run again."""
    kernels, place = tree.parent / "kernels", kept / "baseline.json" if kept else None
    before = json.loads(place.read_text()) if place and place.exists() else {}
    if kept and before.get("tree") == fingerprint(tree) and set(before["tests"]) >= set(tests):
        return Baseline(tree, kept / "kernels", tests, before["seconds"], before["lines"], before["cpu_seconds"])
    found = server.ask(
        tree, tests, 7200, "fusec", known=before.get("seconds", {}), kernels=str(kept / "kernels") if kept else "",
        cover=files(tree),
    )  # fmt: skip
    if found["status"] != 0:
        raise SystemExit(f"the tests fail on the unchanged tree: {found['failed']}\n{found['log']}")
    shutil.copytree(server.folder / "scratch" / "kernels", kernels, ignore=shutil.ignore_patterns("*.lock", ".new-*"))
    cpu_seconds = round(found["cpu_seconds"], 1)
    if kept and place:
        shutil.copytree(kernels, kept / "kernels", dirs_exist_ok=True)
        told = {"tree": fingerprint(tree), "tests": tests, "cpu_seconds": cpu_seconds}
        place.write_text(json.dumps(told | {name: found[name] for name in ("seconds", "lines")}))
    return Baseline(tree, kernels, tests, found["seconds"], found["lines"], cpu_seconds)


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder that is removed in the end; those of runs that were killed go now."""
    for old in Path(tempfile.gettempdir()).glob("fusec-mutants-*"):
        if not Path("/proc", old.name.rpartition("-")[2]).exists():
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.gettempdir()) / f"fusec-mutants-{os.getpid()}"
    folder.mkdir()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fingerprint(tree: Path) -> str:
    """A digest of everything that decides what a run finds."""
    digest = hashlib.sha256()
    for name in SOURCES[:5]:
        for path in sorted((tree / name).rglob("*.[ph]*")):
            if path.suffix in (".py", ".h"):
                digest.update(path.relative_to(tree).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _known(target: Path, tree: str, chosen: list[Mutant], keep: bool) -> dict[str, Any]:
    """The outcomes of a run that was stopped; with ``keep``, what another tree's tests killed counts as killed."""
    if not target.exists():
        return {}
    before = json.loads(target.read_text())
    same = before.get("tree") == tree
    wanted = {m.key for m in chosen}
    rows = {k: row for k, row in before.get("mutants", {}).items() if k in wanted}
    return {k: row for k, row in rows.items() if same or (keep and row["outcome"] in ("killed", "invalid"))}


def argued() -> dict[str, str]:
    """The reasons for mutants that no test can tell from the original."""
    return {key: entry["reason"] for key, entry in json.loads(ARGUED.read_text()).items()} if ARGUED.exists() else {}


OUTCOMES = ("killed", "survived", "argued", "removed", "invalid")


def _counts(rows: dict[str, Any]) -> dict[str, Any]:
    outcomes = [row["outcome"] for row in rows.values()]
    counts = {name: outcomes.count(name) for name in OUTCOMES}
    judged = counts["killed"] + counts["survived"]
    by_time = sum(row["by"] == "time" for row in rows.values())
    return {"counts": counts | {"killed_by_time": by_time}, "rate": counts["killed"] / judged if judged else 0.0}


def table(rows: dict[str, Any]) -> Table:
    """One line per file."""
    total = _counts(rows)
    shown = Table(title=f"Mutants: {total['rate']:.1%} of {len(rows)} found")
    columns = ("killed", "killed_by_time", *OUTCOMES[1:])
    for column in ("file", "killed", "of these by time", *OUTCOMES[1:]):
        shown.add_column(column, justify="left" if column == "file" else "right")
    for path in sorted({row["path"] for row in rows.values()}):
        counts = _counts({k: row for k, row in rows.items() if row["path"] == path})["counts"]
        shown.add_row(path, *(str(counts[k]) for k in columns))
    counts = total["counts"]
    shown.add_row("all", *(str(counts[k]) for k in columns))
    shown.caption = "argued: survived, and why no test can see them is in mutants_argued.json; not in the share"
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.mutants", description=__doc__)
    add = parser.add_argument
    add("--count", type=int, default=240, help="about how many mutants")
    add("--workers", type=int, default=2)
    add("--only", default="", metavar="TEXT", help="of these, those with TEXT in path or key")
    add("--stages", type=int, default=STAGES, help="of tests, the likeliest first; fewer find at most as much")
    add("--keep", action="store_true", help="what a run on another tree killed stays killed, as tests were only added")
    add("--again", action="store_true", help="judge what survived the run in --json by the tests that there are now")
    add(
        "--baseline",
        default="",
        metavar="DIR",
        help="keep there what the tests do on the unchanged tree, for the next run",
    )
    add("--seed", type=int, default=0)
    add("--json", default="", metavar="FILE", help="by default tests/campaigns/results/mutants.json")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
