"""``fusec env``: versions, compilers, devices and settings for a bug report."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fusec.cli.options import Json
from fusec.cli.terminal import show, write_json
from fusec.errors import BuildError

PACKAGES = ("fusec", "torch", "triton", "transformers", "sympy", "numpy")


def env(as_json: Json = False) -> None:
    """Print versions, compilers, devices and settings, for a report of a problem."""
    found = environment()
    if as_json:
        write_json(found)
        return
    from rich.table import Table

    table = Table.grid(padding=(0, 3))
    for name, value in found.items():
        lines = "\n".join(f"{k} = {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(f"[bold]{name}[/]", lines.replace("[", "\\["))
    show(table)


def environment() -> dict[str, Any]:
    """Versions, compilers, devices and settings."""
    from fusec.analysis.machine import cpu_name
    from fusec.config import Config

    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "c++": _compiler(),
        "gpu": _gpu(),
        "cache": str(Config.from_environment().cache_path()),
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("FUSEC_", "OMP_", "TORCH_COMPILE"))},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _compiler() -> str:
    """The compiler that kernels are built with."""
    from fusec.codegen.cpp.compiler import find_compiler, run_compiler

    try:
        compiler = find_compiler()
        version = run_compiler(compiler.command, ["--version"]).splitlines()[0]
    except BuildError as reason:
        return f"none; models run through ATen: {reason.what}"
    return f"{version} {' '.join((*compiler.command, *compiler.machine_flags))}"


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return "unknown: torch is not installed"
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
