"""``fusec check``: a model against a report that is kept beside it; ``fusec diff``: two models, or reports."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusec.cli.models import compiled_model, read_graph, recording
from fusec.cli.options import BATCH, LENGTH, Batch, Dynamic, Json, Length, Model, Target, Train
from fusec.cli.terminal import (
    CHECK_FAILED,
    UsageError,
    check_read_once,
    check_writable,
    is_graph_file,
    note,
    read_text,
    show_difference,
    write_json,
    write_text,
)

if TYPE_CHECKING:
    from fusec.debug.compare import Change, Report
    from fusec.debug.explanation import Explanation

Tolerance = Annotated[float, typer.Option(min=0, max=100, help="percent by which bytes and coverage may differ")]
Either = Annotated[str, typer.Argument(metavar="MODEL|REPORT", help="as for explain, or a report, REPORT.json")]


def check(
    model: Model,
    against: Annotated[str, typer.Option(metavar="REPORT", help="the report, a JSON file")],
    update: Annotated[bool, typer.Option("--update", help="write the report instead")] = False,
    tolerance: Tolerance = 1.0,
    target: Target = "",
    dynamic: Dynamic = False,
    train: Train = False,
    batch: Batch = BATCH,
    length: Length = LENGTH,
    as_json: Json = False,
) -> None:
    """Compare the fusions of a model with a report of them; --update writes it.

    Exits with 1 where sites or fusions are lost, or there are more launches, bytes or calls of ATen than before.
    """
    if update:
        check_writable(against)
    options = {"target": target, "dynamic": dynamic, "train": train, "batch": batch, "length": length}
    kept = None if update else read_report(against)
    if kept is not None and kept.get("options", options) != options:
        words = filter(None, (_spelled(name, kept["options"].get(name, now)) for name, now in options.items()))
        raise UsageError(f"{against} is a report with other options", fix=f"give {' '.join(words)}, or --update it")
    from fusec.debug.compare import changes, report_of

    now = {"options": options, **report_of(_explained(model, target, dynamic, train, batch, length))}
    if kept is None:
        write_text(against, json.dumps(now, indent=1) + "\n")
        note(f"{against}: {len(now['sites'])} sites, {sum(now['regions'].values())} fusions")
        if as_json:
            write_json({"file": against})
        return
    found = changes(kept, now, tolerance / 100)
    _show(found, as_json)
    if any(change.worse for change in found):
        note(f"where this is intended, --update writes {against} again")
        raise typer.Exit(CHECK_FAILED)


def diff(
    before: Either,
    after: Either,
    tolerance: Tolerance = 0.0,
    target: Target = "",
    dynamic: Dynamic = False,
    train: Train = False,
    batch: Batch = BATCH,
    length: Length = LENGTH,
    text: Annotated[bool, typer.Option("--text", help="the lines of two graph files, whose nodes are matched")] = False,
    as_json: Json = False,
) -> None:
    """Show what differs between the fusions of two models, or reports of them."""
    check_read_once(before, after)
    from fusec.debug.compare import changes, report_of, time_change

    if text:
        _show_lines(before, after, as_json)
        return
    specs, share = (before, after), tolerance / 100
    compiled = {s: _explained(s, target, dynamic, train, batch, length) for s in specs if not is_report(s)}
    old, new = (report_of(compiled[spec]) if spec in compiled else read_report(spec) for spec in specs)
    found = changes(old, new, share)
    if not any(map(is_report, specs)):
        found += time_change(compiled[before], compiled[after], share)
    _show(found, as_json)


def _show_lines(before: str, after: str, as_json: bool) -> None:
    """Show the differences of the texts of two graphs."""
    from fusec.debug.diff import diff_lines

    if not (is_graph_file(before) and is_graph_file(after)):
        raise UsageError("--text compares graph files", fix="write each by `fusec capture MODEL -o FILE.fir`")
    lines = diff_lines(read_graph(before), read_graph(after))
    if as_json:
        write_json(lines)
        return
    for line in lines or ["the same"]:
        show_difference(line)


def _explained(spec: str, target: str, dynamic: bool, train: bool, batch: int, length: int) -> "Explanation":
    """Compile a model or graph."""
    from fusec.debug.capture import CaptureOptions

    compiled = compiled_model(spec, recording(target=target), CaptureOptions(dynamic, train), batch, length)
    return compiled.explained()


def is_report(spec: str) -> bool:
    """Return whether an argument names a report."""
    return spec.endswith(".json")


def read_report(path: str) -> "Report":
    """Read a report.

    Raises:
        UsageError: for a file that is none.
    """
    try:
        found = json.loads(read_text(path))
        from fusec.debug.compare import changes  # here, as it is slow to import

        changes(found, found)
        if not isinstance(found.get("options", {}), dict):
            raise TypeError("its options are no object")
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as reason:
        why, fix = f"{type(reason).__name__}: {reason}"[:200], "fusec check MODEL --against FILE --update writes one"
        raise UsageError(f"{path} is no report", why=why, fix=fix) from reason
    report: Report = found
    return report


def _spelled(name: str, value: Any) -> str:
    """Return an option of the command line; "" for a flag that is not set, or no value."""
    return f"--{name}" if value is True else f"--{name} {value}" if value not in (False, "") else ""


def _show(found: "list[Change]", as_json: bool) -> None:
    if as_json:
        write_json([vars(change) for change in found])
        return
    worse = [change for change in found if change.worse]
    lost = [change for change in worse if change.what == "site"]
    if lost:
        typer.echo(f"{len(lost)} {'site' if len(lost) == 1 else 'sites'} lost; first: {lost[0].name}")
    for change in found:
        typer.secho(f"{'-' if change.worse else '+'} {change}", fg="red" if change.worse else "green")
    if not found:
        typer.echo("the same sites, fusions, launches and bytes")
