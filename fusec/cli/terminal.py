"""Support for commands: standard streams, exit codes, close matches for wrong names."""

import errno
import functools
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from fusec.errors import FusecError, OptionError, ParseError, suggestion

if TYPE_CHECKING:
    from fusec.ir.graph import Graph

_PATHS, _MODELS = ("model", "graph", "before", "after", "declare"), ("model", "before", "after")
"""Parameters of commands that may be paths to read, and those that name models."""
_OPTIONS = ("target", "machine", "apply")
"""Parameters that are options of a compile."""
PACKAGED = {"bert": "Bert", "gpt2": "GPT2", "llama": "Llama", "t5": "T5", "vit": "ViT"}
"""The models of this package, and their classes."""
_parsed: "dict[str, Graph]" = {}
"""Graphs by path that were parsed to check them, and are not read yet."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a disk that is full or read-only."""
_LINES, _LINE = 8, 240
"""Most lines of an error, and characters of each."""
CHECK_FAILED, USAGE, INVALID, CRASH = 1, 2, 3, 4


_MISPARSED: Any = typer.BadParameter.__base__
"""The error of the parser of command lines, which typer does not name."""


class UsageError(FusecError):
    """A command called wrongly."""


class Commands(TyperGroup):
    """All commands; what the parser says of a command line is cut as other errors are."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the command line up to the command."""
        with _cut():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Parse the rest, and run the command."""
        with _cut():
            return super().invoke(ctx)


@contextmanager
def _cut() -> Iterator[None]:
    try:
        yield
    except _MISPARSED as error:
        error.message = _printable(error.message)
        raise


def reports(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command turn errors into messages and exit codes."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            _check(kwargs)
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _UNWRITABLE:
                raise
            refusal = error if isinstance(error, FusecError) else _refused_option(error)
            if refusal is not None:
                typer.secho(f"error: {_shown(refusal)}", err=True, fg="red")
                raise typer.Exit(exit_code(refusal)) from error
            typer.echo("".join(traceback.format_exception(error)), err=True)
            typer.secho(f"crash: {type(error).__name__}: {error}", err=True, fg="red")
            raise typer.Exit(CRASH) from error

    return run


def _refused_option(error: BaseException | None) -> OptionError | None:
    """Return the refusal of an option, such as one of the environment, that torch wraps in an error of its own."""
    while error is not None and not isinstance(error, OptionError):
        error = error.__cause__ or error.__context__
    return error


def raise_again(unraisable: Any) -> None:
    """Raise an interrupt again that came in a callback of garbage collection, where Python drops it; a hook of sys."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()  # a signal ends a system call, too
    else:
        sys.__unraisablehook__(unraisable)


@contextmanager
def whole_output() -> Iterator[None]:
    """Report output that cannot be written, as to a full disk, in one line."""
    try:
        yield
    except OSError as error:
        with suppress(OSError, ValueError):  # else Python writes what is buffered once more, at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(1) from error
        if error.errno not in _UNWRITABLE:
            raise
        typer.secho(f"error: {_shown(UsageError('the output cannot be written', why=_why(error)))}", err=True, fg="red")
        raise SystemExit(USAGE) from error


def _check(arguments: Mapping[str, Any]) -> None:
    """Raise the errors of arguments that need no torch, before it is imported."""
    from fusec.config import Config

    given = {name: str(value) for name, value in arguments.items() if isinstance(value, str | Path) and str(value)}
    for name in _PATHS:
        if name in given:
            check_readable(given[name])
    for name in _MODELS:
        if name in given:
            check_model(given[name], reports="before" in arguments)
    if "output" in given:
        check_writable(given["output"])
    Config.from_options(None, {name: given[name] for name in _OPTIONS if name in given})


def _shown(error: FusecError) -> str:
    """Return the text of an error, which may hold a whole file."""
    return "\n".join(map(_printable, str(error).splitlines()[:_LINES]))


def _printable(line: str) -> str:
    """Return a line without control characters; a long one is cut."""
    line = "".join(c if c.isprintable() else "·" for c in line)
    return line if len(line) <= _LINE else f"{line[: _LINE - 1]}…"


def exit_code(error: FusecError) -> int:
    """Wrong names and unreadable text are wrong usage; whatever else fusec refuses on purpose is invalid."""
    return USAGE if isinstance(error, (UsageError, OptionError, ParseError)) else INVALID


def check_readable(path: str) -> None:
    """Raise UsageError where an argument is the path of a file that is not there, before torch is imported for it."""
    if path.endswith((".py", ".fir", ".json")):
        try:
            Path(path).stat()
        except FileNotFoundError as reason:
            raise UsageError(f"cannot read {path}", why="there is no such file") from reason
        except (OSError, ValueError) as reason:
            raise UsageError(f"cannot read {path}", why=_why(reason)) from reason
    if path.endswith(".py"):
        compiled_script(path)
    elif path.endswith(".fir"):
        _parsed[path] = parsed_graph(path)


def parsed_graph(path: str) -> "Graph":
    """Return the graph in a file, which is parsed once.

    Raises:
        ParseError: for one that is no graph.
    """
    if path in _parsed:
        return _parsed.pop(path)
    text = read_text(path)
    from fusec.ir.parser import parse_graph  # after the file is read, as it is slow to import

    return parse_graph(text)


def compiled_script(path: str) -> CodeType:
    """Return the code of a Python file.

    Raises:
        UsageError: for one that is not Python.
    """
    text = read_text(path)
    try:
        return compile(text, path, "exec", dont_inherit=True)
    except SyntaxError as reason:
        raise UsageError(f"{path} is not Python", where=f"line {reason.lineno}", why=str(reason.msg)) from reason
    except (ValueError, RecursionError, MemoryError) as reason:  # zero bytes, or too deep for the parser
        why = f"{type(reason).__name__}: {reason}"
        raise UsageError(f"{path} is not Python", why=why) from reason


def is_graph_file(spec: str) -> bool:
    """Return whether a MODEL is the text of a graph."""
    return spec == "-" or spec.endswith(".fir")


def check_model(spec: str, reports: bool = False) -> None:
    """Check that a MODEL, graph or trace is named as one, or a report if these are taken, and is known.

    Raises:
        UsageError: which is raised here before torch is imported.
    """
    kind, _, rest = spec.partition(":")
    if kind == "models":
        check_name("model", rest.partition("/")[0], PACKAGED)
    elif kind == "hf":
        check_architecture(rest)
    elif not (is_graph_file(spec) or spec.endswith((".py", ".json") if reports else ".py") or os.path.isdir(spec)):
        raise unknown_model(spec)


def check_architecture(name: str) -> None:
    """Check that transformers has an architecture; their names are kept, as transformers is slow to import.

    Raises:
        UsageError: for another name, or without transformers.
    """
    from fusec.cli.listings import kept_data
    from fusec.config import Config

    def names() -> list[str]:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return sorted(CONFIG_MAPPING.keys())

    try:
        known = kept_data(["architectures", metadata.version("transformers")], Config.from_environment(), names)
    except ImportError as reason:
        raise UsageError(f"hf:{name} needs transformers", fix="pip install transformers") from reason
    check_name("architecture of transformers", name, known)


def unknown_model(spec: str) -> UsageError:
    """Return the error of a MODEL that is named as none."""
    if is_graph_file(spec):
        return UsageError(f"{spec} is a graph, which is captured already", fix="pass the model")
    fix = "SCRIPT.py, models:llama/tiny, hf:llama, or a graph, GRAPH.fir"
    return UsageError(f"{spec!r} names no model", fix=fix)


def check_name(kind: str, name: str, known: Iterable[str]) -> None:
    """Check that a name is known.

    Raises:
        UsageError: which names close matches.
    """
    known = list(known)
    if name not in known:
        raise UsageError(f"unknown {kind} {name!r}", fix=suggestion(name, known))


def read_text(path: str) -> str:
    """A file, or standard input for ``-``.

    Raises:
        UsageError: where there is none, or it is no text.
    """
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as reason:
        raise UsageError(f"{path} is not text", why=f"byte {reason.start} is not UTF-8") from reason
    except (OSError, ValueError) as reason:
        raise UsageError(f"cannot read {path}", why=_why(reason)) from reason


def check_read_once(*paths: str) -> None:
    """Raise UsageError where standard input is named twice."""
    if paths.count("-") > 1:
        raise UsageError("standard input can be read once", fix="write one of the two to a file")


def write_text(path: str, text: str) -> None:
    """A file, or standard output for ``-``."""
    if path == "-":
        typer.echo(text, nl=not text.endswith("\n"))
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as reason:
        raise UsageError(f"cannot write {path}", why=_why(reason)) from reason


def _why(reason: OSError | ValueError) -> str:
    """Return why a path cannot be used; a name with a zero byte raises ValueError."""
    return (isinstance(reason, OSError) and reason.strerror) or str(reason)


def check_writable(path: str) -> None:
    """Raise UsageError where a file cannot be written, before the work for it is done; ``-`` is standard output."""
    file, why = Path(path), ""
    try:
        folder = file.resolve().parent
        if file.is_dir():
            why = "it is a folder"
        elif not folder.is_dir():
            why = f"there is no folder {folder}"
        elif not os.access(file if file.exists() else folder, os.W_OK):
            why = "permission denied"
    except (OSError, ValueError, RuntimeError) as reason:  # a name too long, a zero byte, or a loop of links
        why = str(reason) if isinstance(reason, RuntimeError) else _why(reason)
    if why and path != "-":
        raise UsageError(f"cannot write {path}", why=why)


def write_json(data: Any) -> None:
    """Print data as JSON on standard output."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def show(view: Any) -> None:
    """Tables and text on standard output."""
    from rich.console import Console

    is_known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    Console(width=None if is_known else 140).print(view)


def show_difference(line: str, err: bool = False) -> None:
    """Print a line of a unified diff, in colours on a terminal."""
    typer.secho(line, err=err, fg={"+": "green", "-": "red", "@": "cyan"}.get(line[:1]))


def note(text: str) -> None:
    """Print a note on standard error."""
    typer.secho(text, err=True, dim=True)
