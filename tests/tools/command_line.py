"""The command line in this process: typer would make all commands again at each call, which takes longer than most."""

from functools import cache

import typer.testing
from typer.testing import CliRunner, Result

__all__ = ["CliRunner", "Result"]

typer.testing._get_command = cache(typer.testing._get_command)
