"""Does every application of every rewrite keep the meaning, on the models of transformers, and what does asking cost?

``python -m bench.verification``: each model is compiled twice, without and with ``options={"verify": True}``.
"""

import argparse
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import nn

from bench.check import SHAPES
from bench.families import FAMILIES, chosen
from bench.harness import progress, report
from bench.models import DTYPES
from bench.numerics import cast_inputs, cast_parameters
from bench.record import write_result


@dataclass
class Verified:
    """What was found on one model."""

    model: str
    applications: int = 0
    """Rewrites that were made."""
    verified: int = 0
    """Of these, those whose two sides were run and compared."""
    failures: list[str] = field(default_factory=list)
    """Rewrites that change a result, passes that were undone, graphs that were left to ATen, and exceptions."""
    unknown: list[str] = field(default_factory=list)
    """Rewrites that could not be judged."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of all passes, ``with`` and ``without`` the comparisons."""

    @property
    def passed(self) -> bool:
        """Whether every application was compared and none failed."""
        return not self.failures and not self.unknown and 0 < self.applications == self.verified

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"passed": self.passed}


def verify(name: str, model: nn.Module, inputs: Mapping[str, Any], dynamic: bool | None = None) -> Verified:
    """Compile a model without and with verification, run it once each time, and count; it is not trained."""
    found = Verified(name)
    for case in ("without", "with"):
        try:
            compiled = _compiled(model, inputs, dynamic, case == "with")
        except Exception as problem:
            cause = getattr(problem, "inner_exception", problem)  # Dynamo wraps what a backend raises
            found.failures.append(" ".join(f"{type(cause).__name__}: {cause}".split())[:300])
            return found
        found.seconds[case] = sum(graph.seconds["passes"] for graph in compiled)
    records = [record for graph in compiled for record in graph.records]
    remarks = [remark for graph in compiled for remark in graph.remarks]
    found.applications = sum(record.applications for record in records)
    found.verified = sum(record.verified for record in records)
    found.failures += [str(remark) for remark in remarks if remark.kind == "failure"]
    found.unknown += [str(remark) for remark in remarks if "could not be verified" in remark.message]
    found.failures += _left_to_aten()
    return found


def _compiled(model: nn.Module, inputs: Mapping[str, Any], dynamic: bool | None, verify: bool) -> list[Any]:
    """Everything that is compiled in a call of the model."""
    from fusec.config import Config
    from fusec.dynamo import backend_for, compiled_graphs, reset

    torch._dynamo.reset()
    reset()
    with torch.no_grad():
        torch.compile(model, backend=backend_for(Config(verify=verify)), dynamic=dynamic)(**inputs)
    return compiled_graphs()


def _left_to_aten() -> list[str]:
    from fusec.dynamo import fallbacks

    return [f"a whole graph is left to ATen: {reason}" for reason in fallbacks()]


def main(words: list[str] | None = None) -> int:
    """Every family in every dtype and mode; the exit status is 1 when one is not verified whole."""
    options = _parser().parse_args(words)
    warnings.filterwarnings("ignore", module="torch._dynamo")
    cases = [
        (family, dtype, mode)
        for family in chosen(options.models)
        for dtype in options.dtypes.split(",")
        for mode in options.modes.split(",")
    ]
    rows: list[dict[str, Any]] = []
    with progress() as bar:
        task = bar.add_task("verify", total=len(cases))
        for family, dtype, mode in cases:
            bar.update(task, description=f"{family.name} {dtype} {mode}")
            model = cast_parameters(family.build(seed=options.seed), DTYPES[dtype])
            inputs = cast_inputs(family.sample(*SHAPES[mode][-1], options.seed), DTYPES[dtype])
            if not rows:  # patterns are traced once in a process
                verify(family.name, model, inputs)
            found = verify(family.name, model, inputs, dynamic=mode == "dynamic")
            rows.append({"dtype": dtype, "mode": mode, **found.to_json()})
            for reason in (*found.failures, *found.unknown):
                bar.console.print(f"[red]{family.name} {dtype} {mode}[/]: {reason}", highlight=False)
            bar.advance(task)
    passed = all(row["passed"] for row in rows)
    content = {"models": rows, "applications": sum(row["applications"] for row in rows), "passed": passed}
    console = report(options.width)
    console.print(table(rows))
    path = write_result("verification", options.seed, content, options.json)
    console.print(f"written to {path}", style="dim", highlight=False)
    return int(not passed)


def table(rows: list[dict[str, Any]]) -> Table:
    """One line per model, dtype and mode, and one for all."""
    total = sum(row["applications"] for row in rows)
    shown = Table(title=f"Applications of rewrites whose two sides agree: {total} asked for")
    for column in ("model", "dtype", "mode", "", "made", "verified", "failed", "without", "with verify", "each"):
        shown.add_column(column, justify="left" if column in ("model", "dtype", "mode", "") else "right")
    for row in rows:
        shown.add_row(row["model"], row["dtype"], row["mode"], *_figures([row]))
    shown.add_row("all", "", "", *_figures(rows))
    shown.caption = "without, with verify: seconds of all passes; each: milliseconds more for one application"
    return shown


def _figures(rows: list[dict[str, Any]]) -> list[str]:
    made, verified = (sum(row[name] for row in rows) for name in ("applications", "verified"))
    failed = sum(len(row["failures"]) + len(row["unknown"]) for row in rows)
    without, with_ = (sum(row["seconds"].get(name, 0.0) for row in rows) for name in ("without", "with"))
    mark = "[green]pass[/]" if all(row["passed"] for row in rows) else "[red]FAIL[/]"
    each = f"{1e3 * (with_ - without) / verified:.1f} ms" if verified else "-"
    return [mark, str(made), str(verified), str(failed), f"{without:.2f} s", f"{with_:.2f} s", each]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.verification", description=__doc__)
    add = parser.add_argument
    add("--models", default="", metavar="A,B", help=f"by default all: {', '.join(FAMILIES)}")
    add("--dtypes", default=",".join(DTYPES), metavar="A,B")
    add("--modes", default=",".join(SHAPES), metavar="A,B", help="static, dynamic or both")
    add("--seed", type=int, default=0)
    add("--json", default="", metavar="FILE", help="by default bench/results/verification.json")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
