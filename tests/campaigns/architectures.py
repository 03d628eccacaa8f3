"""Which fusions are found in which architectures of transformers, are their results right, and why are others missed?

``python -m tests.campaigns.architectures`` and ``python -m tests.campaigns.architectures --models llama,t5``
"""

import argparse
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from typing import Any

import torch
from rich.table import Table

from bench.families import chosen
from bench.harness import progress, report
from bench.numerics import DTYPES
from bench.peers import backend_named
from fusec.analysis.sites import RULES
from tests.campaigns.check import Shape, check
from tests.campaigns.models import largest
from tests.campaigns.record import write_result
from tests.campaigns.routing import Routed
from tests.campaigns.zoo import ARCHITECTURES

SHAPES: list[Shape] = [(1, 13, "none"), (3, 40, "left")]
"""One whose matrix products are small enough to be generated, and one that leaves them to the vendor."""
LEAST_FUSED = 0.95
MOST_OPAQUE = {"flops": 0.01, "bytes": 0.02}
"""What is promised of dense transformers."""


@dataclass
class Found:
    """One architecture in one dtype."""

    model: str
    dtype: str
    exempt: str = ""
    """Why that is not promised of it."""
    ratio: float = 0.0
    """Error over its bound; above 1 is wrong."""
    wrong: str = ""
    crash: str = ""
    refused: str = ""
    """What eager itself raises; then there is nothing to be right or wrong."""
    breaks: list[str] = field(default_factory=list)
    opaque: dict[str, float] = field(default_factory=dict)
    """Shares of calls of ATen in FLOPs and bytes, of the graph that moves most."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    sites: list[dict[str, Any]] = field(default_factory=list)

    @property
    def fused(self) -> tuple[int, int]:
        """Sites fused, and sites."""
        return sum(site["fused"] for site in self.sites), len(self.sites)

    @property
    def lacking(self) -> bool:
        """Whether it has less than is promised of dense transformers, be it one or not."""
        fused, total = self.fused
        return fused < LEAST_FUSED * total or any(self.opaque.get(u, 0.0) > most for u, most in MOST_OPAQUE.items())

    @property
    def left_out(self) -> bool:
        """Whether it has less, and no more is promised of it."""
        return self.lacking and bool(self.exempt)

    @property
    def failed(self) -> bool:
        """Whether it is wrong, or something that is promised of it does not hold."""
        return bool(self.wrong or self.crash or self.breaks) or (self.lacking and not self.exempt)

    @property
    def passed(self) -> bool:
        """Whether it ran and did not fail."""
        return not (self.refused or self.failed)

    def to_json(self) -> dict[str, Any]:
        """Return plain data: sites fused by kind, and of each other one what there is to say."""
        fused = Counter(site["kind"] for site in self.sites if site["fused"])
        missed = [site for site in self.sites if not site["fused"]]
        sites = [{name: value for name, value in site.items() if value or value == 0} for site in missed]
        return asdict(self) | {"sites": sites, "fused": fused, "left_out": self.left_out, "passed": self.passed}


def find(name: str, dtype: str, seed: int) -> Found:
    """Check one architecture, and hold its sites against what was compiled."""
    from fusec.debug.site_status import site_statuses
    from fusec.debug.subject import subject_of
    from fusec.dynamo import compiled_graphs

    warnings.filterwarnings("ignore")
    family = ARCHITECTURES[name]
    found = Found(name, dtype, family.exempt)
    try:
        result = check(family, DTYPES[dtype], "static", backend_named("fusec"), seed=seed, shapes=SHAPES)
    except Exception as problem:  # transformers itself does not take the configuration
        found.crash = f"{type(problem).__name__}: {problem}"[:300]
        return found
    found.ratio, found.crash, found.breaks = result.ratio, result.error, [*result.breaks, *result.left_to_aten]
    found.refused = result.refused
    found.wrong = (result.reason or f"{result.ratio:.2f} times the bound") if result.differs else ""
    if found.refused:
        return found
    summary = largest([result])
    found.opaque = {unit: summary["coverage"][unit]["opaque"] for unit in MOST_OPAQUE} if summary else {}
    found.fallbacks = {n: k for s in result.summaries for n, k in s["fallbacks"].items()}
    model: Any = family.build(seed=seed)
    subjects = [subject_of(compiled) for compiled in compiled_graphs()]
    found.sites = [v.to_json() for v in site_statuses(Routed(model) if family.routed else model, subjects)]
    return found


def main(words: list[str] | None = None) -> int:
    """Run what is asked; the exit status is 1 where a promise is broken."""
    options = _parser().parse_args(words)
    names = [family.name for family in chosen(options.models, ARCHITECTURES)]
    rows = sorted(run(names, options), key=lambda row: (names.index(row.model), row.dtype))
    console = report(options.width)
    console.print(architecture_table(rows))
    console.print(reason_table(rows))
    console.print(exempt_table(rows))
    console.print(refusal_table(rows))
    passed = not any(row.failed for row in rows)
    content = {"passed": passed, "architectures": [row.to_json() for row in rows]}
    path = write_result("architectures", options.seed, content, options.json)
    console.print(f"written to {path}", style="dim", highlight=False)
    return int(not passed)


def run(names: list[str], options: argparse.Namespace) -> Iterator[Found]:
    """Every architecture in every dtype, as they come."""
    cases = [(name, dtype, options.seed) for name in names for dtype in options.dtypes.split(",")]
    context = get_context("spawn")
    with progress() as bar, ProcessPoolExecutor(options.jobs, context, torch.set_num_threads, (1,)) as pool:
        task = bar.add_task("architectures", total=len(cases))
        for done in as_completed([pool.submit(find, *case) for case in cases]):
            found = done.result()
            bar.console.print(line(found), highlight=False, soft_wrap=True)
            bar.advance(task)
            yield found


def line(found: Found) -> str:
    """One result, printed as soon as it is there."""
    mark = _verdict([found])
    opaque = " / ".join(f"{share:.1%}" for share in found.opaque.values())
    refused = f"eager refuses: {found.refused}" if found.refused else ""
    exempt = f"not promised: {found.exempt}" if found.left_out else ""
    why = found.crash or found.wrong or refused or "; ".join(found.breaks) or exempt
    fused, total = found.fused
    figures = f"ratio {found.ratio:.3f}  sites {fused}/{total}  opaque {opaque}"
    return f"{mark} {found.model:14} {found.dtype:9} {figures}  {why}"


def _verdict(rows: list[Found]) -> str:
    if any(row.failed for row in rows):
        return "[red]FAIL[/]"
    if any(row.left_out for row in rows):
        return "[yellow]exempt[/]"
    return "[green]pass[/]" if any(row.passed for row in rows) else "[yellow]none[/]"


def architecture_table(rows: list[Found]) -> Table:
    """Sites fused by architecture and kind, both dtypes together."""
    kinds = [rule.kind for rule in RULES if any(s["kind"] == rule.kind for row in rows for s in row.sites)]
    shown = Table(title="Sites fused, of those there are")
    for column in ("architecture", "", "ratio", "opaque FLOPs", "bytes", "all", *kinds):
        shown.add_column(column, justify="left" if column in ("architecture", "") else "right")
    for name in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == name]
        sites = [site for row in mine for site in row.sites]
        opaque = (f"{max(row.opaque.get(unit, 0.0) for row in mine):.1%}" for unit in MOST_OPAQUE)
        cells = (_share([s for s in sites if s["kind"] == kind]) for kind in kinds)
        shown.add_row(name, _verdict(mine), f"{max(row.ratio for row in mine):.2f}", *opaque, _share(sites), *cells)
    sites = [site for row in rows for site in row.sites]
    total = (_share([s for s in sites if s["kind"] == kind]) for kind in kinds)
    shown.add_section()
    shown.add_row("all", "", "", "", "", _share(sites), *total)
    return shown


def _share(sites: list[dict[str, Any]]) -> str:
    fused = sum(site["fused"] for site in sites)
    text = f"{fused}/{len(sites)}" if sites else ""
    return f"[red]{text}[/]" if fused < len(sites) else text


def reason_table(rows: list[Found]) -> Table:
    """Why sites are missed, most frequent reason first."""
    groups: defaultdict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for row in rows:
        for site in row.sites:
            if not site["fused"]:
                groups[site["kind"], site["reason"]].append((row.model, site))
    shown = Table(title="Why the others are not")
    for column in ("sites", "kind", "reason", "edit", "bytes lost", "in", "for example"):
        shown.add_column(column, overflow="fold")
    for (kind, reason), found in sorted(groups.items(), key=lambda item: -len(item[1])):
        example = found[0][1]
        models = ", ".join(dict.fromkeys(model for model, _ in found))
        lost = str(sum(site["bytes_lost"] for _, site in found))
        shown.add_row(str(len(found)), kind, reason, example["edit"], lost, models, example["place"])
    return shown


def exempt_table(rows: list[Found]) -> Table:
    """What has less than is promised of dense transformers, but is none; such rows pass where results are right."""
    shown = Table(title="What the promises on coverage leave out")
    for column in ("architecture", "dtype", "since", "opaque FLOPs", "bytes", "sites", "calls of ATen"):
        shown.add_column(column, overflow="fold")
    for row in rows:
        if row.left_out:
            opaque = (f"{row.opaque.get(unit, 0.0):.1%}" for unit in MOST_OPAQUE)
            calls = ", ".join(name.removeprefix("aten.").removesuffix(".default") for name in row.fallbacks)
            shown.add_row(row.model, row.dtype, row.exempt, *opaque, _share(row.sites), calls)
    return shown


def refusal_table(rows: list[Found]) -> Table:
    """What cannot be compiled since eager does not run it either; such rows count neither as passed nor as failed."""
    shown = Table(title="What eager itself refuses")
    for column in ("architecture", "dtype", "eager raises"):
        shown.add_column(column, overflow="fold")
    for row in rows:
        if row.refused:
            shown.add_row(row.model, row.dtype, row.refused)
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.architectures", description=__doc__)
    add = parser.add_argument
    add("--models", default="", help="comma-separated; all by default")
    add("--dtypes", default="float32,bfloat16", help="comma-separated")
    add("--jobs", type=int, default=2, help="processes at a time")
    add("--seed", type=int, default=0, help="of weights and inputs")
    add("--json", default="", help="file to write, instead of the one in tests/campaigns/results")
    add("--width", type=int, default=None, help="of the tables")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
