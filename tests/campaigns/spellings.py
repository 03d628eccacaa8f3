"""Does the same maths in other words compile to the same kernels?

``python -m tests.campaigns.spellings`` writes layers of models in random compositions of synonyms
(tests/campaigns/synonyms) and counts kernels, opaque calls and bytes: all have to be those of the plain spelling. No
code is generated. What differs is listed by the fewest synonyms that make it differ.
"""

import argparse
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from bench.families import FAMILIES, chosen
from bench.harness import progress, report
from bench.numerics import cast_inputs, cast_parameters
from fusec.analysis.machine import assumed_cpu
from fusec.analysis.memory import moved_bytes
from fusec.codegen import target_named
from fusec.compiler import context_for
from fusec.config import Config
from fusec.debug.explanation import KINDS
from fusec.debug.subject import kind_of, subject_of
from fusec.frontend import trace
from fusec.ir.graph import Graph
from fusec.passes import default_pipeline
from fusec.pipeline import Context
from tests.campaigns.blocks import BLOCKS
from tests.campaigns.record import write_result
from tests.campaigns.respelling import Respelled
from tests.campaigns.synonyms import SYNONYMS, with_places

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = {"few": (1, 12), "many": (3, 40)}
"""Rows that fusec multiplies itself, and rows that it leaves to the vendor."""


@dataclass(frozen=True)
class Figures:
    """What a program does."""

    kernels: tuple[int, ...]
    """By kind: generated, vendor, opaque."""
    bytes: int
    failures: tuple[str, ...] = ()
    """Of rules that raised."""

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {kind}" for n, kind in zip(self.kernels, KINDS, strict=True))
        return "; ".join([f"{counts}, {self.bytes:,} B", *self.failures])


@dataclass(frozen=True)
class Case:
    """A function in plain torch, and what it is called with."""

    name: str
    function: Callable[..., Any]
    arguments: Sequence[Any]

    def spelled(self, names: Collection[str], seed: int, share: float) -> tuple[Graph, Respelled]:
        """Its graph after all passes in another spelling."""
        made: list[Respelled] = []

        def respelled(*arguments: Any) -> Any:
            made.append(Respelled(names, seed, share))
            with made[-1]:
                return self.function(*arguments)

        graph = trace(respelled, self.arguments, symbolic=False)
        return graph, made[-1]

    def figures(self, names: Collection[str] = (), seed: int = 0, share: float = 0.5) -> tuple[Figures, list[str]]:
        """What it takes in another spelling, and the synonyms that were used."""
        graph, mode = self.spelled(names, seed, share)
        config = Config(target="cpp")
        context, _ = context_for(target_named("cpp"), config, assumed_cpu())
        default_pipeline(config).run(graph, context)
        return _figures(graph, context), sorted(mode.taken)


def _figures(graph: Graph, context: Context) -> Figures:
    counts, moved, subject = Counter[str](), 0, subject_of(graph)
    for node in graph:
        if kind := kind_of(node, subject):
            counts[kind] += 1
            moved += int(moved_bytes(node))
    failures = tuple(str(remark.message) for remark in context.remarks.of("failure"))
    return Figures(tuple(counts[kind] for kind in KINDS), moved, failures)


@dataclass
class Difference:
    """A composition that takes other kernels."""

    case: str
    seed: int
    share: float
    synonyms: list[str]
    """As few as make a difference."""
    plain: str
    found: str


@dataclass
class Tally:
    """What was found about one case."""

    case: str
    plain: str
    compositions: int = 0
    same: int = 0
    differences: list[Difference] = field(default_factory=list)


def difference(case: Case, plain: Figures, names: Collection[str], seed: int, share: float) -> Difference | None:
    """What a composition changes, by the fewest synonyms; None where it changes nothing."""
    found, used = case.figures(names, seed, share)
    if found == plain:
        return None
    least, shown, before = used, found, 0
    while len(least) != before:
        before = len(least)
        for name in least:
            fewer = [other for other in least if other != name]
            again, _ = case.figures(fewer, seed, share)
            if again != plain:
                least, shown = fewer, again
    return Difference(case.name, seed, share, least, str(plain), str(shown))


def compositions(count: int, seed: int) -> Iterator[tuple[list[str], int, float]]:
    """Synonyms, seed and share of each composition: few synonyms everywhere, many at some places, and between."""
    draw = random.Random(seed)
    for _ in range(count):
        share = draw.choice((0.1, 0.25, 0.5, 1.0))
        kept = draw.choice((0.1, 0.3, 1.0))
        yield [name for name in SYNONYMS if draw.random() < kept], draw.randrange(10**9), share


def layers(names: str = "") -> Iterator[Case]:
    """The layers in each dtype, for few and for many rows."""
    for name, make in BLOCKS.items():
        if names and name not in names.split(","):
            continue
        for dtype, kind in DTYPES.items():
            for rows, shape in SHAPES.items():
                block = make(*shape, kind)
                yield Case(f"{name} {dtype} {rows}", block, block.arguments)


def families(names: str) -> Iterator[Case]:
    """Models of transformers as Dynamo captures them."""
    for family in chosen(names):
        for dtype, kind in DTYPES.items():
            for rows, (batch, length) in SHAPES.items():
                model = cast_parameters(family.build(), kind)
                inputs = cast_inputs(family.sample(batch, length, "right"), kind)
                for i, (gm, arguments) in enumerate(_captured(model, inputs)):
                    yield Case(f"{family.name} {dtype} {rows}{f' {i}' * bool(i)}", gm, arguments)


def _captured(model: torch.nn.Module, inputs: dict[str, Any]) -> list[tuple[Any, list[Any]]]:
    found: list[tuple[Any, list[Any]]] = []

    def keep(gm: torch.fx.GraphModule, arguments: list[Any]) -> Any:
        found.append((gm, [a.detach() if isinstance(a, Tensor) else a for a in arguments]))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model.eval(), backend=keep, dynamic=False)(**inputs)
    return found


def main(words: list[str] | None = None) -> int:
    """Run; the exit status is 1 where a spelling changes the kernels."""
    options = _parser().parse_args(words)
    console = report(options.width)
    cases = [*layers(options.layers)] if options.layers != "none" else []
    cases += [*families(options.models)] if options.models else []
    count = -(-options.count // len(cases))
    tallies = []
    with progress() as bar:
        task = bar.add_task("spellings", total=len(cases) * (count + options.each * len(SYNONYMS)))
        for case in cases:
            bar.update(task, description=case.name)
            tallies.append(_tally(case, count, options.each, options.seed, lambda: bar.advance(task)))
            bar.console.print(_line(tallies[-1]), highlight=False, soft_wrap=True)
            for found in tallies[-1].differences:
                bar.console.print(f"  {' + '.join(found.synonyms)}: {found.found}", highlight=False, soft_wrap=True)
    console.print(_table(tallies))
    for least, alike in _by_synonyms(tallies):
        first = alike[0]
        console.print(
            f"[red]{' + '.join(least)}[/]: {len(alike)} times, {first.case} seed {first.seed}", highlight=False
        )
        console.print(f"  {first.plain} → {first.found}", style="dim", highlight=False, soft_wrap=True)
    passed = not any(tally.differences for tally in tallies)
    content = {
        "synonyms": {one.name: one.law for one in SYNONYMS.values()},
        "compositions": sum(tally.compositions for tally in tallies),
        "same": sum(tally.same for tally in tallies),
        "cases": [asdict(tally) for tally in tallies],
        "passed": passed,
    }
    written = write_result("spellings", options.seed, content, options.json)
    console.print(f"written to {written}", style="dim", highlight=False)
    return int(not passed)


def _tally(case: Case, count: int, each: bool, seed: int, advance: Callable[[], None]) -> Tally:
    plain, _ = case.figures()
    tally = Tally(case.name, str(plain))
    drawn = [*compositions(count, seed)]
    if each:
        drawn = [(with_places(name), 0, 1.0) for name in SYNONYMS] + drawn
    for names, own, share in drawn:
        found = difference(case, plain, names, own, share)
        tally.compositions += 1
        tally.same += found is None
        tally.differences += [found] if found else []
        advance()
    return tally


def _by_synonyms(tallies: list[Tally]) -> list[tuple[tuple[str, ...], list[Difference]]]:
    found: dict[tuple[str, ...], list[Difference]] = {}
    for tally in tallies:
        for one in tally.differences:
            found.setdefault(tuple(one.synonyms), []).append(one)
    return sorted(found.items(), key=lambda item: (len(item[0]), -len(item[1])))


def _line(tally: Tally) -> str:
    mark = "[green]same[/]" if not tally.differences else "[red]DIFFERS[/]"
    return f"{mark} {tally.case:28} {tally.same} of {tally.compositions}  {tally.plain}"


def _table(tallies: list[Tally]) -> Table:
    same, count = sum(t.same for t in tallies), sum(t.compositions for t in tallies)
    shown = Table(title=f"{same} of {count} compositions of {len(SYNONYMS)} synonyms take the same kernels")
    for column in ("case", "same", "of", "kernels and bytes of the plain spelling"):
        shown.add_column(column)
    for tally in tallies:
        shown.add_row(tally.case, str(tally.same), str(tally.compositions), tally.plain)
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.spellings", description=__doc__)
    add = parser.add_argument
    add("--count", type=int, default=1000, help="random compositions, over all cases together")
    add("--each", action="store_true", help="besides, each synonym alone, wherever it applies")
    add("--layers", default="", metavar="A,B", help=f"by default all: {', '.join(BLOCKS)}; or none")
    add("--models", default="", metavar="A,B", help=f"models of transformers besides: {', '.join(FAMILIES)}")
    add("--seed", type=int, default=0)
    add("--json", default="", metavar="FILE", help="by default tests/campaigns/results/spellings.json")
    add("--width", type=int, default=None, help="of the tables")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
