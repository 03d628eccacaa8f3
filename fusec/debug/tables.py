"""An explanation as tables on a terminal."""

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fusec.debug.explain import KINDS, Explanation
from fusec.remarks import Remark

COLOURS = {"generated": "green", "vendor": "blue", "opaque": "yellow"}
MOST_ROWS = 30


def explanation_view(explanation: Explanation, everything: bool = False) -> RenderableType:
    """All tables that have rows, under a headline."""
    most = 10**6 if everything else MOST_ROWS
    parts: list[RenderableType] = [headline(explanation)]
    parts += [_regions(explanation)] if explanation.regions else []
    parts += [coverage_bars(explanation), ""]
    parts += [kernel_table(explanation, most)] if explanation.kernels else ["[dim]No kernels.[/]"]
    parts += [_fallback_table(explanation, most)] if explanation.fallbacks else ["[green]Nothing falls back.[/]"]
    parts += [_remark_table("Near misses", explanation.near_misses, most)] if explanation.near_misses else []
    failures = [r for r in explanation.remarks if r.kind == "failure"]
    parts += [_remark_table("Failures", failures, most)] if failures else []
    return Group(*(Text.from_markup(part) if isinstance(part, str) else part for part in parts))


def headline(e: Explanation) -> Text:
    """The counts in one line."""
    text = Text(e.title, style="bold")
    counts = [f"{e.imported_nodes} → {e.final_nodes} nodes", f"{sum(e.regions.values())} fusions recognised"]
    counts += [
        f"{e.launches('generated')} kernels",
        f"{e.launches('vendor')} GEMMs",
        f"{e.launches('opaque')} ATen calls",
    ]
    counts += [f"{len(e.subjects)} graphs"] if len(e.subjects) != 1 else []
    text.append("   " + " · ".join(counts), style="not bold dim")
    return text


def _regions(e: Explanation) -> Text:
    """Declared fusions by name, with the number of their places."""
    return Text(", ".join(f"{name} ×{count}" for name, count in e.regions.items()), style="magenta")


def coverage_bars(e: Explanation, width: int = 48) -> Table:
    """Shares of bytes and FLOPs as bars."""
    table = Table.grid(padding=(0, 2))
    for name, shares in e.coverage.items():
        bar, label = Text(), Text()
        for kind in KINDS:
            bar.append("━" * round(shares[kind] * width), style=COLOURS[kind])
            label.append(f"{kind} {100 * shares[kind]:.1f} %  ", style=COLOURS[kind])
        table.add_row("FLOPs" if name == "flops" else name, bar, label)
    return table


def kernel_table(e: Explanation, most: int) -> Table:
    """Generated kernels, GEMMs and ATen calls, those that move most first."""
    table = _table("Kernels", "kernel", "runs", "launches", "bytes", "FLOPs", "fusions, sources", numbers=(2, 3, 4))
    for row in e.kernels[:most]:
        about = ", ".join(row.fusions) + ("\n" if row.fusions and row.sources else "")
        where = Text(about, style="magenta") + Text(shorten_sources(row.sources), style="dim")
        kind = Text(row.kind, style=COLOURS[row.kind])
        table.add_row(escape(row.name), kind, str(row.launches), amount(row.bytes, "B"), amount(row.flops), where)
    return _rest(table, len(e.kernels) - most)


def _fallback_table(e: Explanation, most: int) -> Table:
    table = _table("Left to ATen", "operation", "count", "bytes", "FLOPs", "why", numbers=(1, 2, 3))
    for f in e.fallbacks[:most]:
        table.add_row(escape(f.name), str(f.count), amount(f.bytes, "B"), amount(f.flops), escape(f.reason))
    return _rest(table, len(e.fallbacks) - most)


def _remark_table(title: str, remarks: list[Remark], most: int) -> Table:
    table = _table(title, "pass", "what", "why", "where")
    for r in remarks[:most]:
        why = r.reason + (f"\n→ {r.suggestion}" if r.suggestion else "")
        times = f" ×{r.figures['count']}" if r.figures.get("count", 1) != 1 else ""
        table.add_row(
            r.pass_name, escape(r.message) + times, escape(why), Text(shorten_sources(r.sources), style="dim")
        )
    return _rest(table, len(remarks) - most)


def _table(title: str, *columns: str, numbers: tuple[int, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i in numbers else "left", header_style="dim", overflow="fold")
    return table


def _rest(table: Table, more: int) -> Table:
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


def shorten_sources(sources: tuple[str, ...], most: int = 2) -> str:
    """The first few places."""
    more = f" and {len(sources) - most} more" if len(sources) > most else ""
    return "; ".join(sources[:most]) + more


def as_text(view: Any, width: int = 140) -> str:
    """What a terminal would show, without colours."""
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(view)
    return capture.get()
