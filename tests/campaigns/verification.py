"""Does every application of every rewrite, and every pass as a whole, keep the meaning, and what does asking cost?

``python -m tests.campaigns.verification`` and ``python -m tests.campaigns.verification --models llama,t5``: the passes
are run on the graphs of architectures of transformers, without and with ``options={"verify": True}``. No code is
generated.
"""

import argparse
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from typing import Any

import torch
from rich.table import Table
from torch import nn

from bench.families import FAMILIES, chosen
from bench.harness import progress, report
from bench.numerics import DTYPES, USUAL, cast_inputs, cast_parameters
from tests.campaigns.check import SHAPES, refusal
from tests.campaigns.record import write_result
from tests.campaigns.zoo import ARCHITECTURES


@dataclass
class Verified:
    """What was found on one model."""

    model: str
    applications: int = 0
    """Rewrites that were made."""
    verified: int = 0
    """Of these, those whose two sides were run and compared."""
    passes: int = 0
    """Passes that changed a graph; each is compared as a whole, too."""
    failures: list[str] = field(default_factory=list)
    """Rewrites and passes that change a result, passes that raised, graphs left to ATen, and exceptions."""
    unknown: list[str] = field(default_factory=list)
    """Rewrites and passes that could not be judged."""
    refused: str = ""
    """What eager itself raises; then there is nothing to compile."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of all passes, ``with`` and ``without`` the comparisons."""

    @property
    def passed(self) -> bool:
        """Whether every application was compared and none failed."""
        return not self.failures and not self.unknown and 0 < self.applications == self.verified

    @property
    def failed(self) -> bool:
        """Whether it did not pass, though eager runs it."""
        return not (self.passed or self.refused)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"passed": self.passed, "failed": self.failed}


def verify(name: str, model: nn.Module, inputs: Mapping[str, Any], dynamic: bool = False) -> Verified:
    """Run the passes on what a call of a model leads to, without and with verification, and count."""
    from fusec.debug.capture import capture
    from fusec.debug.optimize import opt
    from fusec.dynamo import fallbacks

    found = Verified(name)
    torch._dynamo.reset()  # or a second model of a class might be captured with symbols
    try:
        graphs = capture(model, dynamic=dynamic, **inputs)
    except Exception as problem:
        found.failures.append(" ".join(f"{type(problem).__name__}: {problem}".split())[:300])
        graphs = []
    found.failures += [f"a whole graph is left to ATen: {reason}" for reason in fallbacks()]
    found.seconds = {"without": 0.0, "with": 0.0}
    for graph in graphs:
        opt(graph)  # patterns are traced once in a process
        for case in found.seconds:
            subject = opt(graph, options={"verify": case == "with"})
            found.seconds[case] += sum(record.seconds for record in subject.records)
        found.passes += sum(record.changed for record in subject.records)
        found.applications += sum(record.applications for record in subject.records)
        found.verified += sum(record.verified for record in subject.records)
        found.failures += [str(remark) for remark in subject.remarks if remark.kind == "failure"]
        found.unknown += [str(remark) for remark in subject.remarks if "could not be verified" in remark.message]
    return found


def verify_named(name: str, dtype: str, mode: str, seed: int) -> dict[str, Any]:
    """One architecture in one dtype and mode."""
    warnings.filterwarnings("ignore")
    family = ARCHITECTURES[name]
    try:
        model = cast_parameters(family.build(seed=seed), DTYPES[dtype])
        inputs = cast_inputs(family.sample(*SHAPES[mode][-1], seed), DTYPES[dtype])
        refused = refusal(family, model, inputs, seed)
        found = Verified(name, refused=refused) if refused else verify(name, model, inputs, mode == "dynamic")
    except Exception as problem:  # transformers itself does not take the configuration
        found = Verified(name, failures=[f"{type(problem).__name__}: {problem}"[:300]])
    return {"dtype": dtype, "mode": mode, **found.to_json()}


def main(words: list[str] | None = None) -> int:
    """Every architecture in every dtype and mode; the exit status is 1 when one is not verified whole."""
    options = _parser().parse_args(words)
    cases = [
        (family.name, dtype, mode, options.seed)
        for family in chosen(options.models, ARCHITECTURES)
        for dtype in options.dtypes.split(",")
        for mode in (options.modes.split(",") if options.modes else _modes(family.name))
    ]
    found = {(row["model"], row["dtype"], row["mode"]): row for row in _run(cases, options.jobs)}
    rows = [found[case[:3]] for case in cases]
    passed = not any(row["failed"] for row in rows)
    sums = {name: sum(row[name] for row in rows) for name in ("applications", "passes")}
    console = report(options.width)
    console.print(table(rows))
    path = write_result("verification", options.seed, {"models": rows, **sums, "passed": passed}, options.json)
    console.print(f"written to {path}", style="dim", highlight=False)
    return int(not passed)


def _modes(name: str) -> list[str]:
    """Those that ``models`` and ``architectures`` check; with symbols, Dynamo takes minutes for a Swin."""
    return [*SHAPES] if name in FAMILIES else ["static"]


def _run(cases: list[tuple[Any, ...]], jobs: int) -> Iterator[dict[str, Any]]:
    """All cases, as they come."""
    with progress() as bar, ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        task = bar.add_task("verify", total=len(cases))
        for done in as_completed([pool.submit(verify_named, *case) for case in cases]):
            row = done.result()
            for reason in (*row["failures"], *row["unknown"]):
                place = f"{row['model']} {row['dtype']} {row['mode']}"
                bar.console.print(f"[red]{place}[/]: {reason}", highlight=False)
            bar.advance(task)
            yield row


def table(rows: list[dict[str, Any]]) -> Table:
    """One line per model, dtype and mode, and one for all."""
    total = sum(row["applications"] for row in rows)
    shown = Table(title=f"Applications of rewrites whose two sides agree: {total} asked for")
    figures = ("made", "verified", "passes", "failed", "without", "with verify", "each")
    for column in ("model", "dtype", "mode", "", *figures):
        shown.add_column(column, justify="left" if column in ("model", "dtype", "mode", "") else "right")
    for row in rows:
        shown.add_row(row["model"], row["dtype"], row["mode"], *_figures([row]))
    shown.add_row("all", "", "", *_figures(rows))
    shown.caption = "passes: compared as a whole; without, with: seconds of all passes; each: more for one application"
    return shown


def _figures(rows: list[dict[str, Any]]) -> list[str]:
    made, verified, passes = (sum(row[name] for row in rows) for name in ("applications", "verified", "passes"))
    failed = sum(len(row["failures"]) + len(row["unknown"]) for row in rows)
    without, with_ = (sum(row["seconds"].get(name, 0.0) for row in rows) for name in ("without", "with"))
    refused = "[yellow]eager refuses[/]" if all(row["refused"] for row in rows) else "[green]pass[/]"
    mark = "[red]FAIL[/]" if any(row["failed"] for row in rows) else refused
    each = f"{1e3 * (with_ - without) / verified:.1f} ms" if verified else "-"
    return [mark, str(made), str(verified), str(passes), str(failed), f"{without:.2f} s", f"{with_:.2f} s", each]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.verification", description=__doc__)
    add = parser.add_argument
    add("--models", default="", metavar="A,B", help=f"by default all: {', '.join(ARCHITECTURES)}")
    add("--dtypes", default=",".join(USUAL), metavar="A,B")
    add("--modes", default="", metavar="A,B", help=f"by default static, and dynamic too for {', '.join(FAMILIES)}")
    add("--jobs", type=int, default=2, help="processes at a time")
    add("--seed", type=int, default=0)
    add("--json", default="", metavar="FILE", help="by default tests/campaigns/results/verification.json")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
