"""The profile of a machine as a table."""

from rich.markup import escape
from rich.table import Table

from fusec.analysis.machine import Machine
from fusec.debug.text import amount


def machine_table(m: Machine) -> Table:
    """The figures of a machine, a line each."""
    table = Table.grid(padding=(0, 3))
    table.add_row("[bold]machine[/]", f"{escape(m.name)}, {m.source}, {m.threads} threads")
    table.add_row("[bold]memory[/]", f"{m.read_gb_s:.3g} GB/s")
    if m.cache_gb_s:
        table.add_row("[bold]last cache[/]", f"{m.cache_gb_s:.3g} GB/s, {amount(m.cache_bytes, 'B')}")
    for name, rate in m.peaks.items():
        unit, _, dtype = name.partition(" ")
        ridge = f"   compute-bound from {m.ridge(dtype, unit):.3g} FLOP/B"
        table.add_row(f"[bold]{name}[/]", f"{amount(rate * 1e9, 'FLOP/s')}{ridge}")
    table.add_row("[bold]launch[/]", f"{m.launch_us:.3g} µs")
    return table
