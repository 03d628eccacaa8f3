"""The call of the C++ compiler: whatever it does, the process neither hangs nor gets wrong numbers."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusec.cache import Cache
from fusec.codegen.cpp import build, compiler
from fusec.codegen.cpp.compiler import find_compiler, run_compiler
from fusec.codegen.cpp.loading import load
from fusec.config import Config
from fusec.errors import BuildError

ROOT = Path(__file__).parents[2]
KERNEL = """#include "vec.h"
extern "C" EXPORT int64_t one(void* const* buffers, const int64_t*, fusec::Team&) {
  float* x = (float*)buffers[0];
  for (int i = 0; i < 8; i++) x[i] = x[i] != x[i] ? 7 : (x[i] + 1e8f) - 1e8f;
  return 0;
}
"""
Script = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a program for a shell that stands for a compiler."""

    def write(text: str, name: str = "cxx") -> Path:
        path = tmp_path / name
        path.write_bytes(b"#!/bin/sh\n" + text.encode("latin-1"))
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_SECONDS", 0.5)
    monkeypatch.setattr(compiler, "_timed_out", set())


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_all_that_a_compiler_started_ends_when_its_time_is_over(
    tmp_path: Path, script: Script, impatient: None
) -> None:
    """Its children hold the pipes of their output open; waiting for the end of those took as long as they ran."""
    path, started = script(f"sh -c 'echo $$ > {tmp_path}/child; sleep 60; true' &\nsleep 60; true"), time.monotonic()
    with pytest.raises(BuildError, match=r"did not end within 0\.5 s"):
        run_compiler([str(path)], [])
    assert time.monotonic() - started < 20
    child = int((tmp_path / "child").read_text())
    while is_running(child):
        assert time.monotonic() - started < 20
        time.sleep(0.01)


def test_a_compiler_that_hung_is_not_waited_for_again(script: Script, impatient: None) -> None:
    path = str(script('[ "$1" = fine ] || sleep 60'))
    assert run_compiler([path], ["fine"]) == ""
    with pytest.raises(BuildError, match="stopped"):
        run_compiler([path], ["slow"])
    with pytest.raises(BuildError, match=r"not run any more in this process[^$]*\$CXX"):
        run_compiler([path], ["fine"])
    assert run_compiler([str(script("exit 0", "other"))], []) == ""


def test_a_server_that_a_compiler_leaves_behind_holds_nobody_up(script: Script, impatient: None) -> None:
    started = time.monotonic()
    assert run_compiler([str(script("sleep 3 &\necho done"))], []) == "done\n"
    assert time.monotonic() - started < 2.5


def test_messages_need_not_be_utf_8(script: Script) -> None:
    assert run_compiler([str(script("echo 'f\xfcr'"))], []) == "f\ufffdr\n"
    with pytest.raises(BuildError, match="verf\ufffdgbar"):
        run_compiler([str(script("echo 'nicht verf\xfcgbar' >&2; exit 1"))], [])


def test_a_compiler_without_a_message_has_a_reason(script: Script) -> None:
    with pytest.raises(BuildError, match="code -9"):
        run_compiler([str(script("kill -9 $$"))], [])


@pytest.mark.parametrize(
    "flags", ["-ffast-math", "-Ofast", "-funsafe-math-optimizations -ffinite-math-only", "-flto -Ofast"]
)
def test_fast_math_in_the_environment_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.setenv("CXX", f"{find_compiler().command[0]} {flags}")
    build.forget_loaded()
    (kernel,) = build.build([("one", KERNEL)], Config(cache_dir=str(tmp_path)))
    assert isinstance(kernel, build.CppKernel), kernel
    x = torch.tensor([torch.nan, 1.0, 3.0, 2.0, 5.0, 6.0, 7.0, 100.0])
    kernel([x], [])
    assert x.tolist() == [7.0, 0.0, 0.0, 0.0, 8.0, 8.0, 8.0, 96.0]
    for library in tmp_path.glob("*.so"):
        content = Cache(tmp_path).read(library.stem, ".so")
        assert content is not None and load(content)  # in this thread: the mode is a thread's own
    assert torch.tensor(1e-40) * 1 > 0, "the processor takes denormals for zero"


def test_a_library_that_was_cut_is_refused(tmp_path: Path) -> None:
    """The linker does not notice that: the process dies."""
    build.forget_loaded()
    build.build([("one", KERNEL)], Config(cache_dir=str(tmp_path)))
    library = next(tmp_path.glob("*.so"))
    content = Cache(tmp_path).read(library.stem, ".so")
    assert content is not None and load(content)
    for length in (*range(0, len(content), 500), len(content) - 1):
        with pytest.raises(BuildError, match="does not load"):
            load(content[:length])


def test_an_interrupt_stops_the_compilers(tmp_path: Path, script: Script) -> None:
    """They are a process group of their own, which ctrl-C in a terminal does not reach."""
    real = find_compiler().command[0]
    path = script(f'case "$*" in *dM*) exec {real} "$@";; esac\necho $$ > {tmp_path}/$$.pid\nsleep 600; true')
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore it
    code += "from fusec.codegen.cpp import build; from fusec.config import Config; build.build([], Config())"
    settings = os.environ | {"CXX": str(path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=settings, stderr=subprocess.PIPE) as process:
        while not list(tmp_path.glob("*.pid")):
            time.sleep(0.05)
        process.send_signal(2)
        _, messages = process.communicate(timeout=50)
    assert b"KeyboardInterrupt" in messages
    assert not any(is_running(int(file.stem)) for file in tmp_path.glob("*.pid"))
