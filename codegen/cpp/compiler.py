"""The C++ compiler of this machine: its command, features and flags."""

import ctypes
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
"""Override flags in $CXX: fast math drops NaN, infinities and, at load, denormals for the whole process."""
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
"""Without -fopenmp, so that OpenMP symbols resolve to the runtime that torch has loaded, and both share threads.

Without start files: one of them, crtfastmath.o, makes the processor flush denormals to zero.
"""
_SECONDS = 120
_AMX = ("AMX_TILE", "AMX_BF16", "AMX_INT8")
_WITHOUT_AMX = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
"""Numbers of Linux on x86-64: a system call, its request, and what is requested."""
_MATMULS = {
    "bf16": ("AVXNECONVERT",),
    "f16": ("AVXNECONVERT", "AVX512FP16", "AMX_FP16"),
    "i8": (),
}
"""Extensions of x86 for matmuls of a type that the vendor's library (oneDNN) uses, and fusec does not."""


@dataclass(frozen=True)
class Compiler:
    """A compiler, and its identity."""

    command: tuple[str, ...]
    machine_flags: tuple[str, ...]
    """Flags that enable all instructions of this machine."""
    identity: str
    """Its predefined macros: version and instruction set."""

    @property
    def lanes(self) -> int:
        """The number of floats in a register."""
        return 16 if "#define __AVX512F__ 1" in self.identity else 8

    @property
    def has_amx(self) -> bool:
        """True if ``dot.h`` multiplies tiles of bfloat16 and bytes with Intel AMX."""
        return all(map(self._has, _AMX)) and "__clang__" not in self.identity

    @property
    def has_bf16_products(self) -> bool:
        """True if one fast instruction multiplies pairs of bfloat16 and adds them to floats; see ``dot.h``."""
        return self._has("AVX512BF16") and not self._has("AVX512FP16") and "__clang__" not in self.identity

    def vendor_is_faster(self, dtype: str) -> bool:
        """Return whether the vendor's library has instructions for matmuls of a narrow type that fusec does not use.

        On untested machines it is assumed to have.
        """
        plain = "__clang__" in self.identity and (dtype == "i8" or (dtype == "bf16" and self._has("AVX512BF16")))
        return not self._has("AVX2") or plain or any(map(self._has, _MATMULS[dtype]))

    def _has(self, feature: str) -> bool:
        return f"#define __{feature}__ 1" in self.identity

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags of a compilation."""
        return (*self.machine_flags, *FLAGS)


_running: set["subprocess.Popen[bytes]"] = set()
_starting = threading.Lock()
"""Held from the start of a compiler until it is in `_running`, so that `stop_compilers` misses none."""
_timed_out: set[tuple[str, ...]] = set()


def run_compiler(command: Sequence[str], arguments: Sequence[str]) -> str:
    """Run a compiler, and return its output; after a timeout it is not run again in this process.

    Raises:
        BuildError: if it fails, with the first lines of its messages.
    """
    where = " ".join((*command, *arguments))
    fix = "find out why it hangs, or name another compiler in $CXX; then restart this process"
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
    """Stop all running compilers, which a keyboard interrupt does not reach."""
    with _starting:
        for process in tuple(_running):
            _kill(process)


def _run(command: list[str]) -> tuple[int, str, str]:
    """Run a command, and return its exit code, stdout and stderr; at a timeout kill its process group."""
    late = threading.Event()

    def stop() -> None:
        late.set()
        _kill(process)

    # `wait` with a timeout looks only every 50 ms whether the process has ended.
    timer = threading.Timer(_SECONDS, stop)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as messages:
        # Files instead of pipes, which a server started by a compiler wrapper (such as sccache) would keep open.
        with _starting:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=messages, start_new_session=True
            )
            _running.add(process)
        timer.start()
        try:
            code = process.wait()
        except BaseException:
            _kill(process)
            process.wait()
            raise
        finally:
            timer.cancel()
            _running.discard(process)
        if late.is_set():
            raise subprocess.TimeoutExpired(command, _SECONDS)
        output.seek(0)
        messages.seek(0)
        return code, output.read().decode(errors="replace"), messages.read().decode(errors="replace")


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def find_compiler() -> Compiler:
    """Return the compiler in ``$CXX``, or else c++, g++ or clang++; each is queried once in a process.

    Raises:
        BuildError: if there is none, or none that works.
    """
    chosen = compiler_command()
    reason = BuildError(
        "no C++ compiler was found",
        why=f"$CXX names {chosen[0]}, which is not there" if chosen else "none of c++, g++ and clang++ is on the path",
        fix="install g++ (Debian, Ubuntu: apt install g++), or name a compiler in $CXX",
    )
    for candidate in [chosen] if chosen else [("c++",), ("g++",), ("clang++",)]:
        path = shutil.which(candidate[0])
        answer = _query((path, *candidate[1:])) if path is not None else reason
        if isinstance(answer, Compiler):
            return answer
        reason = answer
    raise reason


@functools.cache
def _query(command: tuple[str, ...]) -> Compiler | BuildError:
    reason = BuildError("the C++ compiler did not run", where=command[0])
    preprocess = ("-x", "c++", "-E", "-dM", "/dev/null")
    for machine_flags in (("-march=native",), ("-mcpu=native",), ()):
        try:
            identity = run_compiler(command, [*machine_flags, *preprocess])
        except BuildError as error:
            reason = error
            continue
        if "#define __AMX_" in identity and not _permits_amx():
            machine_flags = (*machine_flags, *_WITHOUT_AMX)
            identity = run_compiler(command, [*machine_flags, *preprocess])
        return Compiler(command, machine_flags, identity)
    return reason


def _permits_amx() -> bool:
    """Ask Linux to let this process use the registers of AMX, which it saves at switches only where they are used."""
    try:
        return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0
    except (OSError, AttributeError):
        return False
