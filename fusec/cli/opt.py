"""``fusec opt``: run passes on the text of a graph, and print the effect of each."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusec.cli.models import read_graph, run_script
from fusec.cli.options import Declare, chosen
from fusec.cli.terminal import CHECK_FAILED, UsageError, check_name, note, show_difference, write_json, write_text
from fusec.pass_list import DEFAULT, DESCRIPTIONS

if TYPE_CHECKING:
    from fusec.config import Config
    from fusec.debug.subject import Subject
    from fusec.pipeline import PassRecord
    from fusec.verify.rewrites import EquivalenceResult

PRINTS = ("before", "after", "changed", "diff")
KINDS = ("passed", "missed", "failure", "analysis")

GraphText = Annotated[str, typer.Argument(metavar="GRAPH", help="a .fir file, or - for standard input")]
Output = Annotated[str, typer.Option("-o", "--output", help="file to write; - is standard output")]
Passes = Annotated[str, typer.Option(help="`default`, or `canonicalize,raise{only=rms_norm}`")]
Target = Annotated[
    str, typer.Option(help="cpp or triton: whose passes `default` means; by default by the device of the inputs")
]
Printed = Annotated[
    str, typer.Option("--print", help="graphs to print on standard error: before, after, changed, diff")
]
Only = Annotated[str, typer.Option("--filter", metavar="PASS", help="print for this pass alone")]
VerifyEach = Annotated[
    bool, typer.Option("--verify-each", help="run the graph before and after each pass on sampled inputs")
]
Timing = Annotated[bool, typer.Option("--timing", help="a table of passes on standard error")]
ListPasses = Annotated[bool, typer.Option("--list-passes", help="name the passes and stop")]
Apply = Annotated[str, typer.Option(metavar="SELECTOR", help="applications to make: 0..41,!17")]
Disable = Annotated[str, typer.Option(help="passes, fusions and rewrites to leave out")]
Remarks = Annotated[
    str, typer.Option(metavar="KINDS", help="remarks to print on standard error: passed,missed,failure,analysis")
]
Sources = Annotated[bool, typer.Option(help="end each line of a graph with its source location")]
Json = Annotated[bool, typer.Option("--json", help="passes and remarks as JSON; the graph only with -o FILE")]


def opt(
    graph: GraphText = "-",
    output: Output = "-",
    passes: Passes = "default",
    target: Target = "",
    printed: Printed = "",
    only: Only = "",
    verify_each: VerifyEach = False,
    timing: Timing = False,
    list_passes: ListPasses = False,
    apply: Apply = "",
    disable: Disable = "",
    declare: Declare = "",
    remarks: Remarks = "",
    sources: Sources = True,
    as_json: Json = False,
) -> None:
    """Run a pipeline on a graph and write the result."""
    from fusec.config import Config

    if declare:
        run_script(declare)
    options = chosen(apply=apply, disable=disable, target=target)
    config = Config.from_options(None, options)
    if list_passes:
        return _list(passes, config, as_json)
    from fusec.debug.optimize import choose_passes, require_agreement, verify_passes
    from fusec.debug.optimize import opt as run_passes
    from fusec.ir.printer import print_graph

    pipeline = choose_passes(passes, config)
    wanted, kinds = _choices("print", printed, PRINTS), _choices("kind of remark", remarks, KINDS)
    if only and not wanted:
        raise UsageError("--filter has no effect", why="it chooses among the graphs of --print", fix="--print changed")
    if only:
        check_name("pass", only, [step.name for step in pipeline.passes])
    found = run_passes(read_graph(graph), passes, options=options)
    _print_history(found, wanted, only, kinds, sources)
    results = verify_passes(found.records) if verify_each else {}
    if timing:
        _print_timing(found.records, results)
    if as_json:
        write_json(_report(found, results))
    if not as_json or output != "-":
        write_text(output, print_graph(found.final, sources=sources))
    if verify_each:
        require_agreement(found, results, passes, options)
    _print_results(found, graph)


def _choices(kind: str, text: str, known: Sequence[str]) -> list[str]:
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    for name in chosen:
        check_name(kind, name, known)
    return chosen


def _list(passes: str, config: "Config", as_json: bool) -> None:
    """List the passes of a pipeline; the default one without importing them, as torch and sympy are slow to import."""
    names = list(DEFAULT)
    if passes != "default" or config.disable:
        from fusec.debug.optimize import choose_passes
        from fusec.pipeline import describe

        names = [describe(step) for step in choose_passes(passes, config).passes]
    rows = [{"pass": name, "does": DESCRIPTIONS[name.partition("{")[0]]} for name in names]
    if as_json:
        write_json(rows)
        return
    width = max((len(row["pass"]) for row in rows), default=0)
    for row in rows:
        typer.echo(f"{row['pass']:<{width}}  {row['does']}")


def _print_history(found: "Subject", wanted: Sequence[str], only: str, kinds: Sequence[str], sources: bool) -> None:
    for record in found.records if wanted else ():
        if not only or record.name.partition("{")[0] == only:
            _print_record(record if sources else _without_sources(record), wanted, sources)
    for remark in (r for r in found.remarks if r.kind in kinds):
        typer.echo(str(remark), err=True)


def _without_sources(record: "PassRecord") -> "PassRecord":
    from fusec.ir.parser import parse_graph
    from fusec.ir.printer import print_graph

    before, after = (print_graph(parse_graph(text), sources=False) for text in (record.before, record.after))
    return replace(record, before=before, after=after)


def _print_record(record: "PassRecord", wanted: Sequence[str], sources: bool) -> None:
    if "before" in wanted:
        typer.echo(f"// before {record.name}\n{record.before}", err=True)
    if "after" in wanted or ("changed" in wanted and record.changed):
        typer.echo(f"// after {record.name}\n{record.after}", err=True)
    elif "changed" in wanted:
        typer.echo(f"// {record.name}: no change", err=True)
    if "diff" in wanted and record.changed:
        from fusec.debug.diff import diff_lines
        from fusec.ir.parser import parse_graph

        typer.echo(f"// {record.name}", err=True)
        for line in diff_lines(parse_graph(record.before), parse_graph(record.after), sources):
            show_difference(line, err=True)


def _print_timing(records: "Sequence[PassRecord]", results: "dict[int, EquivalenceResult]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("pass", "ms", "applications", "changed", *(["verified"] if results else [])):
        table.add_column(column, justify="right" if column in ("ms", "applications") else "left")
    for i, r in enumerate(records):
        result = [results[i].message if i in results else ""] if results else []
        table.add_row(r.name, f"{1000 * r.seconds:.1f}", str(r.applications), "yes" if r.changed else "", *result)
    table.add_row("total", f"{1000 * sum(r.seconds for r in records):.1f}", str(sum(r.applications for r in records)))
    Console(stderr=True, width=None if sys.stderr.isatty() else 140).print(table)


def _report(found: "Subject", results: "dict[int, EquivalenceResult]") -> dict[str, Any]:
    passes = []
    for i, r in enumerate(found.records):
        row = {"pass": r.name, "seconds": r.seconds, "changed": r.changed, "applications": r.applications}
        passes.append(row | ({"verified": bool(results[i]), "result": results[i].message} if i in results else {}))
    return {"nodes": len(found.final), "passes": passes, "remarks": [r.to_json() for r in found.remarks]}


def _print_results(found: "Subject", graph: str) -> None:
    """Report failed passes, and exit with the code for it."""
    failures = [remark for remark in found.remarks if remark.kind == "failure"]
    for remark in failures:
        note(str(remark))
    if failures:
        note(f"fusec reduce {graph if graph != '-' else 'GRAPH.fir'} --strict shrinks the graph")
        raise typer.Exit(CHECK_FAILED)
