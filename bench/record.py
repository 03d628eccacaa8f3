"""What every figure carries with it: commit, seed, versions and machine; and where it is written."""

import json
import math
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fusec.analysis.machine import cpu_name

RESULTS = Path(__file__).parent / "results"
_RESULTS_ASIDE = (":(top,exclude)bench/results", ":(top,exclude)tests/campaigns/results")
PACKAGES = ("torch", "triton", "transformers", "sympy", "numpy")


def provenance(seed: int) -> dict[str, Any]:
    """Who measured what, on what."""
    return {
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ":/", *_RESULTS_ASIDE)),
        "seed": seed,
        "command": " ".join(Path(word).name if "/" in word else word for word in sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }


def write_result(question: str, seed: int, content: dict[str, Any], path: str = "") -> Path:
    """Write what was found as JSON; gives the file, by default one per question in ``bench/results``."""
    target = Path(path) if path else RESULTS / f"{question}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    _write(target, {"question": question, **provenance(seed), **content})
    return target


def rewrite_result(path: Path, **judged: Any) -> None:
    """Say something else of what a file holds; who measured that, and when, stays."""
    _write(path, json.loads(path.read_text()) | judged)


def _write(target: Path, full: dict[str, Any]) -> None:
    target.write_text(_text(json.loads(json.dumps(_finite(full), allow_nan=False))) + "\n")


def _text(value: Any, margin: str = "\n") -> str:
    """JSON in which a record has a line to itself."""
    if _is_record(value):
        return json.dumps(value)
    inner, keyed = margin + " ", isinstance(value, dict)
    parts = (
        [f"{json.dumps(k)}: {_text(v, inner)}" for k, v in value.items()] if keyed else [_text(v, inner) for v in value]
    )
    opening, closing = "{}" if keyed else "[]"
    return f"{opening}{inner}{f',{inner}'.join(parts)}{margin}{closing}"


def _is_record(value: Any) -> bool:
    """Whether it is a plain value or a list of such, or these by name."""
    return all(map(_is_flat, value.values())) if isinstance(value, dict) else _is_flat(value)


def _is_flat(value: Any) -> bool:
    items = value if isinstance(value, list) else ()
    return not isinstance(value, dict) and not any(isinstance(item, dict | list) for item in items)


def _finite(value: Any) -> Any:
    """JSON has no infinity: it becomes text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _git(*words: str) -> str:
    try:
        return subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def in_mode(question: str, mode: str) -> str:
    """What a question is called that was asked of a mode of compiling."""
    return question if mode == "default" else f"{question}_{mode.replace('-', '_')}"
