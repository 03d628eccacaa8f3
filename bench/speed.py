"""Is fusec anywhere slower than eager?

``python -m bench.speed``
"""

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.families import Family, Inputs, Sizes, chosen
from bench.harness import BASELINE, Measurement, measure, report, table
from bench.machine import wait_until_idle
from bench.numerics import DTYPES, cast_inputs, cast_parameters
from bench.peers import peer
from bench.record import write_result
from fusec.debug.measurement import measure_machine


def main(words: list[str] | None = None) -> int:
    """Measure every model at every number of tokens; status 1 when fusec is slower somewhere beyond the noise."""
    options = _parser().parse_args(words)
    warnings.filterwarnings("ignore", module="torch._dynamo")
    console = report(options.width)
    wait_until_idle(options.allow_busy)
    limits = measure_machine().to_json()
    measurements: dict[str, Measurement] = {}
    for family in chosen(options.models):
        for dtype in options.dtypes.split(","):
            for tokens in _token_counts(family, options.tokens):
                wait_until_idle(options.allow_busy)
                question = f"{family.name} {dtype}, {tokens} tokens"
                measurements[question] = _measure(family, DTYPES[dtype], tokens, options)
    console.print(table(f"One forward pass, hidden size {options.hidden}, {options.layers} layers", measurements))
    slower = [question for question, m in measurements.items() if is_slower(m, options.peers.split(",")[0])]
    for question in slower:
        console.print(f"[red]slower than eager beyond the noise[/]: {question}")
    content = {
        "hidden": options.hidden,
        "layers": options.layers,
        "limits": limits,
        "measurements": {question: m.to_json() for question, m in measurements.items()},
        "slower": slower,
        "busy": any(m.disturbed for m in measurements.values()),
    }
    console.print(f"written to {write_result('speed', options.seed, content, options.json)}", style="dim")
    return int(bool(slower))


def is_slower(measurement: Measurement, name: str) -> bool:
    """Whether a candidate's ratio to eager is above 1 by more than the noise floor and its own spread."""
    row = measurement.row(name)
    return row.ratio > 1 + max(measurement.noise, row.spread)


def _measure(family: Family, dtype: torch.dtype, tokens: int, options: argparse.Namespace) -> Measurement:
    torch._dynamo.reset()
    sizes = Sizes(options.hidden, options.layers, heads=max(2, options.hidden // 64))
    model = cast_parameters(family.build(sizes, seed=options.seed), dtype)
    inputs = cast_inputs(family.sample(1, tokens, "none", options.seed), dtype)
    candidates = {name: _caller(peer(name, model), inputs) for name in (BASELINE, *options.peers.split(","))}
    return measure(candidates, options.rounds)


def _caller(run: Callable[..., Any], inputs: Inputs) -> Callable[[], object]:
    return partial(run, **inputs)


def _token_counts(family: Family, given: str) -> list[int]:
    counts = [int(word) for word in given.split(",")]
    return counts[:1] if family.inputs == "images" else counts  # an image has as many tokens as it has patches


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.speed", description=__doc__)
    add = parser.add_argument
    add("--models", default="", metavar="A,B", help="by default all")
    add("--dtypes", default="float32,bfloat16", metavar="A,B")
    add("--tokens", default="1,16,128", metavar="A,B")
    add("--peers", default="fusec,inductor,inductor frozen", metavar="A,B", help="the first one is held against eager")
    add("--hidden", type=int, default=512)
    add("--layers", type=int, default=2)
    add("--rounds", type=int, default=30)
    add("--seed", type=int, default=0)
    add("--allow-busy", action="store_true", help="measure beside other processes, to see that the command runs")
    add("--json", default="", metavar="FILE", help="by default bench/results/speed.json")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
