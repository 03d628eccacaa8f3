"""The option ``report``: a page, or its figures as JSON, of what a process compiles, written after each compile."""

import json
import logging
from pathlib import Path
from typing import Any

from fusec.debug.explain import explain_subjects
from fusec.debug.subject import subject_of
from fusec.debug.traces import Trace, events_of
from fusec.frontend.torch_internals import listen
from fusec.tracing import event_of
from fusec.viz.html import render

logger = logging.getLogger(__name__)
_reports: dict[str, "_Report"] = {}


class _Report:
    """The compiles and events of one path."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.events: list[dict[str, Any]] = []
        listen(self._of_torch)

    def _of_torch(self, name: str, payload: str, compile: str) -> None:
        if kind := event_of(name):
            self.events.append({"kind": kind, "text": payload.strip()})

    def text(self, path: Path) -> str:
        """Return the report as JSON or as a page, by the name of the file."""
        explanation = explain_subjects([subject_of(c) for c in self.compiled], path.stem)
        if path.suffix == ".json":
            return json.dumps(explanation.to_json(), indent=1, default=str) + "\n"
        found = events_of(Trace([], list(self.events)))
        return render(explanation, [{"kind": kind, "text": text, "count": count} for kind, text, count in found])


def write_report(path: str, compiled: Any) -> None:
    """Add a compile to the report at a path, and write it; an error is logged, as it must not fail the compile."""
    try:
        report = _reports[path] = _reports.get(path) or _Report()
        report.compiled.append(compiled)
        Path(path).write_text(report.text(Path(path)), encoding="utf-8")
    except Exception as error:
        logger.warning("the report %s is not written: %s: %s", path, type(error).__name__, error)
