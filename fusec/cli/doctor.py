"""``fusec doctor``: whether this installation works, and what would make it better."""

from dataclasses import asdict

import typer

from fusec.cli.options import Json
from fusec.cli.terminal import CHECK_FAILED, show, write_json

_MARKS = {"fine": "[green]✓[/]", "note": "[yellow]![/]", "wrong": "[red]✗[/]"}


def doctor(as_json: Json = False) -> None:
    """Check compiler, instructions, threads, caches and settings; build a kernel, run it, and compare it with eager.

    Exits with 1 where something is wrong.
    """
    from rich.markup import escape
    from rich.table import Table

    from fusec.debug.doctor import checks

    found, table = [], Table.grid(padding=(0, 2))
    for check in checks():
        found.append(check)
        fix = f"\n[dim]→ {escape(check.fix)}[/]" if check.fix else ""
        table.add_row(_MARKS[check.state], f"[bold]{check.name}[/]", escape(check.detail) + fix)
    if as_json:
        write_json([asdict(check) for check in found])
    else:
        show(table)
    if any(check.state == "wrong" for check in found):
        raise typer.Exit(CHECK_FAILED)
