"""How fast are a server's steps and their parts: prompts among tokens, pages, drafts, batches, experts, samplers?

``python -m bench.serving``
"""

import argparse
import time
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

from bench.harness import OURS, Measurement, measure, report
from bench.machine import wait_until_idle
from bench.pictures import Line, draw_ratios, say_drawn
from bench.record import write_result
from bench.serving_batches import batches
from bench.serving_parts import experts, samplers
from bench.serving_question import Question
from bench.serving_steps import drafts, merged, pages
from bench.workloads import HIDDEN, LAYERS

WORKLOADS = {
    "experts": experts, "samplers": samplers, "merged": merged, "pages": pages, "drafts": drafts, "batches": batches,
}  # fmt: skip
REQUIRED = {
    "decode": 2.0, "prompt": 1.2, "greedy": 1 / 1.05, "sampler": 3.0, "merged": 1.2, "pages": 0.9, "drafts": 1 / 1.35,
    "batch": 1.5,
}  # fmt: skip
"""The fastest other call's time over ours: of the greedy choice, that of the projection alone; of a step, that of
the same work in another form."""


def main(words: list[str] | None = None) -> int:
    """Measure every workload; 1 where one is slower than it must be."""
    options = _parser().parse_args(words)
    torch._dynamo.config.recompile_limit = 64
    found: list[dict[str, Any]] = []
    peaks: dict[str, float] = {}
    for name in options.workloads.split(","):
        for question in WORKLOADS[name](options):
            wait_until_idle(options.allow_busy)
            if question.tokens and question.dtype not in peaks:
                peaks[question.dtype] = _peak(getattr(torch, question.dtype))
            rounds = min(options.rounds, question.most_rounds)
            measurement = measure(question.calls, rounds, baseline=next(iter(question.calls)))
            found.append(_result(question, measurement, peaks.get(question.dtype, 0.0)))
            torch._dynamo.reset()
    report(options.width).print(_table(found))
    file = write_result("serving", options.seed, {"workloads": found}, options.json)
    lines = [Line(row["title"], {OURS: 1 / row["gain"]}, {OURS: 1 / row["required"]}) for row in found]
    say_drawn(draw_ratios(file.with_suffix(".svg"), "Time over the best other; below 1 is faster", lines))
    return int(any(row["gain"] < row["required"] for row in found))


def _result(question: Question, measurement: Measurement, peak: float) -> dict[str, Any]:
    """Return the fastest of our own and of the others, and their ratio in the rounds that both ran in."""
    rows = {name: measurement.row(name) for name in question.calls}
    ours = min((r for n, r in rows.items() if n.startswith(OURS)), key=lambda r: r.ratio)
    others = [r for n, r in rows.items() if not n.startswith(OURS)]
    if question.kind == "greedy":
        others = [rows["projection"]]
    best = min(others, key=lambda r: r.ratio)
    seconds = ours.milliseconds / 1e3
    rates = {"tokens_s": question.tokens / seconds, "mfu": question.flops / seconds / peak} if question.tokens else {}
    return {
        "title": question.title, "kind": question.kind, "required": REQUIRED[question.kind],
        "best": best.name, "gain": best.ratio / ours.ratio, "noise": measurement.noise,
        "busy": measurement.disturbed, **rates, **question.figures(), "rows": [asdict(row) for row in rows.values()],
    }  # fmt: skip


def _peak(dtype: torch.dtype, size: int = 1024) -> float:
    """Return the FLOP/s of torch's matmul, the best of several: model FLOPs utilization is relative to it."""
    x, seconds = torch.randn(size, size).to(dtype), list[float]()
    for _ in range(8):
        start = time.perf_counter()
        torch.mm(x, x)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table("workload", "ms", "best other", "its ms", "other / fusec", "required", "noise", "tokens/s", "MFU",
                  "TTFT, TPOT p50 (p95) in ms")  # fmt: skip
    for result in found:
        rows = {row["name"]: row for row in result["rows"]}
        ours = min(row["milliseconds"] for name, row in rows.items() if name.startswith(OURS))
        latencies = [result[key] for key in ("ttft_ms", "tpot_ms") if key in result]
        table.add_row(
            result["title"], f"{ours:.3g}", result["best"], f"{rows[result['best']]['milliseconds']:.3g}",
            f"{result['gain']:.2f}", f"{result['required']:.2f}", f"{result['noise']:.1%}",
            f"{result['tokens_s']:.0f}" if "tokens_s" in result else "",
            f"{result['mfu']:.0%}" if "mfu" in result else "",
            ", ".join(f"{one['p50']:.0f} ({one['p95']:.0f})" for one in latencies),
        )  # fmt: skip
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.serving", description=__doc__)
    add = parser.add_argument
    add("--workloads", default=",".join(WORKLOADS), metavar="A,B")
    add("--dtypes", default="float32,bfloat16")
    add("--rows", default="1,8,128", help="of the experts' blocks")
    add("--models", default="Mixtral,Qwen3-MoE", help="whose experts")
    add("--hidden", type=int, default=1024, help="of the experts' blocks")
    add("--llama-hidden", type=int, default=HIDDEN)
    add("--llama-layers", type=int, default=LAYERS)
    add("--context", type=int, default=2048, help="tokens that a request holds at most")
    add("--requests", type=int, default=32, help="of a batch")
    add("--rounds", type=int, default=12)
    add("--seed", type=int, default=0)
    add("--json", default="", help="by default bench/results/serving.json")
    add("--allow-busy", action="store_true")
    add("--width", type=int)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
