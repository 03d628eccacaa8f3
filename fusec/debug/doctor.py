"""Checks of an installation: compiler, instructions, threads, OpenMP, cache, settings, and a kernel that is run."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusec.config import Config, unknown_settings
from fusec.errors import BuildError, FusecError

LEAST_TORCH, LEAST_TRITON = (2, 11), (3, 6)
_SHOWN = 3
_LEAST_MB = 200
"""Free space that kernels of a large model and their objects may need."""

State = Literal["fine", "note", "wrong"]


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    name: str
    state: State
    """``fine``; ``note`` costs speed or is unusual; with ``wrong``, models are not compiled, or not correctly."""
    detail: str
    fix: str = ""
    """The remedy; "" where nothing is to be done."""


def checks() -> Iterator[Check]:
    """Yield the outcome of each check, in order; one that raises is wrong."""
    for name, check in _CHECKS.items():
        try:
            yield check(name)
        except FusecError as error:
            yield Check(name, "wrong", error.reason, error.fix)
        except Exception as error:
            yield Check(name, "wrong", f"{type(error).__name__}: {error}", "report it, with the output of `fusec env`")


def _versions(name: str) -> Check:
    import torch

    detail = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    if _numbers(torch.__version__) < LEAST_TORCH:
        return Check(name, "wrong", detail, f"install torch {LEAST_TORCH[0]}.{LEAST_TORCH[1]} or newer")
    return Check(name, "fine", detail)


def _compiler(name: str) -> Check:
    from fusec.codegen.cpp.compiler import find_compiler, run_compiler

    try:
        found = find_compiler()
    except BuildError as error:
        return Check(name, "wrong", f"{error.what}: models run through ATen", error.fix)
    version = run_compiler(found.command, ["--version"]).splitlines()[0]
    if not found.machine_flags:
        fix = "kernels use the baseline instructions of the architecture; use a compiler that knows -march=native"
        return Check(name, "note", f"{version}, without -march=native", fix)
    return Check(name, "fine", f"{version}, {' '.join(found.machine_flags)}")


def _instructions(name: str) -> Check:
    from fusec.analysis.machine import cpu_name
    from fusec.codegen.cpp.compiler import find_compiler

    identity = find_compiler().identity
    used = [word for word in ("AVX2", "AVX512F", "AVX512VNNI", "AVX512BF16", "AMX_TILE") if f"__{word}__" in identity]
    flags = re.search(r"^flags\s*:(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    have = set(flags.group(1).split()) if flags else set()
    lacking = [w for w, flag in (("AVX2", "avx2"), ("AVX512F", "avx512f")) if flag in have and w not in used]
    detail = f"{cpu_name()}: {', '.join(used) or 'the baseline'}"
    if lacking:
        return Check(name, "note", f"{detail}; not {', '.join(lacking)}", "remove -march or -mno options from $CXX")
    return Check(name, "fine", detail)


def _threads(name: str) -> Check:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    detail = f"{threads} threads on {cores} cores"
    if threads > cores:
        fix = f"set OMP_NUM_THREADS={cores}, or call torch.set_num_threads({cores})"
        return Check(name, "note", f"{detail}: they wait for each other", fix)
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > cores:
        return Check(name, "note", f"{detail}, load {os.getloadavg()[0]:.1f}", "measure on an idle machine")
    return Check(name, "fine", detail)


def _openmp(name: str) -> Check:
    import torch  # noqa: F401

    mapped = {Path(line.split()[-1]).name for line in _read("/proc/self/maps").splitlines() if "/" in line}
    found = sorted(n for n in mapped if re.match(r"lib(gomp|iomp5|omp)\b", n))
    if len(found) > 1:
        fix = "load one alone: with several, each has its own threads (often a package beside torch brings another one)"
        return Check(name, "note", ", ".join(found), fix)
    return Check(name, "fine", ", ".join(found) or "none is loaded")


def _cache(name: str) -> Check:
    import shutil

    from fusec.cache import read_entry, reason_against
    from fusec.pruning import entries

    path = Config.from_environment().cache_path()
    near = next(folder for folder in (path, *path.parents) if folder.exists())
    if not os.access(near, os.W_OK):
        return Check(name, "note", f"{near} cannot be written: kernels are built again in each process",
                     "set FUSEC_CACHE_DIR to a folder of your own")  # fmt: skip
    if path.exists() and (reason := reason_against(path)):
        return Check(name, "note", f"{path} is not used: {reason}", "fix its permissions, or set FUSEC_CACHE_DIR")
    found, bad = entries(path), 0
    for entry in found:
        try:
            read_entry(entry.path)
        except OSError:
            bad += 1
    free = shutil.disk_usage(near).free // 1_000_000
    detail = f"{path}: {len(found)} entries, {free:,} MB free"
    if bad:
        return Check(name, "note", f"{detail}; {bad} damaged, which are built again", "fusec cache verify lists them")
    return Check(name, "note" if free < _LEAST_MB else "fine", detail, "free some space" if free < _LEAST_MB else "")


def _edits(name: str) -> Check:
    from fusec.codegen.program.edits import edits

    found = edits(Config.from_environment())
    if not found:
        return Check(name, "fine", "none")
    fix = "`fusec kernels list MODEL` names those that are used; `fusec kernels revert` removes them"
    return Check(name, "note", f"{len(found)} in the cache: {', '.join(path.name for path in found[-_SHOWN:])}", fix)


def _profile(name: str) -> Check:
    from fusec.analysis.machine import MEASURED
    from fusec.codegen import target_named

    machine = target_named("cpp").machine(Config.from_environment())
    if machine.source == MEASURED:
        return Check(name, "fine", machine.name)
    return Check(name, "note", f"{machine.name}: never measured, so a modest one is assumed", "fusec machine measure")


def _settings(name: str) -> Check:
    off = [v for v in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE") if os.environ.get(v, "0") not in ("0", "")]
    if off:
        return Check(name, "wrong", f"{off[0]} is set: torch.compile compiles nothing", f"unset {off[0]}")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("0", ""):
        return Check(name, "note", "TRITON_INTERPRET is set: Triton kernels run on the CPU", "unset TRITON_INTERPRET")
    if unknown := unknown_settings():
        return Check(name, "note", "; ".join(unknown), "correct the name or value")
    return Check(name, "fine", ", ".join(sorted(v for v in os.environ if v.startswith("FUSEC_"))) or "defaults")


def _gpu(name: str) -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check(name, "fine", "none: models run on the CPU")
    found = torch.cuda.get_device_name(0)
    try:
        import triton
    except ImportError:
        return Check(name, "wrong", f"{found}, but triton is not installed: models run through ATen", "install triton")
    if _numbers(triton.__version__) < LEAST_TRITON:
        fix = f"install triton {LEAST_TRITON[0]}.{LEAST_TRITON[1]} or newer"
        return Check(name, "wrong", f"{found}, triton {triton.__version__}", fix)
    return Check(name, "fine", f"{found}, triton {triton.__version__}")


def _kernel(name: str) -> Check:
    """Build, run and check kernels of a small block: a norm, a matmul and an activation."""
    import torch
    from torch.nn import functional as F

    from fusec.debug.capture import compile_model
    from fusec.debug.explain import explain_subjects
    from fusec.reference.contract import compare_outputs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w = torch.randn(8, 64, device=device), torch.randn(64, 64, device=device)

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(F.rms_norm(x, (64,)), w)) + x

    compiled = torch.compile(block, backend="fusec", options={"cache": False, "strict": True}, dynamic=False)
    comparison = compare_outputs(block(x, w), compiled(x, w), block(x.double(), w.double()))
    if not comparison.passed:
        return Check(name, "wrong", f"it differs from eager: {comparison}", "report it, with the output of `fusec env`")
    count = explain_subjects(compile_model(block, (x, w))).launches("generated")
    return Check(name, "fine", f"a norm, a matmul and SiLU, {count} in all, built and run on {device}: as eager")


_CHECKS: dict[str, Callable[[str], Check]] = {
    "versions": _versions, "settings": _settings, "C++ compiler": _compiler, "instructions": _instructions,
    "threads": _threads, "OpenMP": _openmp, "cache": _cache, "edited kernels": _edits,
    "machine profile": _profile, "GPU": _gpu, "kernels": _kernel,
}  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
