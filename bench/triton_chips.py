"""What do Triton kernels of layers at their published sizes take on real chips? No GPU is needed, and no memory.

``python -m bench.triton_chips``: Llama, Qwen3, Mixtral, Gemma3, GPT-2, BERT and T5, decoding and prefilling, in half
types. Every kernel is compiled for each chip, as that chip's figures group it: registers, spills, shared memory,
instructions of the matrix unit, and the least time that the chip's limits leave it. It fails where a kernel spills,
needs more shared memory than there is, multiplies matrices without the unit for it, may reach beyond a buffer, or is
refused. With ``--candidates`` it is all others that ``autotune`` would time: what spills or takes too much memory there
loses, and is only told.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from typing import Any, TypeAlias

from rich.table import Table

from bench.families import FAMILIES, chosen
from bench.harness import progress, report
from bench.numerics import DTYPES
from bench.published import MOST_DECODED, PUBLISHED, Step, capture, steps
from bench.record import in_mode, write_result
from fusec.analysis.cost import region_cost
from fusec.analysis.machine import Machine
from fusec.codegen.program.kernels import PASS_NAME
from fusec.codegen.tile.kernel import Kernel
from fusec.compiler import context_for
from fusec.config import MODES, Config
from fusec.debug.roofline import residents
from fusec.errors import FusecError
from fusec.ir.graph import Graph, Node
from fusec.ir.ops import Trait
from fusec.ir.structure import structure
from fusec.loops.plan import plan_kernel

MACHINES = {
    "sm_80": "a100", "sm_89": "rtx4090", "sm_90": "h100", "sm_100": "b200", "sm_120": "rtx5090", "gfx942": "mi300x",
}  # fmt: skip
"""The chip that has the figures of each."""
ROWS = "1,8,32,512,4096"

Question: TypeAlias = tuple[str, Step, str, tuple[str, ...], str, bool]
"""A model, what it is asked, its element type, the chips, the mode of the compile, and whether it is about candidates
other than the default."""
Code: TypeAlias = tuple[str, str, tuple[str, ...], tuple[tuple[str, Any], ...]]
"""What a compiler sees: the chip, the text, the types of the buffers, its options."""
Outcome: TypeAlias = tuple[Any, str, float]
"""Its ``Report`` or None, why it was refused, and how long that took."""


@dataclass
class Found:
    """One kernel of one graph, as one chip gets it."""

    place: str
    """The model, and what it was asked."""
    label: str
    dtype: str
    chip: str
    key: Any
    """Equal for kernels that compute the same on the same sizes."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Bytes, operations and predicted time."""
    kernel: Kernel | None = None
    code: Code | None = None
    multiplies: bool = False
    """Whether it has to use the matrix unit."""
    problem: str = ""
    loses: bool = False
    """Whether it only loses against others where it spills, or cannot be launched."""


@dataclass
class Row:
    """One structure of kernel at one size."""

    label: str
    dtype: str
    kind: str = ""
    places: list[str] = field(default_factory=list)
    """Models and what they were asked."""
    chips: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Registers, spills, shared memory, matrix instructions, bytes, operations and predicted time, by chip."""
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every chip runs it as it should."""
        return not self.problems


def main(words: list[str] | None = None) -> int:
    """Compile every kernel for every chip; the exit status is 1 when any is not as it should be."""
    options = _parser().parse_args(words)
    console, start = report(options.width), time.perf_counter()
    rows, texts = run(options)
    for shown in (_summary(rows, options), *([_each(rows)] if options.each else [])):
        console.print(shown)
    for row in (row for row in rows if not row.passed):
        places = ", ".join(row.places)
        console.print(f"[red]{row.label} {row.dtype}[/] in {places}: {'; '.join(row.problems)}", highlight=False)
    content = {
        "models": {name: PUBLISHED[name].of for name in options.models.split(",")},
        "rows": options.rows,
        "mode": options.mode,
        "candidates": options.candidates,
        "chips": options.chips.split(","),
        "machines": {chip: MACHINES[chip] for chip in options.chips.split(",")},
        "compiled": texts,
        "seconds": round(time.perf_counter() - start),
        "kernels": [asdict(row) | {"passed": row.passed} for row in rows],
        "passed": bool(rows) and all(row.passed for row in rows),
    }
    question = in_mode("triton_chips", options.mode) + ("_candidates" if options.candidates else "")
    console.print(f"written to {write_result(question, 0, content, options.json)}", style="dim")
    return int(not content["passed"])


def run(options: argparse.Namespace) -> tuple[list[Row], int]:
    """All kernels, and how many texts were compiled for them."""
    questions = [
        (family.name, step, dtype, tuple(options.chips.split(",")), options.mode, options.candidates)
        for family in chosen(options.models, {name: FAMILIES[name] for name in PUBLISHED})
        for step in steps(PUBLISHED[family.name], [int(n) for n in options.rows.split(",")])
        for dtype in options.dtypes.split(",")
    ]
    with _pool(options.jobs) as each, progress() as bar:
        task = bar.add_task("capture", total=len(questions))
        places: list[Found] = []
        for kernels in each(gather, questions):
            places += kernels
            bar.advance(task)
        distinct = {found.code: found for found in reversed(places) if found.code}
        task = bar.add_task("compile", total=len(distinct))
        outcomes: dict[Code, Outcome] = {}
        for code, outcome in each(compiled, [(code, found.kernel) for code, found in distinct.items()]):
            outcomes[code] = outcome
            bar.console.print(_line(distinct[code], outcome), highlight=False, soft_wrap=True)
            bar.advance(task)
    return list(_rows(places, outcomes).values()), len(distinct)


def gather(question: Question) -> list[Found]:
    """The kernels that the pipeline makes of a graph for each chip."""
    name, step, dtype, chips, mode, others = question
    graph, place = capture(PUBLISHED[name], step, DTYPES[dtype]), f"{name} {step.label}"
    return [found for chip in chips for found in _kernels(graph.copy(), place, dtype, chip, mode, others)]


def _kernels(graph: Graph, place: str, dtype: str, chip: str, mode: str, others: bool) -> Iterator[Found]:
    from fusec.codegen import target_for
    from fusec.codegen.program.kernels import build_kernels
    from fusec.passes import default_pipeline

    config = Config(mode=mode, target="triton", machine=MACHINES[chip])
    target = target_for(graph, config)
    context, _ = context_for(target, config)
    default_pipeline(config).run(graph, context)
    built, cached = build_kernels(graph, target, context), residents(graph, context.machine, {})
    for region in graph:
        if region.has(Trait.REGION) and region.attributes["kind"] != "vendor":
            cost = region_cost(region, {}, cached, {})
            found = Found(place, str(region.attributes["label"]), dtype, chip, structure(region.body))
            found.figures = {
                "bytes": float(cost.bytes),
                "flops": float(cost.flops),
                "bound": cost.bound(context.machine),
                "predicted_us": float(cost.time(context.machine)) * 1e6,
            }
            if others:
                yield from _others(region, found, context.machine)
                continue
            if region in built:
                _complete(found, built[region][0], region.body)
            else:
                reasons = [str(r.reason) for r in context.remarks.of("failure") if r.pass_name == PASS_NAME]
                found.problem = f"no kernel: {'; '.join(dict.fromkeys(reasons))}"
            yield found


def _others(region: Node, found: Found, machine: Machine) -> Iterator[Found]:
    """A kernel with each other config than the default."""
    from fusec.codegen.triton import TritonTarget
    from fusec.codegen.triton.legality import ANY
    from fusec.codegen.triton.schedules import configs

    target, plan = TritonTarget(), plan_kernel(region.body, ANY)
    for config in configs(plan, machine)[1:]:
        other = replace(found, label=f"{found.label} ({config})", key=(found.key, config), loses=True)
        _complete(other, target.schedule(plan, "kernel", machine, config), region.body)
        yield other


def _complete(found: Found, kernel: Kernel, body: Graph) -> None:
    """The kernel of a place, what of it a compiler sees, and whether it stays within its buffers."""
    from fusec.codegen.tile.bounds import size_limits, unproven_accesses
    from fusec.codegen.triton.check import multiplies_matrices
    from fusec.codegen.triton.printer import print_kernel
    from fusec.codegen.triton.signature import options

    kernel = replace(kernel, name="kernel")
    lines = [line for line in print_kernel(kernel).splitlines() if not line.startswith("#")]
    found.code = (
        found.chip,
        "\n".join(lines),
        tuple(b.dtype.name for b in kernel.buffers),
        tuple(options(kernel).items()),
    )
    found.kernel, found.multiplies = kernel, multiplies_matrices(body)
    unproven = unproven_accesses(kernel, size_limits(body))
    found.problem = f"may reach beyond a buffer: {unproven[0]}" if unproven else ""


def compiled(item: tuple[Code, Kernel]) -> tuple[Code, Outcome]:
    """What a kernel takes on a chip, or why it is refused."""
    from fusec.codegen.triton.compile import compile_for

    code, kernel = item
    start, why = time.perf_counter(), ""
    try:
        taken = compile_for(kernel, code[0])
    except FusecError as reason:
        taken, why = None, " ".join(str(reason).split())[:400]
    return code, (taken, why, time.perf_counter() - start)


def _line(found: Found, outcome: Outcome) -> str:
    problems, seconds = _problems(found, outcome), outcome[-1]
    mark = "[red]FAIL[/]" if problems else "[green]pass[/]"
    return f"{mark} {seconds:5.1f} s  {found.place} {found.label} {found.dtype} {found.chip}  {'; '.join(problems)}"


def _problems(found: Found, outcome: Outcome | None) -> list[str]:
    """What is not as it should be with a kernel on a chip."""
    problems = [found.problem] if found.problem else []
    if outcome is not None:
        taken, why, _ = outcome
        if taken and found.loses:
            taken = replace(taken, spills=0, shared=0)
        problems += replace(taken, multiplies_halves=found.multiplies).problems if taken else [why]
    return problems


def _rows(places: Iterable[Found], outcomes: Mapping[Code, Outcome]) -> dict[Any, Row]:
    rows: dict[Any, Row] = {}
    for found in places:
        row = rows.setdefault(found.key, Row(found.label, found.dtype))
        row.places += [] if found.place in row.places else [found.place]
        outcome = outcomes[found.code] if found.code else None
        if found.kernel is not None and outcome is not None and outcome[0] is not None:
            row.kind, taken = found.kernel.kind, asdict(outcome[0])
            row.chips.setdefault(found.chip, {k: taken[k] for k in _TAKEN} | found.figures)
        problems = [f"{found.chip}: {problem}" for problem in _problems(found, outcome)]
        row.problems += [p for p in problems if p not in row.problems]
    return rows


_TAKEN = ("registers", "spills", "shared", "matrix_instructions", "block_copies")


@contextmanager
def _pool(jobs: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """``map`` over so many processes, in any order of ending; over this one where it is one."""
    if jobs == 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield pool.map


def _summary(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    """One line per model, element type and chip."""
    passed = sum(row.passed for row in rows)
    shown = Table(title=f"Triton kernels at published sizes: {passed} of {len(rows)} distinct ones pass")
    columns = ("model", "dtype", "chip", "", "kernels", "on matrix units", "most registers", "most shared", "spills")
    for column in columns:
        shown.add_column(column)
    for name in options.models.split(","):
        for dtype in options.dtypes.split(","):
            for chip in options.chips.split(","):
                mine = [r for r in rows if r.dtype == dtype and any(p.split()[0] == name for p in r.places)]
                taken = [row.chips[chip] for row in mine if chip in row.chips]
                bad = any(p.startswith(f"{chip}:") for row in mine for p in row.problems)
                if taken or bad:
                    most = [max((t[k] for t in taken), default=0) for k in ("registers", "shared")]
                    on_units = sum(bool(t["matrix_instructions"]) for t in taken)
                    cells = (len(taken), on_units, *most, sum(t["spills"] for t in taken))
                    verdict = "[red]FAIL[/]" if bad else "[green]pass[/]"
                    shown.add_row(name, dtype, chip, verdict, *map(str, cells))
    return shown


def _each(rows: Sequence[Row]) -> Table:
    """One line per kernel and chip."""
    shown = Table(title="What each takes, and the time that the chip's limits leave it")
    columns = ("kernel", "dtype", "in", "chip", "registers", "spills", "shared", "matrix instructions", "MB", "GFLOP")
    for column in (*columns, "µs", "bound by"):
        shown.add_column(column)
    for row in sorted(rows, key=lambda row: (row.kind, row.label)):
        first, *others = row.places
        where = f"{first} + {len(others)}" if others else first
        for chip, t in row.chips.items():
            units = ", ".join(f"{n} {kind}" for kind, n in t["matrix_instructions"].items())
            cells = (t["registers"], t["spills"], t["shared"], units or "-", f"{t['bytes'] / 1e6:.2f}")
            times = (f"{t['flops'] / 1e9:.3f}", f"{t['predicted_us']:.1f}", t["bound"])
            shown.add_row(row.label, row.dtype, where, chip, *map(str, cells), *times)
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.triton_chips", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", default=",".join(PUBLISHED), metavar="A,B")
    add("--dtypes", default="bfloat16,float16", metavar="A,B")
    add(
        "--rows",
        default=ROWS,
        metavar="M,N",
        help=f"up to {MOST_DECODED} are tokens of so many sequences, more are whole ones",
    )
    add("--chips", default=",".join(MACHINES), metavar="A,B")
    add("--mode", default="default", choices=list(MODES), help="`max-autotune` generates products of many rows")
    add("--candidates", action="store_true", help="not the default of each kernel, but all others that are timed")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    add("--each", action="store_true", help="show every kernel, not only the models")
    add("--json", default="", metavar="FILE", help="by default one for each mode in bench/results")
    add("--width", type=int, default=None, help="of the tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
