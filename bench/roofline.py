"""Does the cost model rank kernels as their times do, and how near are these to the machine's limits?

``python -m bench.roofline``

The machine is measured first, and the models are compiled for that profile: what is predicted knows nothing of the
times that it is held against.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from bench.families import FAMILIES, Sizes
from bench.harness import report
from bench.machine import BUSY, Watch, wait_until_idle
from bench.numerics import DTYPES, cast_inputs, cast_parameters
from bench.record import write_result
from fusec.analysis.machine import store_machine
from fusec.config import Config
from fusec.debug.explain import explain
from fusec.debug.explanation import Explanation
from fusec.debug.machine_table import machine_table
from fusec.debug.measurement import measure_machine
from fusec.debug.roofline import Roofline
from fusec.debug.tables import roofline_view


def main(words: list[str] | None = None) -> int:
    """Predict and time every kernel of every model at every number of tokens; nothing is promised."""
    options = _parser().parse_args(words)
    warnings.filterwarnings("ignore", module="torch._dynamo")
    console = report(options.width)
    wait_until_idle(options.allow_busy)
    watch, models = Watch.start(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        machine = measure_machine(seconds=options.seconds)
        store_machine(machine, Config(cache_dir=folder))
        console.print(machine_table(machine))
        for name in options.models.split(","):
            for dtype in options.dtypes.split(","):
                for tokens in map(int, options.tokens.split(",")):
                    question = f"{name} {dtype}, {tokens} tokens"
                    found = _explained(question, name, DTYPES[dtype], tokens, folder, options)
                    console.print("", roofline_view(found, everything=True))
                    models[question] = summary(found)
                    agreement = f"{models[question]['order']:.0%}"
                    console.print(f"pairs of kernels in the predicted order: {agreement}", highlight=False)
    others = watch.others()
    content = {
        "hidden": options.hidden, "layers": options.layers, "machine": machine.to_json(), "models": models,
        "others": others, "busy": others > BUSY,
    }  # fmt: skip
    console.print(f"written to {write_result('roofline', options.seed, content, options.json)}", style="dim")
    return 0


def summary(explanation: Explanation) -> dict[str, Any]:
    """Totals, rows by time, and how well the predicted order is the measured one."""
    rows = sorted(explanation.kernels, key=lambda k: -k.roofline.us * k.launches)
    return {
        "totals": dict(vars(explanation.totals)),
        "order": concordance([k.roofline for k in rows]),
        "kernels": [{"name": k.name, "kind": k.kind, "launches": k.launches, **k.roofline.to_json()} for k in rows],
    }


def concordance(rooflines: Sequence[Roofline]) -> float:
    """Of all pairs that are predicted to take different times, the share that does so in that order."""
    timed = [(r.predicted_us, r.measured_us) for r in rooflines if r.measured_us is not None]
    pairs = [(a, b) for a, b in combinations(timed, 2) if a[0] != b[0]]
    agreeing = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    return agreeing / len(pairs) if pairs else 1.0


def _explained(
    title: str, name: str, dtype: torch.dtype, tokens: int, folder: str, options: argparse.Namespace
) -> Explanation:
    torch._dynamo.reset()
    family, sizes = FAMILIES[name], Sizes(options.hidden, options.layers, heads=max(2, options.hidden // 64))
    model = cast_parameters(family.build(sizes, seed=options.seed), dtype)
    inputs: dict[str, Any] = cast_inputs(family.sample(1, tokens, "none", options.seed), dtype)
    return explain(model, title=title, time=True, options={"cache_dir": folder}, **inputs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.roofline", description=__doc__)
    add = parser.add_argument
    add("--models", default="llama,bert", metavar="A,B")
    add("--dtypes", default="float32,bfloat16", metavar="A,B")
    add("--tokens", default="1,128", metavar="A,B", help="1 is a step of decoding, many are a prefill")
    add("--hidden", type=int, default=1024)
    add("--layers", type=int, default=2)
    add("--seconds", type=float, default=0.5, help="for each figure of the machine")
    add("--seed", type=int, default=0)
    add("--allow-busy", action="store_true", help="measure beside other processes, to see that the command runs")
    add("--json", default="", metavar="FILE", help="by default bench/results/roofline.json")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
