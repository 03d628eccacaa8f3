"""Does a generated kernel leave its tensors, or compute what C++ does not define?

``python -m tests.campaigns.sanitize`` builds the kernels of random graphs, and of the tests that are named, with GCC's
AddressSanitizer and UndefinedBehaviorSanitizer, conversions of floats among them, and runs them: random graphs on
inputs between guard pages. Planted faults come first; each must be reported.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness import progress, report
from tests.campaigns.record import write_result
from tests.campaigns.sanitize.planted import REPORTS

CHECKS = "address,undefined,float-cast-overflow"
_REPORT = re.compile(r"^.*(ERROR: AddressSanitizer|runtime error:)", re.MULTILINE)
WORKER = ("-m", "tests.campaigns.sanitize.worker")
_COMPILER = """\
for word; do shift; [ "$word" = -O3 ] && word=-O1; set -- "$@" "$word"; done
exec {command} "$@"
"""
"""Checks keep -O3 busy six times as long as -O1, and -O1 leaves more to check."""
BATCH = 50
"""Graphs per process."""
ROOT = Path(__file__).parents[3]
TESTS = ("tests/codegen/test_lookups.py", "tests/codegen/test_dynamic_indices.py", "tests/codegen/test_products.py",
         "tests/codegen/test_attention.py", "tests/codegen/test_windows.py", "tests/codegen/test_cpp_functions.py",
         "tests/codegen/test_byte_products.py", "tests/codegen/test_byte_groups.py",
         "tests/codegen/test_packed_keys.py", "tests/codegen/test_weight_prologues.py",
         "tests/codegen/test_grouped_gemm.py", "tests/frontend/test_selections.py", "tests/codegen/test_sorts.py",
         "tests/frontend/test_searches.py", "tests/codegen/test_dots.py", "tests/codegen/test_many_rows.py",
         "tests/codegen/test_paged_attention.py", "tests/codegen/test_paged_writes.py",
         "tests/codegen/test_paired_queries.py", "tests/codegen/test_paired_lookups.py",
         "tests/codegen/test_packed_lookups.py", "tests/codegen/test_ragged_attention.py",
         "tests/codegen/test_attention_caches.py", "tests/codegen/test_narrow_integers.py",
         "tests/quantization/test_cache.py",
         "tests/backend/test_values.py", "tests/backend/test_storage.py")  # fmt: skip


_WANTED = "not triton and not replaced"
"""The tests: none of Triton's, nor those that compare libraries, which hold the place of their source here."""


@dataclass(frozen=True)
class Sanitized:
    """A folder with its own cache of kernels, and processes that sanitizers watch."""

    folder: Path

    def run(self, words: Sequence[str]) -> str:
        """Run Python with these words; return what sanitizers report, or what a process that fails says at last."""
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=self._environment(),
            capture_output=True,
            text=True,
            errors="replace",
        )
        said = done.stdout + done.stderr
        found = _REPORT.search(said)
        return said[found.start() :][:3000] if found else said[-3000:] if done.returncode else ""

    def _environment(self) -> dict[str, str]:
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        flags = [f"-fsanitize={CHECKS}", f"-fsanitize-recover={CHECKS}", "-fno-omit-frame-pointer", "-g1"]
        script = self.folder / "compiler.sh"
        script.write_text(_COMPILER.format(command=shlex.join([*compiler, *flags])))
        return os.environ | {
            "CXX": shlex.join(["env", "LD_PRELOAD=", "sh", str(script)]),
            "LD_PRELOAD": " ".join(_asked(compiler, f"-print-file-name=lib{name}.so") for name in ("asan", "ubsan")),
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=0",
            "FUSEC_CACHE_DIR": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }

    @property
    def kernels(self) -> int:
        """Different libraries that were built."""
        return len({path.name for path in self.folder.rglob("*.so")})


def _asked(compiler: Sequence[str], question: str) -> str:
    return subprocess.run([*compiler, question], capture_output=True, text=True, check=True).stdout.strip()


def main(words: list[str] | None = None) -> int:
    """Run; the exit status is 1 where anything is reported, or a planted fault is not."""
    options = _parser().parse_args(words)
    console = report(options.width)
    with tempfile.TemporaryDirectory(prefix="fusec-sanitize-") as name, progress() as bar:
        sanitized = Sanitized(Path(name))
        missed = [fault for fault, text in REPORTS.items() if text not in sanitized.run([*WORKER, fault])]
        seeds = [str(options.seed + i) for i in range(options.graphs)]
        tests = options.tests.split(",") if options.tests else []
        task = bar.add_task("sanitize", total=len(seeds) + len(tests))
        found: dict[str, str] = {}
        for start in range(0, len(seeds), BATCH):
            batch = seeds[start : start + BATCH]
            found |= _graphs(sanitized, batch)
            bar.advance(task, len(batch))
        for test in tests:
            folder = f"--basetemp={sanitized.folder / Path(test).stem}"
            if text := sanitized.run(["-m", "pytest", "-q", "--capture=sys", "-k", _WANTED, folder, test]):
                found[test] = text
            bar.advance(task)
        kernels = sanitized.kernels
    for where, text in found.items():
        console.print(f"{where}: {text[:1500]}", highlight=False, markup=False)
    console.print(f"{kernels} kernels, {len(found)} reports; planted and not found: {', '.join(missed) or 'none'}")
    passed = not found and not missed
    content = {"kernels": kernels, "graphs": options.graphs, "tests": options.tests, "checks": CHECKS,
               "reports": found, "planted": list(REPORTS), "missed": missed, "passed": passed}  # fmt: skip
    if options.json != "none":
        written = write_result("sanitize", options.seed, content, options.json)
        console.print(f"written to {written}", style="dim", highlight=False)
    return int(not passed)


def _graphs(sanitized: Sanitized, words: Sequence[str]) -> dict[str, str]:
    """Run graphs in a process; where anything is reported, halves again, until it has a name."""
    text = sanitized.run([*WORKER, *words])
    if not text or len(words) == 1:
        return {words[0]: text} if text else {}
    half = len(words) // 2
    return _graphs(sanitized, words[:half]) | _graphs(sanitized, words[half:]) or {" ".join(words): text}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.sanitize", description=__doc__)
    add = parser.add_argument
    add("--graphs", type=int, default=1500, metavar="N", help="random graphs")
    add("--seed", type=int, default=0, help="of the first")
    add("--tests", default=",".join(TESTS), metavar="A,B", help="files of tests; by default %(default)s")
    add("--json", default="", metavar="FILE", help="by default tests/campaigns/results/sanitize.json; or none")
    add("--width", type=int, default=None, help="of what is printed")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
