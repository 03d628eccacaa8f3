"""Is fusec right on the models of transformers, and does the check that says so find planted faults?

``python -m tests.campaigns.models --check`` and ``python -m tests.campaigns.models --faults``
"""

import argparse
import warnings
from collections.abc import Iterable
from typing import Any

from rich.table import Table

from bench.families import FAMILIES, chosen
from bench.harness import progress, report
from bench.numerics import DTYPES, USUAL
from bench.peers import backend_named
from fusec.debug.explanation import KINDS
from tests.campaigns.check import SHAPES, Result, check
from tests.campaigns.faults import FAULTS, planted
from tests.campaigns.record import write_result


def main(words: list[str] | None = None) -> int:
    """Run what is asked; the exit status is 1 when anything fails."""
    options = _parser().parse_args(words)
    warnings.filterwarnings("ignore", module="torch._dynamo")
    if not (options.check or options.faults):
        _parser().error("give --check or --faults")
    console, failed = report(options.width), False
    content: dict[str, Any] = {"backend": options.backend, "attention": options.attention}
    if options.check:
        results = run_check(options)
        console.print(check_table(results))
        for result in results:
            if not result.passed:
                console.print(f"[red]{result.model} {result.dtype} {result.mode}[/]: {why_failed(result)}")
        content["check"] = [result.to_json() for result in results]
        failed |= not all(result.passed for result in results)
    if options.faults:
        rows = run_faults(options)
        console.print(faults_table(rows))
        content["faults"] = rows
        failed |= not all(row["rejected"] for row in rows)
    content["passed"] = not failed
    name = "-".join(part for part in ("models", options.backend != "fusec" and options.backend) if part)
    console.print(f"written to {write_result(name, options.seed, content, options.json)}", style="dim", highlight=False)
    return int(failed)


def run_check(options: argparse.Namespace) -> list[Result]:
    """Every family in every dtype and mode."""
    backend = backend_named(options.backend)
    cases = [
        (family, DTYPES[dtype], mode)
        for family in chosen(options.models)
        for dtype in options.dtypes.split(",")
        for mode in options.modes.split(",")
    ]
    results = []
    with progress() as bar:
        task = bar.add_task("check", total=len(cases))
        for family, dtype, mode in cases:
            bar.update(task, description=f"{family.name} {dtype} {mode}")
            results.append(check(family, dtype, mode, backend, options.attention, options.seed))
            bar.console.print(summary_text(results[-1]), highlight=False, soft_wrap=True)
            bar.advance(task)
    return results


def check_table(results: list[Result]) -> Table:
    """One line per model."""
    shown = Table(title="The numeric rule: error over its bound, at most 1")
    for column in ("model", "", "worst ratio", "graphs", "regions", "kernels", "bytes", "FLOPs", "activations"):
        shown.add_column(column, no_wrap=True)
    shown.add_column("left to ATen")
    for name in dict.fromkeys(result.model for result in results):
        shown.add_row(*_line(name, [result for result in results if result.model == name]))
    shown.caption = (
        "kernels, bytes, FLOPs: generated / vendor / ATen calls, of the graph that moves most; activations: "
        "share of generated kernels in the traffic of computed floats outside vendor calls, attention and lookups"
    )
    return shown


def _line(name: str, results: list[Result]) -> list[str]:
    summary = largest(results)
    fallen = dict.fromkeys(name for result in results for one in result.summaries for name in one["fallbacks"])
    whole = dict.fromkeys(reason for result in results for reason in result.left_to_aten)
    verdict = "[green]pass[/]" if all(result.passed for result in results) else "[red]FAIL[/]"
    flips = sum(result.flips for result in results)
    return [
        name,
        verdict,
        f"{max(result.ratio for result in results):.3f}" + (f" ({flips} ties)" if flips else ""),
        str(max(result.graphs for result in results)),
        *_figures(summary),
        ", ".join([*(word.removeprefix("aten.").removesuffix(".default") for word in fallen), *whole]) or "-",
    ]


def largest(results: list[Result]) -> dict[str, Any]:
    """What fusec says of the graph that moves most: there shares mean something."""
    return max((s for result in results for s in result.summaries), key=lambda s: sum(s["bytes"].values()), default={})


def _figures(summary: dict[str, Any]) -> list[str]:
    """The cells of regions, kernels, coverage three ways in bytes and FLOPs, and generated share of activations."""
    if not summary:
        return ["-"] * 5
    kernels = "/".join(str(summary["kernels"][kind]) for kind in KINDS)
    shares = (" / ".join(f"{summary['coverage'][unit][kind]:.0%}" for kind in KINDS) for unit in ("bytes", "flops"))
    return [str(sum(summary["regions"].values())), kernels, *shares, f"{summary['activations']:.1%}"]


def summary_text(result: Result) -> str:
    """One result in a line, printed as soon as it is there."""
    mark = "[green]pass[/]" if result.passed else "[red]FAIL[/]"
    regions, kernels, moved, work, activations = _figures(largest([result]))
    return (
        f"{mark} {result.model:12} {result.dtype:9} {result.mode:8} ratio {result.ratio:.3f}  regions {regions}  "
        f"kernels {kernels}  bytes {moved}  FLOPs {work}  activations {activations}"
    )


def why_failed(result: Result) -> str:
    """In one line."""
    reasons = [result.error, result.reason, result.uncovered, *(f"graph break: {reason}" for reason in result.breaks)]
    reasons += [f"a whole graph is left to ATen: {reason}" for reason in result.left_to_aten]
    return "; ".join(filter(None, reasons)) or f"{result.ratio:.2f} times the bound"


def run_faults(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every planted fault in every dtype: each must run, and break the rule."""
    backend = backend_named(options.backend)
    rows = []
    with progress() as bar:
        task = bar.add_task("faults", total=len(FAULTS))
        for fault in FAULTS:
            bar.update(task, description=fault.name)
            row: dict[str, Any] = {"fault": fault.name, "meaning": fault.plant.__doc__, "model": fault.family}
            for dtype in options.dtypes.split(","):
                result = check(
                    FAMILIES[fault.family],
                    DTYPES[dtype],
                    "static",
                    planted(fault, backend),
                    seed=options.seed,
                    shapes=[fault.shape],
                )
                row[dtype] = {"ratio": result.ratio, "reason": result.reason, "error": result.error}
                row["rejected"] = row.get("rejected", True) and result.differs
            rows.append(row)
            bar.advance(task)
    return rows


def faults_table(rows: Iterable[dict[str, Any]]) -> Table:
    """One line per fault."""
    rows = list(rows)
    shown = Table(title=f"Planted faults: {sum(row['rejected'] for row in rows)} of {len(rows)} found")
    dtypes = [name for name in DTYPES if rows and name in rows[0]]
    for column in ("fault", "in", "", *(f"{dtype} (× bound)" for dtype in dtypes)):
        shown.add_column(column)
    for row in rows:
        found = "[green]found[/]" if row["rejected"] else "[red]MISSED[/]"
        cells = [row[dtype]["error"] or row[dtype]["reason"] or f"{row[dtype]['ratio']:.3g}" for dtype in dtypes]
        shown.add_row(row["fault"], row["model"], found, *cells)
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.models", description=__doc__)
    add = parser.add_argument
    add("--check", action="store_true", help="hold every model against the numeric rule")
    add("--faults", action="store_true", help="plant faults, each of which the check must find")
    add("--models", default="", metavar="A,B", help=f"by default all: {', '.join(FAMILIES)}")
    add("--dtypes", default=",".join(USUAL), metavar="A,B")
    add("--modes", default=",".join(SHAPES), metavar="A,B", help="static, dynamic or both")
    add("--dynamic", dest="modes", action="store_const", const="dynamic", help="the same as --modes dynamic")
    add("--backend", default="fusec", help="fusec, interpreter, inductor, aot_eager or eager")
    add("--attention", default="sdpa", choices=("sdpa", "eager"), help="how transformers writes attention")
    add("--seed", type=int, default=0)
    add("--json", default="", metavar="FILE", help="by default tests/campaigns/results/models.json")
    add("--width", type=int, default=None, help="of the tables")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
