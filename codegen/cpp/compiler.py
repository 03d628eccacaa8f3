"""The C++ compiler of this machine: path, version, instruction set and flags."""

import functools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fusec.config import compiler_command
from fusec.errors import BuildError

_IEEE = ("-fno-fast-math", "-fno-unsafe-math-optimizations", "-fno-rounding-math")
"""These come after the flags in $CXX: fast math drops NaN, infinities and, at load, denormals in the whole process."""
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    *_IEEE,
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fwrapv",
    "-Wno-psabi",
    "-fopenmp",
)
LINK_FLAGS = ("-shared", "-fPIC", "-nostartfiles", "-nodefaultlibs", "-Wl,-z,relro", "-Wl,-z,now")
"""Without -fopenmp: the OpenMP symbols then resolve to the runtime that torch has loaded, so both share threads.

Without start files: one of them, crtfastmath.o, makes the processor flush denormals to zero.
"""
_SECONDS = 120
_HALF_PRODUCTS = {"bf16": ("AVXNECONVERT", "AMX_BF16"), "f16": ("AVXNECONVERT", "AVX512FP16", "AMX_FP16")}
"""Instructions of x86 for products of half types that the vendor library (oneDNN) uses."""


@dataclass(frozen=True)
class Compiler:
    """A compiler whose version and target are known."""

    command: tuple[str, ...]
    machine_flags: tuple[str, ...]
    """Flags to use all instructions of this machine."""
    identity: str
    """Its predefined macros: version and instruction set."""

    @property
    def lanes(self) -> int:
        """Floats in a register."""
        return 16 if "#define __AVX512F__ 1" in self.identity else 8

    @property
    def has_bf16_products(self) -> bool:
        """Return whether a fast instruction multiplies pairs of bfloat16 and adds into float32; see ``dot.h``."""
        return self._has("AVX512BF16") and not self._has("AVX512FP16") and "__clang__" not in self.identity

    def is_the_librarys(self, half: str) -> bool:
        """Return whether the machine has instructions for products of a half type that generated code does not use.

        On untested machines it is assumed.
        """
        pairs = half == "bf16" and self._has("AVX512BF16") and "__clang__" in self.identity
        return not self._has("AVX2") or pairs or any(map(self._has, _HALF_PRODUCTS[half]))

    def _has(self, feature: str) -> bool:
        return f"#define __{feature}__ 1" in self.identity

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags of a compilation."""
        return (*self.machine_flags, *FLAGS)


_running: set["subprocess.Popen[bytes]"] = set()
_starting = threading.Lock()
"""Held while a compiler starts, so that `stop_compilers` misses none."""
_timed_out: set[tuple[str, ...]] = set()


def run_compiler(command: Sequence[str], arguments: Sequence[str]) -> str:
    """Run a compiler and return its output; after a time-out it is not run again in this process.

    Raises:
        BuildError: where it fails, with the first of its messages.
    """
    where = " ".join((*command, *arguments))
    fix = "find out why it hangs, or name another compiler in $CXX; then start this process anew"
    if tuple(command) in _timed_out:
        why = f"it did not end within {_SECONDS} s before"
        raise BuildError("the C++ compiler is not run any more in this process", where=where, why=why, fix=fix)
    try:
        code, written, messages = _run([*command, *arguments])
    except subprocess.TimeoutExpired as error:
        _timed_out.add(tuple(command))
        why = f"it did not end within {_SECONDS} s"
        raise BuildError("the C++ compiler was stopped", where=where, why=why, fix=fix) from error
    except OSError as error:
        raise BuildError("the C++ compiler did not run", where=command[0], why=str(error)) from error
    if code:
        message = "\n".join(messages.splitlines()[:12]) or f"it ended with code {code}"
        raise BuildError("the C++ compiler refused a kernel", where=where, why=message)
    return written


def stop_compilers() -> None:
    """Stop all running compilers: ctrl-C in a terminal does not reach them."""
    with _starting:
        for process in tuple(_running):
            _kill(process)


def _run(command: list[str]) -> tuple[int, str, str]:
    """Run a command and return its code, output and messages; on a time-out its process group is killed."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as messages:
        # Files, not pipes: a server started by a compiler's wrapper would hold a pipe open for as long as it runs.
        with _starting:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=messages, start_new_session=True
            )
            _running.add(process)
        try:
            code = process.wait(_SECONDS)
        except BaseException:
            _kill(process)
            process.wait()
            raise
        finally:
            _running.discard(process)
        output.seek(0)
        messages.seek(0)
        return code, output.read().decode(errors="replace"), messages.read().decode(errors="replace")


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def find_compiler() -> Compiler:
    """Return the C++ compiler of ``$CXX``, or c++, g++ or clang++; queried once per process.

    Raises:
        BuildError: where there is none, or none that works.
    """
    chosen = compiler_command()
    reason = BuildError(
        "no C++ compiler was found",
        why=f"$CXX names {chosen[0]}, which is not there" if chosen else "none of c++, g++ and clang++ is on the path",
        fix="install g++ (Debian, Ubuntu: apt install g++), or name a compiler in $CXX",
    )
    for candidate in [chosen] if chosen else [("c++",), ("g++",), ("clang++",)]:
        path = shutil.which(candidate[0])
        answer = _ask((path, *candidate[1:])) if path is not None else reason
        if isinstance(answer, Compiler):
            return answer
        reason = answer
    raise reason


@functools.cache
def _ask(command: tuple[str, ...]) -> Compiler | BuildError:
    reason = BuildError("the C++ compiler did not run", where=command[0])
    for machine_flags in (("-march=native",), ("-mcpu=native",), ()):
        try:
            identity = run_compiler(command, [*machine_flags, "-x", "c++", "-E", "-dM", "/dev/null"])
        except BuildError as error:
            reason = error
            continue
        return Compiler(command, machine_flags, identity)
    return reason
