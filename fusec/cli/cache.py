"""``fusec cache``: what built kernels take on disk."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from fusec.cli.terminal import reports, write_json
from fusec.config import Config

cache = typer.Typer(no_args_is_help=True, help="Look at the built kernels on disk, or remove them.")
ENTRY = re.compile(r"[0-9a-f]{64}(\.\w+)*|\.new-\w+")
"""Names of the files that the cache makes; nothing else is ever removed."""


@cache.command()
@reports
def info(as_json: Annotated[bool, typer.Option("--json", help="plain data")] = False) -> None:
    """Say where the cache is and what it holds."""
    found = _info(Config.from_environment().cache_path())
    if as_json:
        write_json(found)
    else:
        typer.echo(f"{found['path']}: {found['files']} files, {found['bytes'] / 1e6:.1f} MB")


@cache.command()
@reports
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="plain data")] = False,
) -> None:
    """Remove every built kernel; they are built again when needed."""
    path = Config.from_environment().cache_path()
    found = _info(path)
    if found["files"]:
        if not yes:
            typer.confirm(f"Remove {found['files']} files in {path}?", abort=True)
        for file in _entries(path):
            file.unlink(missing_ok=True)
    if as_json:
        write_json({"removed": found})
    else:
        typer.echo(f"removed {found['files']} files, {found['bytes'] / 1e6:.1f} MB")


def _info(path: Path) -> dict[str, Any]:
    files = _entries(path)
    return {"path": str(path), "files": len(files), "bytes": sum(f.stat().st_size for f in files)}


def _entries(path: Path) -> list[Path]:
    found = path.iterdir() if path.is_dir() else iter(())
    return [f for f in found if ENTRY.fullmatch(f.name) and f.is_file() and not f.is_symlink()]
