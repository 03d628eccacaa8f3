"""Programs that a user names: their words, and how they end."""

import shlex
import subprocess
from collections.abc import Mapping, Sequence

from fusec.cli.terminal import UsageError


def words_of(command: str) -> list[str]:
    """Split a command into words, as a shell does.

    Raises:
        UsageError: for one without words, or with an open quotation.
    """
    try:
        words = shlex.split(command)
    except ValueError as reason:
        raise UsageError(f"{command} is no command", why=str(reason)) from reason
    if not words:
        raise UsageError("the command is empty", fix='such as "python program.py"')
    return words


def exit_code_of(words: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a program without its output, and return its exit code.

    Raises:
        UsageError: where there is no such program.
    """
    try:
        return subprocess.run(words, env=environment, capture_output=True, check=False).returncode
    except (OSError, ValueError) as reason:
        raise UsageError(f"{words[0]} does not run", why=str(reason)) from reason
