"""Errors of a user's model: where they were raised, and whether they are the compiler's instead."""

import traceback
from pathlib import Path
from textwrap import shorten

from fusec.errors import FusecError

_PACKAGE = Path(__file__).absolute().parents[1]


class ModelError(FusecError):
    """A model, or the script that makes it, which does not run."""


def is_compilers(error: Exception) -> bool:
    """Return whether an error passed through the compiler, rather than through torch's tracing of the model alone."""
    tools = (_PACKAGE / "cli", _PACKAGE / "debug")
    files = [Path(frame.filename).absolute() for frame in traceback.extract_tb(error.__traceback__)]
    return any(_PACKAGE in f.parents and not any(tool in f.parents for tool in tools) for f in files)


def place(error: BaseException, path: str = "") -> str:
    """Return where an error was raised: the last line in a file, by default in any but torch's and fusec's."""
    import torch

    packages = (Path(torch.__file__).absolute().parent, _PACKAGE)

    def is_meant(filename: str) -> bool:
        file = Path(filename).absolute()
        return file == Path(path).absolute() if path else not any(package in file.parents for package in packages)

    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_meant(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def reason_of(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return shorten(f"{type(error).__name__}: {first_line(error)}", 300)


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an error."""
    try:
        return str(error).partition("\n")[0]
    except Exception:  # the text of a user's error is computed by the user's code
        return "its text cannot be shown"
