"""Tables, numbers and places as text on a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table


def new_table(title: str, *columns: str, numbers: tuple[int, ...] = ()) -> Table:
    """Return a table without lines; ``numbers`` are the columns that are aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i in numbers else "left", header_style="dim", overflow="fold")
    return table


def cut_rows(table: Table, more: int) -> Table:
    """Return a table with the number of rows that it leaves out below it, if there are any."""
    if more > 0:
        table.caption, table.caption_justify = f"… and {more} more (--all)", "left"
    return table


def amount(n: float, unit: str = "") -> str:
    """``1.5 MB``, in steps of a thousand."""
    for prefix in ("", "k", "M", "G", "T"):
        if n < 1000 or prefix == "T":
            break
        n /= 1000
    return f"{n:.3g} {prefix}{unit}".rstrip() if n < 1000 else f"{n:.0f} {prefix}{unit}"


def duration(us: float) -> str:
    """``12.3 µs``, ``4.56 ms``."""
    return f"{us:.3g} µs" if us < 1000 else f"{us / 1000:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def shorten_sources(sources: tuple[str, ...], most: int = 2) -> str:
    """Return the first few source locations, and the number of the rest."""
    more = f" and {len(sources) - most} more" if len(sources) > most else ""
    return "; ".join(sources[:most]) + more


def as_text(view: Any, width: int = 140) -> str:
    """Return the text that a terminal would show, without colours."""
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(view)
    return capture.get()
