"""Are the Triton kernels of whole models right, and do they compile for real chips without spills? No GPU is needed.

``python -m tests.campaigns.triton_kernels [--full] [--mode MODE]``: every kernel of the models, each structure once, on
what it gets in the model: the numeric rule in Triton's interpreter, its bounds proved, and compiled for NVIDIA's and
AMD's chips, where products of half types have to show up as instructions of the matrix unit. One token, few and more
rows than a generated product takes, one more token with a static cache; no size is that of a block. Under
``max-autotune`` products of many rows are ours too, and each runs once in every form that would be timed on
``MACHINE``. ``bench.triton_chips`` has the sizes of real models.
"""

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import nn

from bench.decoding import one_more
from bench.families import FAMILIES, Family, Sizes, chosen
from bench.generate import MODELS as GENERATING
from bench.harness import progress, report
from bench.numerics import DTYPES, cast_inputs, cast_parameters
from bench.record import in_mode
from bench.regions import graphs_of, other_forms, regions_of
from fusec.analysis.machine import chip
from fusec.config import MODES, Config
from fusec.ir.graph import Node
from fusec.ir.structure import structure
from fusec.models.inputs import Padding
from tests.campaigns.record import write_result

SAMPLE = "llama,gemma3,gpt2,bert"
"""Between them: both norms, gated and plain activations, rotary embedding, learned positions."""
SHAPES = "1x1,2x9,2x17,1+6,2+20"
"""Tokens of the samples: Triton's interpreter runs program by program. ``2+20`` is one after 20, for two sequences."""
MACHINE = "h200"
"""The GPU whose candidates run, where candidates are: it has every form of them."""
ROOM = 40
"""Tokens that a static cache has room for."""


@dataclass
class Row:
    """One structure of kernel and what was found about it."""

    label: str
    dtype: str
    models: list[str]
    """Those that have it."""
    kind: str
    places: int
    """How often it occurs in them."""
    ratio: float = 0.0
    problem: str = ""
    forms: list[str] = field(default_factory=list)
    """Other configurations with which it ran."""
    chips: dict[str, dict[str, int]] = field(default_factory=dict)
    """Registers, spills, shared memory and uses of the matrix unit by chip."""

    @property
    def passed(self) -> bool:
        """Whether it is right, proved within its buffers, and compiled without spills."""
        return not self.problem

    def to_json(self) -> dict[str, Any]:
        """Return plain data without empty fields; of what it takes on chips, a list of each figure."""
        fields = {name: value for name, value in asdict(self).items() if name != "chips" and (value or value == 0)}
        names = dict.fromkeys(name for taken in self.chips.values() for name in taken)
        figures = {name: [taken[name] for taken in self.chips.values()] for name in names}
        return fields | figures | {"passed": self.passed}


Found = dict[tuple[object, ...], tuple[Row, Node, list[Any]]]
"""By structure: what is reported, a region that has it, and what it takes."""


def main(words: list[str] | None = None) -> int:
    """Check every kernel; the exit status is 1 when any fails."""
    options = _parser().parse_args(words)
    warnings.filterwarnings("ignore", module="torch._dynamo")
    families = chosen("" if options.full else options.models)
    rows, question = run(families, options), in_mode("triton_kernels", options.mode)
    console = report(options.width)
    console.print(_table(rows))
    for row in (row for row in rows if not row.passed):
        console.print(f"[red]{row.label} {row.dtype}[/] in {', '.join(row.models)}: {row.problem}", highlight=False)
    content = {
        "models": [family.name for family in families],
        "chips": options.chips.split(","),
        "shapes": options.shapes.split(","),
        "hidden": options.hidden,
        "mode": options.mode,
        "kernels": [row.to_json() for row in rows],
        "passed": all(row.passed for row in rows) and bool(rows),
    }
    console.print(f"written to {write_result(question, options.seed, content, options.json)}", style="dim")
    return int(not content["passed"])


def run(families: list[Family], options: argparse.Namespace) -> list[Row]:
    """Gather the distinct kernels of all models, then check them one by one."""
    found: Found = {}
    dtypes = options.dtypes.split(",")
    with progress() as bar:
        task = bar.add_task("capture", total=len(families) * len(dtypes))
        for family in families:
            for dtype in dtypes:
                bar.update(task, description=f"capture {family.name} {dtype}")
                _gather(family, dtype, options, found)
                bar.advance(task)
        task = bar.add_task("check", total=len(found))
        for row, region, inputs in found.values():
            bar.update(task, description=f"{row.label} {row.dtype}")
            _check(row, region, inputs, options)
            mark = "[green]pass[/]" if row.passed else "[red]FAIL[/]"
            line = f"{mark} {row.dtype:8} {row.ratio:6.3f}  {row.label} ({', '.join(row.models)})"
            bar.console.print(line, highlight=False, soft_wrap=True)
            bar.advance(task)
    return [row for row, *_ in found.values()]


def kernel_regions(family: Family, dtype: torch.dtype, shape: str, options: Any) -> list[tuple[Node, list[Any]]]:
    """The kernels that the pipeline makes of a model, with what they get at inference."""
    model = cast_parameters(family.build(Sizes(options.hidden), seed=options.seed), dtype)
    captured = [
        one for inputs in _inputs(family, model, dtype, shape, options.seed) for one in graphs_of(model, inputs)
    ]
    config = Config(mode=options.mode, machine=MACHINE if options.mode != "default" else "")
    return [found for graph, arguments in captured for found in regions_of(graph, arguments, config)]


def _inputs(family: Family, model: nn.Module, dtype: torch.dtype, shape: str, seed: int) -> Iterator[dict[str, Any]]:
    """What a shape stands for; one more token comes without masks, and with those that ``generate()`` makes."""
    batch, plus, length = shape.partition("+")
    if not plus:
        batch, _, length = shape.partition("x")
        padding: Padding = "left" if int(length) > 1 else "none"
        yield cast_inputs(family.sample(int(batch), int(length), padding, seed), dtype)
    elif family.name in GENERATING.split(","):
        prompt = family.sample(int(batch), int(length), "none", seed)["input_ids"]
        for masked in (False, True):
            with torch.no_grad():
                inputs = one_more(model, prompt, ROOM, masked)
            yield inputs


def _gather(family: Family, dtype: str, options: argparse.Namespace, found: Found) -> None:
    for shape in options.shapes.split(","):
        for region, inputs in kernel_regions(family, DTYPES[dtype], shape, options):
            key = structure(region.body)
            row, *_ = found.setdefault(key, (Row(str(region.attributes["label"]), dtype, [], "", 0), region, inputs))
            row.places += 1
            row.models += [family.name] if family.name not in row.models else []


def _check(row: Row, region: Node, inputs: list[Any], options: argparse.Namespace) -> None:
    from fusec.codegen.triton.check import check_region

    name, machine = "".join(c if c.isalnum() else "_" for c in row.label), chip(MACHINE)
    forms = other_forms(region, machine) if options.mode != "default" else []
    try:
        outcome = check_region(region, name, options.chips.split(","), inputs=inputs)
        others = [check_region(region, name, (), inputs=inputs, config=form, machine=machine) for form in forms]
    except Exception as reason:  # one kernel that fails must not hide the others
        row.problem = " ".join(f"{type(reason).__name__}: {reason}".split())[:400]
        return
    row.ratio, row.kind = max(o.comparison.ratio for o in (outcome, *others)), outcome.kernel.kind
    row.forms = list(map(str, forms))
    row.chips = {
        r.chip: {"registers": r.registers, "spills": r.spills, "shared": r.shared, "matrix": sum(units.values())}
        for r in outcome.reports
        for units in (r.matrix_instructions,)
    }
    row.problem = "; ".join(str(o) for o in (outcome, *others) if not o.ok)


def _table(rows: list[Row]) -> Table:
    """One line per model and dtype."""
    passed = sum(row.passed for row in rows)
    shown = Table(title=f"Triton kernels: {passed} of {len(rows)} distinct ones pass")
    for column in ("model", "dtype", "", "kernels", "on matrix units", "worst ratio", "most registers", "spills"):
        shown.add_column(column)
    for model in dict.fromkeys(name for row in rows for name in row.models):
        for dtype in dict.fromkeys(row.dtype for row in rows):
            mine = [row for row in rows if model in row.models and row.dtype == dtype]
            if mine:
                shown.add_row(model, dtype, *_cells(mine))
    return shown


def _cells(rows: list[Row]) -> list[str]:
    verdict = "[green]pass[/]" if all(row.passed for row in rows) else "[red]FAIL[/]"
    most: dict[str, int] = {}
    for row in rows:
        for code, taken in row.chips.items():
            most[code] = max(most.get(code, 0), taken["registers"])
    spills = sum(taken["spills"] for row in rows for taken in row.chips.values())
    registers = ", ".join(f"{code} {count}" for code, count in most.items())
    on_units = sum(any(taken["matrix"] for taken in row.chips.values()) for row in rows)
    return [verdict, str(len(rows)), str(on_units), f"{max(row.ratio for row in rows):.3f}", registers, str(spills)]


def _parser() -> argparse.ArgumentParser:
    from fusec.codegen.triton.compile import CHIPS

    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.triton_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--models", default=SAMPLE, metavar="A,B", help=f"of {', '.join(FAMILIES)}; by default {SAMPLE}")
    add("--full", action="store_true", help="every model")
    add("--dtypes", default=",".join(DTYPES), metavar="A,B")
    add("--shapes", default=SHAPES, metavar="BxL,B+L", help="batches and lengths of the samples; + for one more token")
    add("--chips", default=",".join(CHIPS), metavar="A,B", help="what to compile for")
    add("--mode", default="default", choices=list(MODES), help="`max-autotune` generates products of many rows")
    add("--hidden", type=int, default=112, help="width of the models, with four heads")
    add("--seed", type=int, default=0)
    add("--json", default="", metavar="FILE", help="by default one for each mode in tests/campaigns/results")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
