"""The pages of docs/golden: what each pass does to a graph, and what each schedule makes of a region.

``python -m tests.golden_pages`` writes them. They do not depend on the machine.
"""

import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from fusec.analysis.machine import assumed_cpu, chip
from fusec.codegen.cpp import CppTarget
from fusec.codegen.target import Target
from fusec.codegen.triton import TritonTarget
from fusec.compiler import context_for
from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.graph import Graph
from fusec.ir.printer import print_graph
from fusec.passes import default_pipeline
from fusec.pipeline import Pipeline
from tests.golden_examples import EXAMPLES, Example

FOLDER = Path(__file__).parents[1] / "docs" / "golden"
COMMAND = "python -m tests.golden_pages"
WRITTEN = f"<!-- Written by `{COMMAND}`. -->"


class Avx512Target(CppTarget):
    """A fixed CPU, whichever one the pages are written on."""

    lanes, bf16_products, has_amx, cores = 16, False, False, 4


TARGETS: dict[str, Target] = {"cpp": Avx512Target(), "triton": TritonTarget()}
MACHINES = {"cpp": assumed_cpu(threads=4), "triton": chip("h100")}
KINDS = {"cpp": "CPU", "triton": "GPU"}
LANGUAGES = {"cpp": "cpp", "triton": "python"}


def main() -> None:
    """Write all pages, and remove those that no example is of any more."""
    for stale in set(FOLDER.rglob("*.md")) - {FOLDER / path for path in PAGES}:
        stale.unlink()
    for path, text in PAGES.items():
        (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / path).write_text(text(), encoding="utf-8")


def index() -> str:
    """Return the page that lists the others."""
    sections = {"passes": "Passes, in order", "cpp": "C++ schedules", "triton": "Triton schedules"}
    lines = [WRITTEN, "", "# The compiler by example", "", INTRODUCTION]
    for folder, heading in sections.items():
        lines += ["", f"## {heading}", ""]
        lines += [f"- [{e.name}]({e.path}.md): {e.shows}" for e in EXAMPLES if e.folder == folder]
    return "\n".join([*lines, ""])


INTRODUCTION = """\
Small models, with the effect of each pass on their graphs and the kernel that each schedule generates. A test compares
the pages with the compiler's output; `make golden` regenerates them.

Graphs are in the textual IR: `%mul_1: f32[4, 64] = mul(%x, %add)` is a value, its type, and the operation with its
operands; a `region` is a node with a graph of its own. Values keep the names of the imported operations, so that they
can be followed through a pass. The input of each pass is the output of the previous ones.

The graph of a kernel is the body of its region; `in0`, `in1`, … and `out0`, … are its inputs and outputs, in order. C++
is for a processor with AVX-512 (16 lanes of float32) and four cores, Triton for an H100."""


def page(example: Example) -> str:
    """Return the text of an example's page."""
    parts = [WRITTEN, "", f"# {example.title}", "", _filled(example.note), ""]
    parts += _block("The model", "python", inspect.getsource(example.model))
    parts += _passes(example) if example.folder == "passes" else _kernels(example)
    return "\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {"README.md": index} | {f"{e.path}.md": partial(page, e) for e in EXAMPLES}
"""What makes the text of each page, by path."""


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def _block(heading: str, language: str, text: str) -> list[str]:
    return [f"{heading}:", "", f"```{language}", text.rstrip(), "```", ""]


def _passes(example: Example) -> list[str]:
    """The graph before and after a pass, for each target where that differs."""
    found = {name: _around(example, target) for target, name in KINDS.items()}
    lines: list[str] = []
    for i, stage in enumerate(("Before", "After")):
        texts = {name: graphs[i] for name, graphs in found.items()}
        if len(set(texts.values())) == 1:
            lines += _block(stage, "text", texts["CPU"])
        else:
            lines += [line for name, text in texts.items() for line in _block(f"{stage}, on a {name}", "text", text)]
    return lines


def _around(example: Example, target: str) -> tuple[str, str]:
    """The graph as the first pass of that name gets it, and as it leaves it."""
    graph, config = _traced(example), Config(strict=True, **example.options)
    context, _ = context_for(TARGETS[target], config, MACHINES[target])
    passes = default_pipeline(config).passes
    at = next(i for i, step in enumerate(passes) if step.name == example.name)
    Pipeline(passes[:at]).run(graph, context)
    before = print_graph(graph, sources=False)
    Pipeline(passes[at : at + 1]).run(graph, context)
    return before, print_graph(graph, sources=False)


def _kernels(example: Example) -> list[str]:
    """The graph and the kernel of each region."""
    target, graph, config = example.folder, _traced(example), Config(strict=True, **example.options)
    context, schedules = context_for(TARGETS[target], config, MACHINES[target])
    default_pipeline(config).run(graph, context)
    lines = []
    for region in [node for node in graph if node.is_op("region") and node.attributes["kind"] == "kernel"]:
        kernel = replace(schedules.kernel(region), formula="", sources=())
        region.body.name = kernel.name
        lines += _block("The region", "text", print_graph(region.body, sources=False))
        lines += _block("The kernel", LANGUAGES[target], TARGETS[target].print(kernel))
    return lines


def _traced(example: Example) -> Graph:
    """The graph of an example's model, as it is imported."""
    dtypes = dict.fromkeys(example.shapes, example.dtype) | dict(example.integers)
    inputs = [torch.empty(shape, dtype=dtypes[name]) for name, shape in example.shapes.items()]
    graph = trace(example.model, inputs, symbolic=False)
    graph.name = example.model.__name__
    _name(graph, example.shapes)
    return graph


def _name(graph: Graph, inputs: Iterable[str]) -> None:
    """Name values by operation: torch's own names, of what it took apart, differ between versions."""
    for value, name in zip(graph.inputs, inputs, strict=True):
        value.name = name
    counts = Counter[str]()
    for node in graph:
        name = node.attributes["target"].split(".")[1] if node.is_op("opaque") else node.op.name
        for value in node.results:
            value.name = f"{name}_{counts[name]}" if counts[name] else name
            counts[name] += 1


if __name__ == "__main__":
    main()
