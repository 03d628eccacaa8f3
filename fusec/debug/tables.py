"""An explanation as tables on a terminal."""

import math
from collections import Counter

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fusec.analysis.machine import ASSUMED
from fusec.codegen.program.constant_folding import PASS_NAME as FREEZE
from fusec.codegen.program.recordings import PASS_NAME as RECORDED
from fusec.debug.explanation import KINDS, Explanation
from fusec.debug.site_status import GENERAL, SiteStatus
from fusec.debug.text import amount, cut_rows, duration, new_table, shorten_sources
from fusec.debug.traffic import Intermediate
from fusec.remarks import Remark

COLOURS = {"generated": "green", "vendor": "blue", "opaque": "yellow"}
MOST_ROWS = 30


def explanation_view(explanation: Explanation, everything: bool = False) -> RenderableType:
    """Return all tables that have rows, under a headline."""
    most = 10**6 if everything else MOST_ROWS
    parts: list[RenderableType] = [headline(explanation)]
    parts += [_regions(explanation)] if explanation.regions else []
    parts += [coverage_bars(explanation), ""]
    parts += [kernel_table(explanation, most)] if explanation.kernels else ["[dim]No kernels.[/]"]
    parts += [traffic_table(explanation, most)] if explanation.traffic.intermediates else []
    parts += [_fallback_table(explanation, most)] if explanation.fallbacks else ["[green]Nothing falls back.[/]"]
    of_patterns = [r for r in explanation.near_misses if "clause" in r.figures]
    others = [r for r in explanation.near_misses if "clause" not in r.figures]
    tables = [("Near misses", of_patterns), ("Kept apart", others)]
    for title, name in (("Frozen", FREEZE), ("CUDA graphs", RECORDED)):
        tables.append((title, [r for r in explanation.remarks if r.pass_name == name]))
    for title, found in tables:
        parts += [_remark_table(title, found, most)] if found else []
    failures = [r for r in explanation.remarks if r.kind == "failure"]
    parts += [_remark_table("Failures", failures, most)] if failures else []
    return Group(*(Text.from_markup(part) if isinstance(part, str) else part for part in parts))


def headline(e: Explanation) -> Text:
    """The counts in one line."""
    text = Text(e.title, style="bold")
    counts = [f"{e.imported_nodes} → {e.final_nodes} nodes", f"{sum(e.regions.values())} fusions recognised"]
    counts += [
        f"{e.launches('generated')} kernels",
        f"{e.launches('vendor')} vendor calls",
        f"{e.launches('opaque')} ATen calls",
    ]
    counts += [f"{len(e.subjects)} graphs"] if len(e.subjects) != 1 else []
    text.append("   " + " · ".join(counts), style="not bold dim")
    return text


def _regions(e: Explanation) -> Text:
    """Return declared fusions by name, with the number of their matches."""
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
    """Generated kernels, vendor calls and ATen calls, those that move most first."""
    columns = ("kernel", "runs", "launches", "bytes", "intermediate", "FLOPs", "fusions, sources")
    table = new_table("Kernels", *columns, numbers=(2, 3, 4, 5))
    for row in e.kernels[:most]:
        about = ", ".join(row.fusions) + ("\n" if row.fusions and row.sources else "")
        where = Text(about, style="magenta") + Text(shorten_sources(row.sources), style="dim")
        kind = Text(row.kind, style=COLOURS[row.kind]).append(", edited" if row.edited else "", style="red")
        moved = (amount(row.bytes, "B"), amount(row.intermediate_bytes, "B"))
        table.add_row(escape(row.name), kind, str(row.launches), *moved, amount(row.flops), where)
    return cut_rows(table, len(e.kernels) - most)


def traffic_table(e: Explanation, most: int) -> Table:
    """Values that one kernel writes and another reads, those that move most first; equal ones together."""
    t = e.traffic
    of = f"{amount(t.bytes, 'B')}, {t.ratio:.2g} times inputs, weights and results"
    table = new_table(f"Written and read again: {of}", "bytes", "value", "from", "to", "why", numbers=(0,))
    equal: dict[tuple[str, ...], list[Intermediate]] = {}
    for value in t.intermediates:
        equal.setdefault((value.type, value.writer, *value.readers, value.reason), []).append(value)
    rows = sorted(equal.values(), key=lambda same: -sum(v.bytes for v in same))
    for same in rows[:most]:
        first, times = same[0], f" ×{len(same)}" if len(same) > 1 else ""
        readers = [f"{name} ×{n}" if n > 1 else name for name, n in Counter(first.readers).items()]
        place = Text(f"{first.type}{times}").append(f"\n{first.place}" if first.place else "", style="dim")
        moved = amount(sum(v.bytes for v in same), "B")
        table.add_row(moved, place, escape(first.writer), escape(", ".join(readers)), escape(first.reason))
    return cut_rows(table, len(rows) - most)


def roofline_view(e: Explanation, everything: bool = False) -> RenderableType:
    """Return the rooflines of all kernels, slowest first, and the totals."""
    most = 10**6 if everything else MOST_ROWS
    return Group(headline(e), _machine_line(e), roofline_table(e, most), _totals(e))


def roofline_table(e: Explanation, most: int) -> Table:
    """Bytes, arithmetic and time of one launch each, and how much of the limit is reached, where that is known."""
    timed = e.totals.measured_us is not None
    measured = ("measured", "GB/s", "GFLOP/s") if timed else ()
    limit = () if e.machine.source == ASSUMED or e.interpreted else ("of the limit",)
    columns = ("kernel", "launches", "bytes", "FLOPs", "FLOP/B", "bound by", "predicted", *measured, *limit)
    rows = sorted(e.kernels, key=lambda k: -k.roofline.us * k.launches)
    numbers = tuple(n for n, name in enumerate(columns) if name not in ("kernel", "bound by", *limit))
    table = new_table("One launch each", *columns, numbers=numbers)
    for row in rows[:most]:
        r = row.roofline
        cells: list[Text | str] = [
            Text(row.name, style=COLOURS[row.kind]),
            str(row.launches),
            amount(r.bytes, "B"),
            amount(r.flops),
        ]
        turns = "".join(f", compute from {size} = {math.ceil(turn)}" for size, turn in r.turns.items() if turn > 1)
        cells += [f"{r.intensity:.3g}", r.bound + turns, duration(r.predicted_us)]
        if timed:
            unknown = r.measured_us is None
            cells += ["-"] * 3 if unknown else [duration(r.us), f"{r.gb_s:.3g}", f"{r.gflop_s:.3g}"]
        table.add_row(*cells, *([share_bar(r.share)] if limit else []))
    return cut_rows(table, len(rows) - most)


def _machine_line(e: Explanation) -> Text:
    m = e.machine
    rates = [f"{name} {amount(rate * 1e9, 'FLOP/s')}" for name, rate in m.peaks.items()]
    near = [f"cache {amount(m.cache_bytes, 'B')} at {m.cache_gb_s:.3g} GB/s"] if m.cache_gb_s else []
    text = Text(f"{m.name}, {m.source}", style="bold")
    figures = [f"memory {m.read_gb_s:.3g} GB/s", *near, *rates, f"launch {m.launch_us:.2g} µs"]
    text.append("   " + " · ".join(figures), style="not bold dim")
    if m.source == ASSUMED:
        text.append(
            "\n`fusec machine measure` measures this one; until then times are guesses.", style="not bold yellow"
        )
    return text


def _totals(e: Explanation) -> Text:
    t = e.totals
    text = Text(f"Together: predicted {duration(t.predicted_us)}", style="bold")
    if t.measured_us is not None and t.unprobed_us is not None and t.probe_us is not None:
        text.append(f", measured {duration(t.measured_us)} ({t.measured_us / max(t.predicted_us, 1e-9):.2f} ×)")
    shares = ", ".join(f"{100 * share:.0f} % {kind}" for kind, share in t.bound.items())
    text.append(f"   time bound by: {shares}", style="not bold")
    if t.unprobed_us is not None and t.probe_us is not None:
        text.append(
            f"\nA whole call takes {duration(t.unprobed_us)} without probes, which add about "
            f"{duration(t.probe_us)} to each step.", style="not bold dim",
        )  # fmt: skip
    return text


def share_bar(share: float, width: int = 10) -> Text:
    """A share as a bar and in percent; a bar that is full can be no faster."""
    full = min(width, max(0, round(share * width)))
    colour = "green" if share > 0.6 else "yellow" if share > 0.25 else "red"
    text = Text("━" * full, style=colour)
    text.append("─" * (width - full), style="dim")
    return text.append(f" {100 * share:.0f} %")


def _fallback_table(e: Explanation, most: int) -> Table:
    table = new_table("Left to ATen", "operation", "count", "bytes", "FLOPs", "why", numbers=(1, 2, 3))
    for f in e.fallbacks[:most]:
        table.add_row(escape(f.name), str(f.count), amount(f.bytes, "B"), amount(f.flops), escape(f.reason))
    return cut_rows(table, len(e.fallbacks) - most)


def _remark_table(title: str, remarks: list[Remark], most: int) -> Table:
    table = new_table(title, "pass", "what", "why", "where")
    for r in remarks[:most]:
        why = r.reason + (f"\n→ {r.suggestion}" if r.suggestion else "")
        why += f"\n  tried: {r.figures['tried']}" if "tried" in r.figures else ""
        why += f"\n  runs in kernel {r.figures['kernel']} all the same" if "kernel" in r.figures else ""
        times = f" ×{r.figures['count']}" if r.figures.get("count", 1) != 1 else ""
        table.add_row(
            r.pass_name, escape(r.message) + times, escape(why), Text(shorten_sources(r.sources), style="dim")
        )
    return cut_rows(table, len(remarks) - most)


def site_view(e: Explanation) -> RenderableType:
    """The sites by kind, then those that are not fused, equal ones together."""
    counts = new_table("Sites", "kind", "fused", "recognised", "runs as", numbers=(1, 2))
    for kind in dict.fromkeys(v.site.kind for v in e.sites):
        mine = [v for v in e.sites if v.site.kind == kind]
        fused = sum(v.fused for v in mine)
        names = dict.fromkeys(name for v in mine for name in v.meanings or v.kernels)
        share = Text(f"{fused}/{len(mine)}", style="green" if fused == len(mine) else "yellow")
        known = [v.recognised for v in mine]
        named = "" if None in known else f"{sum(map(bool, known))}/{len(mine)}"
        counts.add_row(kind, share, named, Text(", ".join(names), style="magenta"))
    if not e.sites:
        return Group(headline(e), Text(_no_sites(e), style="yellow"))
    unnamed = [site for site in e.sites if site.fused and site.recognised is False]
    missed: dict[tuple[str, str], list[SiteStatus]] = {}
    for site in e.sites:
        if not site.fused:
            missed.setdefault((site.site.kind, site.reason), []).append(site)
    reasons = new_table("Not fused", "kind", "why", "where", "bytes lost", numbers=(3,))
    for (kind, reason), same in missed.items():
        times = f" ×{len(same)}" if len(same) > 1 else ""
        why = f"{reason}\n→ {same[0].edit}" + (f"\n  nearest: {same[0].attempt}" if same[0].attempt else "")
        where = Text(same[0].place + (f"\n{same[0].text}" if same[0].text else ""), style="dim")
        reasons.add_row(kind + times, escape(why), where, amount(sum(v.bytes_lost for v in same), "B"))
    parts: list[RenderableType] = [reasons] if missed else []
    parts += [_unnamed_table(unnamed)] if unnamed else []
    return Group(headline(e), counts, *(parts or [Text("Every site is fused.", style="green")]))


def _unnamed_table(sites: list[SiteStatus]) -> Table:
    """Sites whose kernel is the one of no fusion, with the fusion that is closest; equal ones together."""
    same: dict[tuple[str, ...], list[SiteStatus]] = {}
    for site in sites:
        same.setdefault((site.site.kind, *site.kernels, site.attempt, site.edit), []).append(site)
    table = new_table("Not recognised", "kind", "runs in", "nearest", "where")
    for equal in same.values():
        first, times = equal[0], f" ×{len(equal)}" if len(equal) > 1 else ""
        nearest = first.attempt or GENERAL
        nearest += f": expected {first.expected}, found {first.found}" if first.attempt else ""
        nearest += (f"\n→ {first.edit}" if first.edit else "") + (f"\n  tried: {first.tried}" if first.tried else "")
        where = shorten_sources(tuple(s.place or s.site.module for s in equal))
        table.add_row(first.site.kind + times, ", ".join(first.kernels), escape(nearest), Text(where, style="dim"))
    return table


def _no_sites(e: Explanation) -> str:
    """Return where sites come from, for a model that has none."""
    misses = len(e.near_misses)
    found = f"; `fusec explain` without --sites lists {misses} near miss{'es' if misses > 1 else ''}" if misses else ""
    return f"No sites: they are found from the classes and names of modules, such as RMSNorm or q_proj{found}."
