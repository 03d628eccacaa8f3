"""Findings of ``fusec why`` as text on a terminal."""

from rich.console import RenderableType
from rich.text import Text

from fusec.debug.text import amount
from fusec.debug.why import Finding

_COLOURS = {"fused": "green", "unnamed": "cyan", "missed": "yellow", "opaque": "yellow", "absent": "dim"}


def finding_view(findings: list[Finding]) -> RenderableType:
    """Findings at a place, a paragraph each."""
    text = Text()
    for v in findings:
        times = f" ×{v.count}" if v.count > 1 else ""
        text.append(f"{v.what}{times}", style="bold").append(f"  {v.status}", style=_COLOURS[v.status])
        text.append(f"  {v.where}\n", style="dim")
        if v.status != "fused":
            why = f"{v.reason} [{v.code}]" if v.code else v.reason
            lost = f"{amount(v.bytes_lost, 'B')} written and read again" if v.bytes_lost else ""
            rows = {"why": why, "nearest": v.attempt, "line": v.text, "lost": lost, "tried": v.tried}
            rows["edit"] = v.edit or ("none is known" if v.status == "missed" and not v.tried else "")
        else:
            rows = {"as": v.reason}
        rows["in"] = ", ".join(v.kernels)
        for name, value in rows.items():
            if value:
                text.append(f"  {name:8}", style="dim").append(f"{value}\n")
    return text if findings else Text("Nothing is fused here, and nothing is missed.", style="dim")
