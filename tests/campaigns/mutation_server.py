"""A warm process that runs tests on copies of the source tree, each in a fork of its own.

It is started as a script and imports what the tests need of others, but nothing of fusec: a fork then imports fusec
from the copy it is given. Requests and answers are lines of JSON. When its caller goes, it kills what it runs,
removes its folder and goes too.
"""

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WARM = ("torch", "torch._dynamo", "torch._inductor.utils", "torch._export", "torch._functorch.aot_autograd",
        "torch.export", "torch.testing", "triton", "triton.compiler", "triton.language", "sympy", "numpy", "networkx",
        "hypothesis", "pytest", "_pytest.assertion.rewrite", "rich.table", "typer", "transformers",
        "transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert")  # fmt: skip
INVALID = 70
"""Exit status where the mistake keeps its own module from being imported."""
MEMORY = 8 << 30
"""Bytes that a fork may take beyond what it starts with."""


class Order:
    """Runs quick tests first, with the kernels that were built before; tells what failed and which test ran what."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.known, self.kernels, self.report = request["known"], request["kernels"], request["report"]
        self.tree, self.cover = request["tree"], request["cover"]
        self.seconds: dict[str, float] = {}
        self.failed = ""
        self.coverage: Any = None

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Quick ones first, unknown ones last."""
        items.sort(key=lambda item: self.known.get(item.nodeid, 1e9))

    def pytest_sessionstart(self, session: Any) -> None:
        """The tests' own cache of kernels starts with copies (links) of those of the unchanged tree."""
        base = session.config._tmp_path_factory.getbasetemp()
        if self.kernels and Path(self.kernels).is_dir():
            shutil.copytree(self.kernels, base / "kernels", copy_function=os.link)
        if self.cover:
            import coverage

            files = [f"{self.tree}/{name}" for name in self.cover]
            self.coverage = coverage.Coverage(data_file=None, config_file=False, include=files)
            self.coverage.start()

    def pytest_runtest_setup(self, item: Any) -> None:
        """What runs from now on runs for this test."""
        if self.coverage is not None:
            self.coverage.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Time, and the first failure."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        """A test file that cannot be imported."""
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_sessionfinish(self) -> None:
        """Tell."""
        told = {"seconds": self.seconds, "failed": self.failed, "lines": self.lines()}
        Path(self.report).write_text(json.dumps(told))

    def lines(self) -> dict[str, dict[int, list[int]]]:
        """The tests (as positions in ``seconds``) that run each line of each file."""
        if self.coverage is None:
            return {}
        self.coverage.stop()
        data, number = self.coverage.get_data(), {name: i for i, name in enumerate(self.seconds)}
        found = {}
        for path in data.measured_files():
            rows = data.contexts_by_lineno(path).items()
            tests = {line: sorted(number[name] for name in names if name) for line, names in rows}
            found[os.path.relpath(path, self.tree)] = tests
        return found


def _child(request: dict[str, Any]) -> int:
    tree = request["tree"]
    os.setsid()
    os.chdir(tree)
    with open(request["log"], "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    seconds, memory = request["cpu_seconds"], _size() + MEMORY
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))  # at the second it is killed, and no one knows why
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    os.environ.update(PYTHONPATH=tree, HYPOTHESIS_PROFILE="ci", PYTHONDONTWRITEBYTECODE="1", HF_HUB_OFFLINE="1")
    sys.dont_write_bytecode = True
    sys.path.insert(0, tree)
    import pytest

    if request["module"]:
        try:
            importlib.import_module(request["module"])
        except Exception:
            traceback.print_exc()
            return INVALID
    order = Order(request)
    words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={request['scratch']}"]
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # its plugins are warm as well
    status = int(pytest.main([*words, *request["tests"]], plugins=[order]))
    import fusec

    if not fusec.__file__.startswith(tree):
        print(f"fusec came from {fusec.__file__}", file=sys.stderr)
        return INVALID
    return status


def _size() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def serve(modules: Sequence[str]) -> None:
    """Answer until the caller goes."""
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        child = os.fork()
        if child == 0:
            status = 99
            try:
                status = _child(request)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status, late = _wait(child, request["seconds"])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        answer = {"status": status, "late": late, "cpu_seconds": cpu, "seconds": time.monotonic() - start}
        print(json.dumps(answer), file=answers, flush=True)


def _wait(child: int, seconds: float) -> tuple[int, bool]:
    """The exit status of a child (negative: the signal that ended it), and whether it was stopped for its time."""
    end, parent = time.monotonic() + seconds, os.getppid()
    late = False
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return code, late or code == -signal.SIGXCPU
        if os.getppid() != parent:  # nobody waits for the answer
            _kill(child)
        elif not late and time.monotonic() > end:
            late = True
            _kill(child)
        time.sleep(0.02)


def _kill(child: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script, whose files have the names of others' modules
    try:
        with contextlib.suppress(BrokenPipeError):
            serve(sys.argv[2:] or WARM)
    finally:
        shutil.rmtree(sys.argv[1], ignore_errors=True)
        with contextlib.suppress(OSError):
            Path(sys.argv[1]).parent.rmdir()  # the last one to go
