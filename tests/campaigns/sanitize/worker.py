"""Runs kernels in a process that was started under sanitizers."""

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.ir.graph import Graph
from fusec.ir.types import ScalarType, TensorType, evaluate_sizes
from fusec.reference.dtypes import torch_dtype
from fusec.verify.samples import ROUNDS, float_inputs
from tests.campaigns.fuzz.graphs import random_graph
from tests.campaigns.sanitize.guards import guarded
from tests.campaigns.sanitize.planted import PLANTED

ROWS = (1, 5, 37)
"""Values of a symbolic size: fewer than the lanes of a register, and no multiple of them."""


def run_graph(seed: int) -> None:
    """Compile a random graph and call it on guarded inputs, special values among them."""
    graph = random_graph(random.Random(seed), 20, effects=seed % 2 == 0)
    program = compile_graph(graph, replace(Config.from_environment(), strict=True)).program
    for rows in ROWS:
        for name in ("normal", *ROUNDS["special values"], "large"):
            program(list(_inputs(graph, rows, name, seed)))


def _inputs(graph: Graph, rows: int, name: str, seed: int) -> Iterator[object]:
    symbols = {"s0": rows}
    for value, x in zip(graph.inputs, float_inputs(graph, symbols, name, seed), strict=True):
        if isinstance(value.type, ScalarType):
            yield x
        elif isinstance(value.type, TensorType):
            strides = evaluate_sizes(value.type.strides, symbols)
            yield guarded(torch.empty_strided(x.shape, strides, dtype=torch_dtype(value.dtype)).copy_(x))


def main(words: Sequence[str]) -> None:
    """Run planted faults by name, and random graphs by seed."""
    torch.set_num_threads(1)
    for word in words:
        PLANTED[word]() if word in PLANTED else run_graph(int(word))


if __name__ == "__main__":
    main(sys.argv[1:])
