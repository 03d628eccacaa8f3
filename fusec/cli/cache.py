"""``fusec cache``: show, verify and prune the files on disk."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fusec.cli.options import Json
from fusec.cli.terminal import CHECK_FAILED, reports, show, write_json
from fusec.config import Config
from fusec.pruning import Entry, entries, prune, remove

cache = typer.Typer(no_args_is_help=True, help="Show the built kernels on disk, verify them, or remove them.")


@cache.command(name="show")
@reports
def show_cache(as_json: Json = False) -> None:
    """Show the path and contents of the cache, and why it is unusable if it is."""
    from rich.table import Table

    from fusec.cache import reason_against

    config = Config.from_environment()
    path = config.cache_path()
    found, reason = entries(path), reason_against(path) if path.exists() else ""
    if as_json:
        kinds = {kind: _size(members) for kind, members in _kinds(found).items()}
        content = {"path": path, "not_used": reason, "limit_mb": config.cache_mb, **_size(found), "kinds": kinds}
        write_json(content)
        return
    table = Table("kind", "entries", "MB", "used last", title=str(path), title_justify="left")
    for kind, members in _kinds(found).items():
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(members[-1].used))
        table.add_row(kind, str(len(members)), f"{_megabytes(members):.1f}", used)
    limit = f"of {config.cache_mb}" if config.cache_mb else "without a limit"
    table.add_row("all", str(len(found)), f"{_megabytes(found):.1f}", limit)
    show(table)
    if reason:
        typer.echo(f"not used: {reason}")


@cache.command()
@reports
def verify(as_json: Json = False) -> None:
    """Verify digest, owner and permissions of every entry. Bad entries are never used, but built again."""
    from fusec.cache import read_entry

    found, bad = entries(Config.from_environment().cache_path()), {}
    for entry in found:
        try:
            read_entry(entry.path)
        except FileNotFoundError:
            continue  # pruned since
        except OSError as error:
            bad[entry.path.name] = error.strerror or str(error)
    if as_json:
        write_json({**_size(found), "bad": bad})
    else:
        for name, reason in bad.items():
            typer.echo(f"{name}: {reason}")
        typer.echo(f"{len(bad)} of {len(found)} entries cannot be used")
    if bad:
        raise typer.Exit(CHECK_FAILED)


@cache.command(name="prune")
@reports
def prune_cache(
    megabytes: Annotated[int | None, typer.Option("--mb", min=0, help="size of the entries to keep")] = None,
    as_json: Json = False,
) -> None:
    """Remove the entries that were used longest ago until the others fit the limit (option `cache_mb`)."""
    config = Config.from_environment()
    most = config.cache_mb if megabytes is None else megabytes
    unlimited = megabytes is None and not most
    _say_removed([] if unlimited else prune(config.cache_path(), most * 1_000_000), as_json)


@cache.command()
@reports
def clear(yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False, as_json: Json = False) -> None:
    """Remove every entry; they are built again when needed."""
    path = Config.from_environment().cache_path()
    found = entries(path)
    if found and not yes:
        typer.confirm(f"Remove {len(found)} entries ({_megabytes(found):.1f} MB) in {path}?", abort=True)
    _say_removed(list(filter(remove, found)), as_json)


def _say_removed(removed: Sequence[Entry], as_json: bool) -> None:
    if as_json:
        write_json({"removed": _size(removed)})
    else:
        typer.echo(f"removed {len(removed)} entries, {_megabytes(removed):.1f} MB")


def _kinds(found: Sequence[Entry]) -> dict[str, list[Entry]]:
    kinds: dict[str, list[Entry]] = {}
    for entry in found:
        kinds.setdefault(entry.path.suffix[1:], []).append(entry)
    return dict(sorted(kinds.items()))


def _size(found: Sequence[Entry]) -> dict[str, Any]:
    return {"entries": len(found), "bytes": sum(entry.size for entry in found)}


def _megabytes(found: Sequence[Entry]) -> float:
    return sum(entry.size for entry in found) / 1e6
