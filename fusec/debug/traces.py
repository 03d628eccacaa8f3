"""Reads the folder of a trace back: compiles for ``explain`` and ``view``, and events."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fusec.analysis.machine import Machine, assumed_cpu
from fusec.analysis.sites import Site
from fusec.debug.subject import Step, Subject, with_lines
from fusec.errors import FusecError
from fusec.history import History
from fusec.ir.parser import parse_graph
from fusec.pipeline import PassRecord
from fusec.remarks import Remark
from fusec.tracing import COMPILE, EVENTS, FINAL, HISTORY, IMPORTED, REMARKS


class NoTrace(FusecError):
    """A folder that holds no trace."""


@dataclass(frozen=True)
class TracedCompile:
    """One compile of a traced program."""

    path: Path
    state: str
    """``done``, ``failed``, or ``running`` where the process ended during the compile."""
    error: str = ""
    seconds: float = 0.0
    subject: Subject | None = None
    """None unless it is done."""


@dataclass(frozen=True)
class Trace:
    """All compiles, in order, and what else happened."""

    compiles: list[TracedCompile]
    events: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def subjects(self) -> list[Subject]:
        """The compiles that are done."""
        return [compile.subject for compile in self.compiles if compile.subject is not None]

    def of(self, kind: str) -> list[str]:
        """Return the texts of events of a kind: ``graph break``, ``recompile``, ``fallback``."""
        return [str(event["text"]) for event in self.events if event.get("kind") == kind]


def read_trace(folder: Path) -> Trace:
    """Read a trace; what a crash left unfinished is read as far as it goes.

    Raises:
        NoTrace: where there is none.
    """
    found = sorted(folder.glob(f"*/{COMPILE}"), key=lambda path: path.parent.stat().st_ctime_ns)
    lines = _text(folder / EVENTS).splitlines() if (folder / EVENTS).exists() else []
    if not found and not lines:
        why = "it has no compile of fusec" if folder.is_dir() else "there is no such folder"
        raise NoTrace(f"{folder} is no trace", why=why, fix="fusec trace PROGRAM")
    return Trace([_compile(path.parent) for path in found], list(filter(None, map(_parsed, lines))))


def events_of(trace: Trace) -> Iterator[tuple[str, str, int]]:
    """Yield kind, reason and number of equal events: recompiles, graph breaks, then what was left to ATen."""
    for kind in ("recompile", "graph break", "fallback"):
        for reason, count in Counter(map(_essence, trace.of(kind))).items():
            yield kind, reason, count


def _essence(text: str) -> str:
    """Return the reason of an event of torch, and the user's line.

    Texts of graph breaks have a traceback; a recompile with several cached graphs has a list with a reason for each.
    """
    if text.startswith("["):
        return "\n  ".join(dict.fromkeys(json.loads(text)))
    place = re.search(r"user code at (\S+:\d+)", text)
    reason = re.search(r"Explanation: (.*)", text) or re.search(r"Reason: (.*)", text)
    return text if place is None or reason is None else f"{reason.group(1)}\n  {place.group(1)}"


def finished(folder: Path) -> list[Subject]:
    """Return the compiles of a trace that are done.

    Raises:
        NoTrace: where none is.
    """
    found = read_trace(folder)
    if found.subjects:
        return found.subjects
    states = [f"{compile.path.name} is {compile.state} {compile.error}".strip() for compile in found.compiles[:3]]
    fix = f"fusec reduce {found.compiles[0].path / IMPORTED} --strict" if found.compiles else ""
    raise NoTrace(f"no compile of {folder} is done", why="; ".join(states) or "it has events alone", fix=fix)


def options_in(folder: Path) -> dict[str, Any] | None:
    """Return the options of the compiles in a trace that differ from their defaults, and the number of threads.

    None where nothing was compiled.
    """
    found = [_parsed(_text(path)) for path in folder.glob(f"*/{COMPILE}")]
    merged: dict[str, Any] = {}
    for about in found:
        merged |= {**about.get("options", {}), "threads": about.get("threads", 1)}
    return merged if found else None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _parsed(line: str) -> dict[str, Any]:
    """Return an object in JSON; empty for anything else, as what a crash cut off."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _compile(folder: Path) -> TracedCompile:
    try:
        about = _parsed(_text(folder / COMPILE))
        state = str(about.get("state", "running"))
        if state != "done":
            return TracedCompile(folder, state, str(about.get("error", "")))
        return TracedCompile(
            folder, state, "", sum(about["seconds"].values()), subject_from(about, _texts(folder, about))
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, FusecError) as reason:
        said = reason.reason if isinstance(reason, FusecError) else str(reason)
        raise NoTrace(f"{folder} is not as it was written", why=f"{type(reason).__name__}: {said}") from reason


def _texts(folder: Path, about: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a compile by path."""
    passes = (row["file"] + kind for row in about["passes"] for kind in ("", HISTORY))
    kernels = (f"kernels/{path.name}" for path in (folder / "kernels").glob("*"))
    found = (name for name in passes if (folder / name).exists())
    return {name: _text(folder / name) for name in (IMPORTED, FINAL, REMARKS, *found, *kernels)}


def _history(text: str) -> History:
    return History.from_json(json.loads(text))


def subject_from(about: Mapping[str, Any], texts: Mapping[str, str]) -> Subject:
    """Return the subject of a compile from the results of ``fusec.tracing.recorded`` and the imported graph.

    Args:
        about: the first of these results.
        texts: the second, and the text of the imported graph.

    Raises:
        FusecError: for texts that are no graphs; other errors where something else is not as it was written.
    """
    final, before, records = parse_graph(texts[FINAL]), texts[IMPORTED], []
    for row in about["passes"]:
        fields = dict(row)
        file = fields.pop("file")
        after, known = texts.get(file, before), texts.get(file + HISTORY)
        fields |= {"before": before, "after": after, "declared": tuple(fields.get("declared", ()))}
        records.append(PassRecord(**fields, history=partial(_history, known) if known else None))
        before = after
    remarks = [Remark(**{**r, "sources": tuple(r["sources"])}) for r in json.loads(texts[REMARKS])]
    nodes = final.nodes
    sources = {Path(name).stem: text for name, text in texts.items() if name.startswith("kernels/")}
    steps = {
        nodes[s["node"]]: Step(s["name"], sources.get(s["name"], ""), s["kind"] == "kernel", s["formula"])
        for s in about["steps"]
    }
    steps = with_lines(steps, about.get("origins", {}))
    machine = Machine.from_json(about["machine"]) if about.get("machine") else assumed_cpu()
    sites = tuple(Site(**{**site, "parts": tuple(site["parts"])}) for site in about.get("sites", ()))
    return Subject(
        final.name, final, parse_graph(texts[IMPORTED]), tuple(records), tuple(remarks), steps,
        copies=about["copies"], machine=machine, once=frozenset(nodes[i] for i in about["once"]),
        sites=sites,
    )  # fmt: skip
