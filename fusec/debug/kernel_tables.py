"""One kernel, and other ways to compute the same, as tables on a terminal."""

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fusec.debug.explanation import KernelRow
from fusec.debug.kernel_bench import Alternative
from fusec.debug.roofline import Roofline
from fusec.debug.text import amount, duration, new_table


def kernel_view(row: KernelRow) -> RenderableType:
    """The facts of one kernel, without its source."""
    r = row.roofline
    measured = "" if r.measured_us is None else f", measured {duration(r.measured_us)}"
    table = Table.grid(padding=(0, 2))
    for name, value in {
        "computes": row.formula,
        "fusions": ", ".join(row.fusions),
        "from": "\n".join(row.sources),
        "launches": f"{row.launches}, {amount(row.bytes_each, 'B')} and {amount(row.flops_each)} FLOPs each",
        "limit": f"{duration(r.limit_us)} by {r.bound}, predicted {duration(r.predicted_us)}{measured}",
        "edited": row.edited,
    }.items():
        if value:
            table.add_row(Text(name, style="dim"), escape(value))
    return Group(Text(row.name, style="bold"), table)


def alternative_view(name: str, found: list[Alternative], limit: Roofline, known: bool) -> RenderableType:
    """Several ways to compute a region, with their times, and the share of the limit where that is ``known``."""
    table = new_table(f"{name}, alone", "way", "kernels", "time", "of the limit", numbers=(1, 2, 3))
    for one in found:
        share = f"{100 * limit.limit_us / one.us:.0f} %" if known and limit.limit_us > 0 else "unknown"
        table.add_row(one.name, str(one.kernels), duration(one.us), share)
    return table
