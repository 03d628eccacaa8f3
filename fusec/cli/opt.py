"""``fusec opt``: run passes on the text of a graph, and look at what each does."""

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusec.cli.models import read_graph
from fusec.cli.terminal import CHECK_FAILED, check_name, note, write_json, write_text

if TYPE_CHECKING:
    from fusec.config import Config
    from fusec.pipeline import Context, PassRecord, Pipeline

PRINTS = ("before", "after", "changed", "diff")
KINDS = ("passed", "missed", "failure", "analysis")


def opt(
    graph: Annotated[str, typer.Argument(metavar="GRAPH", help="a .fir file, or - for standard input")] = "-",
    output: Annotated[str, typer.Option("-o", "--output", help="file to write; - is standard output")] = "-",
    passes: Annotated[str, typer.Option(help="`default`, or `canonicalize,raise{only=rms_norm}`")] = "default",
    target: Annotated[str, typer.Option(help="cpp or triton: whose passes `default` means")] = "cpp",
    printed: Annotated[
        str, typer.Option("--print", help="graphs to print on standard error: before, after, changed, diff")
    ] = "",
    only: Annotated[str, typer.Option("--filter", metavar="PASS", help="print for this pass alone")] = "",
    verify_each: Annotated[
        bool, typer.Option("--verify-each", help="run the graph before and after each pass on sampled inputs")
    ] = False,
    timing: Annotated[bool, typer.Option("--timing", help="a table of passes on standard error")] = False,
    list_passes: Annotated[bool, typer.Option("--list-passes", help="name the passes and stop")] = False,
    apply: Annotated[str, typer.Option(metavar="SELECTOR", help="applications to make: 0..41,!17")] = "",
    disable: Annotated[str, typer.Option(help="passes, fusions and rewrites to leave out")] = "",
    remarks: Annotated[
        str, typer.Option(metavar="KINDS", help="remarks to print on standard error: passed,missed,failure,analysis")
    ] = "",
    sources: Annotated[bool, typer.Option(help="end each line with its place in the model")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="passes and remarks as JSON; the graph only with -o FILE")
    ] = False,
) -> None:
    """Run a pipeline on a graph and write the result."""
    from fusec.config import Config
    from fusec.ir.printer import print_graph
    from fusec.pipeline import Context

    config = Config.from_options(None, {"record": True, "apply": apply, "disable": disable, "target": target})
    pipeline = choose_passes(passes, config, target)
    if list_passes:
        return _list(pipeline, as_json)
    wanted, kinds = _choices("print", printed, PRINTS), _choices("kind of remark", remarks, KINDS)
    if only:
        check_name("pass", only, [step.name for step in pipeline.passes])
    work, context = read_graph(graph), Context(config)
    try:
        pipeline.run(work, context)
    finally:
        for record in context.records:
            if not only or record.name.partition("{")[0] == only:
                _print_record(record, wanted)
        for remark in (r for r in context.remarks if r.kind in kinds):
            typer.echo(str(remark), err=True)
    verdicts = _verify(context.records) if verify_each else {}
    if timing:
        _print_timing(context, verdicts)
    if as_json:
        write_json(_report(context, verdicts, len(work)))
    if not as_json or output != "-":
        write_text(output, print_graph(work, sources=sources))
    _judge(context, verdicts)


def choose_passes(text: str, config: "Config", target: str) -> "Pipeline":
    """The pipeline that a text names, in which the passes have the options that the configuration gives them.

    Raises:
        UsageError: for an unknown pass; close matches are named.
    """
    from fusec.passes import default_pipeline, known_passes
    from fusec.pipeline import Pipeline

    if text == "default":
        return default_pipeline(config, target)
    known = known_passes(config)
    for name in re.findall(r"([\w-]+)\s*(?:\{[^}]*\})?\s*(?:,|$)", text):
        check_name("pass", name, known)
    return Pipeline.parse(text, known)


def _choices(kind: str, text: str, known: Sequence[str]) -> list[str]:
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    for name in chosen:
        check_name(kind, name, known)
    return chosen


def _list(pipeline: "Pipeline", as_json: bool) -> None:
    from fusec.pipeline import describe

    rows = [(describe(step), (step.__doc__ or "").strip().splitlines()[:1]) for step in pipeline.passes]
    if as_json:
        write_json([{"pass": name, "does": "".join(doc)} for name, doc in rows])
        return
    width = max((len(name) for name, _ in rows), default=0)
    for name, doc in rows:
        typer.echo(f"{name:<{width}}  {''.join(doc)}".rstrip())


def _print_record(record: "PassRecord", wanted: Sequence[str]) -> None:
    from fusec.debug.diff import diff_lines

    if "before" in wanted:
        typer.echo(f"// before {record.name}\n{record.before}", err=True)
    if "after" in wanted or ("changed" in wanted and record.changed):
        typer.echo(f"// after {record.name}\n{record.after}", err=True)
    elif "changed" in wanted:
        typer.echo(f"// {record.name}: no change", err=True)
    if "diff" in wanted and record.changed:
        typer.echo(f"// {record.name}", err=True)
        colour = sys.stderr.isatty()
        for line in diff_lines(record.before, record.after):
            fg = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
            typer.secho(line, err=True, fg=fg if colour else None)


def _verify(records: "Sequence[PassRecord]") -> dict[int, Any]:
    """Run both sides of every pass that changed the graph."""
    from fusec.ir.parser import parse_graph
    from fusec.verify.rewrites import check_rewrite

    return {
        i: check_rewrite(parse_graph(r.before), parse_graph(r.after), exact=False)
        for i, r in enumerate(records)
        if r.changed
    }


def _print_timing(context: "Context", verdicts: dict[int, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("pass", "ms", "applications", "changed", *(["verified"] if verdicts else [])):
        table.add_column(column, justify="right" if column in ("ms", "applications") else "left")
    for i, r in enumerate(context.records):
        verdict = [verdicts[i].message if i in verdicts else ""] if verdicts else []
        table.add_row(r.name, f"{1000 * r.seconds:.1f}", str(r.applications), "yes" if r.changed else "", *verdict)
    table.add_row("total", f"{1000 * sum(r.seconds for r in context.records):.1f}", str(context.next_number))
    Console(stderr=True, width=None if sys.stderr.isatty() else 140).print(table)


def _report(context: "Context", verdicts: dict[int, Any], nodes: int) -> dict[str, Any]:
    passes = []
    for i, r in enumerate(context.records):
        row = {"pass": r.name, "seconds": r.seconds, "changed": r.changed, "applications": r.applications}
        passes.append(row | ({"verified": bool(verdicts[i]), "verdict": verdicts[i].message} if i in verdicts else {}))
    return {"nodes": nodes, "passes": passes, "remarks": [r.to_json() for r in context.remarks]}


def _judge(context: "Context", verdicts: dict[int, Any]) -> None:
    """Say which pass failed or changed the meaning, and end with the code for it."""
    from fusec.errors import VerificationError

    for i, verdict in verdicts.items():
        if not verdict:
            raise VerificationError(
                f"pass {context.records[i].name} changes the result", why=verdict.message,
                fix="find the application at fault with --apply and --remarks passed",
            )  # fmt: skip
    failures = context.remarks.of("failure")
    for remark in failures:
        note(str(remark))
    if failures:
        raise typer.Exit(CHECK_FAILED)
