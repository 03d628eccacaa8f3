"""How fast is generated attention beside torch's own, and how much memory does it take?

``python -m bench.attention``

Torch's own is ``F.scaled_dot_product_attention``, called in eager. What fusec compiles is the same call, so that both
do the same; the memory is that of an attention written by hand, which in eager makes a matrix of scores.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.harness import BASELINE, Measurement, measure, print_promises, report, table
from bench.machine import wait_until_idle
from bench.numerics import DTYPES, USUAL
from bench.peers import peer
from bench.record import write_result
from fusec.debug.measurement import measure_machine

LENGTHS = (512, 2048)
HEADS, SHARED, WIDTH = 32, 8, 64
"""Heads of the queries, those of the keys in decoding, and how wide each is."""
LEAST = {"prefill": 0.85, "decode": 1.5}
"""Least speed relative to torch's own."""
MOST_MIB = 64
"""Most memory beyond inputs at 32k tokens."""
MARK = "extra-mib "


class Attention(torch.nn.Module):
    """The call, as a model that has nothing else."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Values weighted by the softmax of the scores."""
        shared = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal, enable_gqa=shared)


class ByHand(torch.nn.Module):
    """Causal attention as a model may spell it out."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The same, step by step."""
        rows, columns = (torch.arange(x.shape[2]) for x in (query, key))
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(columns > rows[:, None], -math.inf)
        return torch.softmax(scores, -1) @ value


def main(words: list[str] | None = None) -> int:
    """Measure every shape; status 1 where a promise is broken."""
    options = _parser().parse_args(words)
    if options.memory:
        print(MARK + json.dumps(extra_mib(options.memory)))
        return 0
    console = report(options.width)
    wait_until_idle(options.allow_busy)
    limits, measurements, kinds = measure_machine().to_json(), dict[str, Measurement](), dict[str, str]()
    for dtype in options.dtypes.split(","):
        for kind, question, causal, shapes in _questions():
            wait_until_idle(options.allow_busy)
            kinds[f"{question}, {dtype}"] = kind
            measurements[f"{question}, {dtype}"] = _measure(causal, shapes, DTYPES[dtype], options)
    console.print(table("Attention, batch 1", measurements))
    mib = _extra_mib_in_fresh_process(32768)
    console.print(f"by hand, causal, 32k tokens, one head of 64: {mib:.0f} MiB beyond inputs and output")
    promises = {
        f"{question}: at least {LEAST[kinds[question]]} of torch's speed": _speed(m) >= LEAST[kinds[question]]
        for question, m in measurements.items()
    }
    promises[f"32k tokens: less than {MOST_MIB} MiB"] = mib < MOST_MIB
    print_promises(console, promises)
    content = {"limits": limits, "measurements": {q: m.to_json() for q, m in measurements.items()},
               "extra_mib": mib, "promises": promises}  # fmt: skip
    console.print(f"written to {write_result('attention', options.seed, content, options.json)}", style="dim")
    return int(not all(promises.values()))


def extra_mib(tokens: int) -> float:
    """How much the peak of this process's memory rises in one call, less the output."""
    torch.manual_seed(0)
    run, inputs = peer("fusec", ByHand()), [torch.randn(1, 1, tokens, 64) for _ in range(3)]
    with torch.no_grad():
        run(*(x[:, :, : tokens // 2].clone() for x in inputs))  # compiles; the next call has other sizes, and compiles
        run(*(x[:, :, : tokens // 4].clone() for x in inputs))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        output = run(*inputs)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) / 1024 - output.nbytes / 2**20


def _questions() -> Iterator[tuple[str, str, bool, list[tuple[int, ...]]]]:
    """Kind, name, whether causal, and the shapes of query, key and value."""
    for length in LENGTHS:
        for causal in (False, True):
            name = f"prefill{' causal' if causal else ''}, {length} tokens, {HEADS} heads of {WIDTH}"
            yield "prefill", name, causal, [(1, HEADS, length, WIDTH)] * 3
    for length in LENGTHS:
        keys = (1, SHARED, length, WIDTH)
        yield "decode", f"decode, {length} keys, {HEADS} heads on {SHARED}", False, [(1, HEADS, 1, WIDTH), keys, keys]


def _measure(
    causal: bool, shapes: list[tuple[int, ...]], dtype: torch.dtype, options: argparse.Namespace
) -> Measurement:
    torch._dynamo.reset()
    torch.manual_seed(options.seed)
    inputs, model = [torch.randn(shape).to(dtype) for shape in shapes], Attention(causal)
    names = (BASELINE, "fusec", *filter(None, options.peers.split(",")))
    candidates: dict[str, Callable[[], object]] = {name: partial(peer(name, model), *inputs) for name in names}
    with torch.no_grad():
        return measure(candidates, options.rounds)


def _speed(measurement: Measurement) -> float:
    return 1 / measurement.row("fusec").ratio


def _extra_mib_in_fresh_process(tokens: int) -> float:
    command = [sys.executable, "-m", "bench.attention", "--memory", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if answer is None:
        raise SystemExit(f"attention at {tokens} tokens did not run\n{done.stderr[-2000:]}")
    return float(json.loads(answer.removeprefix(MARK)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__)
    add = parser.add_argument
    add("--dtypes", default=",".join(USUAL), metavar="A,B")
    add("--peers", default="", metavar="A,B", help="others beside fusec")
    add("--rounds", type=int, default=15)
    add("--seed", type=int, default=0)
    add("--memory", type=int, default=0, help=argparse.SUPPRESS)
    add("--allow-busy", action="store_true", help="measure beside other processes, to see that the command runs")
    add("--json", default="", metavar="FILE", help="by default bench/results/attention.json")
    add("--width", type=int, default=None, help="of the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
