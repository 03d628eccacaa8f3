"""Where campaigns write what they find."""

from pathlib import Path
from typing import Any

from bench import record

RESULTS = Path(__file__).parent / "results"


def write_result(question: str, seed: int, content: dict[str, Any], path: str = "") -> Path:
    """Write what was found as JSON; return the file, by default one per question in ``tests/campaigns/results``."""
    return record.write_result(question, seed, content, path or str(RESULTS / f"{question}.json"))
