"""The Python files whose fusions and rewrites of a user are declared in this process."""

import sys
from pathlib import Path

from fusec.rewriting.fusion import FUSIONS
from fusec.rewriting.rule import REWRITES

SCRIPT = "fusec_script"
"""The name of the module of a script that the command line runs."""


def declaring_modules() -> list[str]:
    """Return the modules, other than fusec's own, that declare fusions or rewrites."""
    modules = {*(fusion.module for fusion in FUSIONS.values()), *(rule.module for rule in REWRITES.values())}
    return sorted(name for name in modules if not name.startswith("fusec."))


def declaring_file() -> str:
    """Return a file that declares them when it is run, and does nothing else; "" where there is none.

    A program that runs on import, without a check of ``__name__``, is none.
    """
    modules = declaring_modules()
    for name in sorted(modules, key=lambda name: name not in (SCRIPT, "__main__")):  # a script imports the others
        path = getattr(sys.modules.get(name), "__file__", None)
        if path and Path(path).is_file() and (name != "__main__" or _has_guard(path)):
            return str(Path(path).resolve())
    return ""


def _has_guard(path: str) -> bool:
    return "__name__" in Path(path).read_text(encoding="utf-8", errors="replace")
