"""A folder with everything about each compile of a process, as files: graphs, kernels, remarks, recompiles, breaks.

Files are written immediately, the imported graph before the passes run, so that a crash leaves what led to it.
"""

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fusec.config import Config
from fusec.errors import FusecError, OptionError
from fusec.frontend.torch_internals import artifact, listen
from fusec.ir.graph import Graph
from fusec.ir.printer import positions_as_read
from fusec.reproducers import keep_graph, reduce_command

logger = logging.getLogger(__name__)
EVENTS, COMPILE, IMPORTED = "events.jsonl", "compile.json", "imported.fir"
FINAL, REMARKS, HISTORY = "final.fir", "remarks.json", ".history.json"
_TEXTS = ("before", "after", "graph", "history")
"""Fields of the record of a pass that are texts, or written as these."""
_KEPT = {"dynamo_graph_break_reason": "graph break", "recompile_reasons": "recompile"}
"""Artifacts of torch's structured trace that are events here."""
_folders: dict[str, "TraceFolder"] = {}
_lock = threading.Lock()


class TraceFolder:
    """One folder; each process numbers its compiles."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.count = path, 0
        listen(self._of_torch)

    def event(self, kind: str, text: str, **more: Any) -> None:
        """Append a line to the events."""
        line = json.dumps({"kind": kind, "text": text.strip(), "process": os.getpid(), **more})
        with _lock, (self.path / EVENTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def next_folder(self, name: str) -> Path:
        """Make the folder of the next compile."""
        with _lock:
            self.count += 1
            folder = self.path / f"{os.getpid()}-{self.count:03d}-{re.sub(r'[^A-Za-z0-9_]', '_', name)}"
        folder.mkdir()
        return folder

    def _of_torch(self, name: str, payload: str, compile: str) -> None:
        if kind := event_of(name):
            self.event(kind, payload, compile=compile)


def event_of(artifact: str) -> str:
    """Return the kind of event that an artifact of torch is; "" for none."""
    return _KEPT.get(artifact, "")


@contextmanager
def traced(graph: Graph, config: Config) -> Iterator[Callable[[Any], None]]:
    """Write a compile, if the configuration asks for it; yields a function that takes the compiled graph.

    An error of the compile is written, and raised again. One of writing is logged: it never fails a compile. Of a
    compile that fails, in part or as a whole, the graph is kept, if not as part of a trace then on its own.
    """
    folder = _Compile.begin(graph, config)

    def reproducer(failure: str) -> str:
        path = folder.path / IMPORTED if folder else None
        if path is not None and path.exists():
            return reduce_command(path, config, strict=True)
        return keep_graph(str(graph), graph.name, config, failure, strict=True)

    def write(compiled: Any) -> None:
        if hasattr(compiled, "records"):  # the result of another compiler may have a program alone
            _quietly(lambda: _suggest(compiled, reproducer))
            _artifacts(compiled)
            if folder:
                _quietly(lambda: folder.done(compiled))

    try:
        yield write
    except BaseException as error:
        if folder:
            folder.failed(error)
        if isinstance(error, Exception) and not isinstance(error, OptionError):
            failure = f"{type(error).__name__}: {error}"
            _quietly(partial(_name, error, partial(reproducer, failure), config.strict))
        raise


def _suggest(compiled: Any, reproducer: Callable[[str], str]) -> None:
    """Let the remarks on failures name the command that reduces the graph."""
    failures = [remark for remark in compiled.remarks if remark.kind == "failure"]
    if failures and (command := reproducer(str(failures[0]))):
        remarks = (replace(r, suggestion=r.suggestion or command) if r in failures else r for r in compiled.remarks)
        compiled.remarks[:] = list(remarks)
        logger.warning("a part of the compile failed; `%s` shrinks the graph", command)


def _name(error: Exception, reproducer: Callable[[], str], strict: bool) -> None:
    """Let an error name the command that reduces the graph; torch shows no more of it than its text."""
    if command := reproducer():
        logger.warning("the compile failed; `%s` shrinks the graph", command)
    if command and strict and len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n  graph: {command}",)


def trace_event(config: Config, kind: str, text: str) -> None:
    """Append an event to the trace, if the configuration asks for one."""
    if folder := start_trace(config.trace):
        _quietly(lambda: folder.event(kind, text))


class _Compile:
    """The folder of one compile."""

    def __init__(self, path: Path, graph: Graph, config: Config) -> None:
        self.path = path
        self.about: dict[str, Any] = {"graph": graph.name, "state": "running", "options": config.changed()}
        self.about["threads"] = torch.get_num_threads()
        self._write(IMPORTED, str(graph))
        self._save()

    @classmethod
    def begin(cls, graph: Graph, config: Config) -> "_Compile | None":
        folder = start_trace(config.trace)
        return _quietly(lambda: cls(folder.next_folder(graph.name), graph, config)) if folder else None

    def failed(self, error: BaseException) -> None:
        said = error.reason if isinstance(error, FusecError) else str(error)
        self.about |= {"state": "failed", "error": f"{type(error).__name__}: {said}"}
        _quietly(self._save)

    def done(self, compiled: Any) -> None:
        about, texts = recorded(compiled)
        for name, text in texts.items():
            (self.path / name).parent.mkdir(exist_ok=True)
            self._write(name, text)
        self._write("remarks.txt", "\n".join(map(str, compiled.remarks)) + "\n")
        self.about |= {"state": "done", **about}
        self._save()

    def _save(self) -> None:
        self._write(COMPILE, json.dumps(self.about, indent=1, default=str))

    def _write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text, encoding="utf-8")


def recorded(compiled: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a compile as JSON data, and its texts by path: graphs after each pass, remarks, kernels."""
    passes, program, texts = [], compiled.program, {FINAL: str(compiled.graph)}
    for number, record in enumerate(compiled.records):
        path = f"passes/{number:02d}-{record.name.partition('{')[0]}.fir"
        if record.changed and record.after:
            texts[path] = record.after
        if record.history:
            texts[path + HISTORY] = json.dumps(record.history().to_json(), default=str)
        row = {name: value for name, value in vars(record).items() if name not in _TEXTS}
        passes.append({**row, "file": path})
    texts[REMARKS] = json.dumps([r.to_json() for r in compiled.remarks], indent=1, default=str)
    for name, text in program.texts.items():
        texts[f"kernels/{name}.{'py' if '@triton' in text else 'cpp'}"] = text
    nodes = positions_as_read(compiled.graph)
    steps = [
        {"node": nodes[s.node], "name": s.name, "kind": s.kind, "formula": _formula(program, s.name)}
        for s in program.steps if s.node in nodes and s.kind in ("kernel", "interpreted")
    ]  # fmt: skip
    folded = getattr(program, "folded", None)
    about = {
        "passes": passes, "seconds": compiled.seconds, "steps": steps,
        "origins": {name: kernel.origins for name, kernel in program.kernels.items()},
        "copies": sum(step.kind == "copy" for step in program.steps),
        "once": sorted(nodes[n] for n in folded.nodes if n in nodes) if folded else [],
        "machine": compiled.machine.to_json() if compiled.machine else None,
        "sites": list(map(vars, getattr(compiled, "sites", ()))),
    }  # fmt: skip
    return about, texts


def _formula(program: Any, name: str) -> str:
    return str(getattr(program.kernels.get(name), "formula", ""))


def start_trace(path: str) -> TraceFolder | None:
    """Return the folder of a trace, and listen to torch from now on; None without a path, or where it is not writable.

    Called when the backend is loaded, as graph breaks come before the first compile.
    """
    if path and path not in _folders:
        made = _quietly(lambda: TraceFolder(Path(path)))
        if made is not None:
            _folders[path] = made
    return _folders.get(path)


def _artifacts(compiled: Any) -> None:
    """Hand the final graph, kernels and remarks to torch's structured trace, which ``tlparse`` shows."""
    artifact("fusec_final_graph", lambda: str(compiled.graph))
    artifact("fusec_kernels", lambda: "\n".join(compiled.program.texts.values()))
    artifact("fusec_remarks", lambda: "\n".join(map(str, compiled.remarks)))


def _quietly(write: Callable[[], Any]) -> Any:
    """Return the result of a function; what it raises, as for a full disk, is logged, and None is returned."""
    try:
        return write()
    except Exception as error:
        logger.warning("the trace is incomplete: %s: %s", type(error).__name__, error)
        return None
