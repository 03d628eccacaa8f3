"""How fast are the parts of a server's step: mixtures of experts, samplers, and the choice of the next token?

``python -m bench.serving``

Every block is measured as each library spells it, and the fastest of each library counts.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import transformers
from rich.table import Table
from torch import Tensor, nn
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from bench.harness import BASELINE, OURS, Measurement, measure, report
from bench.machine import wait_until_idle
from bench.pictures import Line, draw_ratios, say_drawn
from bench.record import write_result
from fusec.models.weights import redraw

SPELLINGS = ("grouped_mm", "batched_mm")
"""Of experts, in transformers."""
VOCABULARY = 128_256
REQUIRED = {"decode": 2.0, "prompt": 1.2, "greedy": 1 / 1.05, "sampler": 3.0}
"""The fastest other library's time over fusec's; of the greedy choice, that of the projection alone."""
Call = Callable[[], object]


@dataclass(frozen=True)
class Question:
    """One workload: the calls that are compared, of which the baseline is the first."""

    title: str
    kind: str
    calls: dict[str, Call]


def main(words: list[str] | None = None) -> int:
    """Measure every workload; 1 where one is slower than it must be."""
    parser = argparse.ArgumentParser(prog="bench.serving", description=__doc__)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rows", default="1,8,128")
    parser.add_argument("--models", default="Mixtral,Qwen3-MoE", help="whose experts")
    parser.add_argument("--hidden", type=int, default=1024, help="of the experts' blocks")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="", help="by default bench/results/serving.json")
    parser.add_argument("--allow-busy", action="store_true")
    parser.add_argument("--width", type=int)
    options = parser.parse_args(words)
    torch._dynamo.config.recompile_limit = 64
    found: list[dict[str, Any]] = []
    for question in _questions(options):
        wait_until_idle(options.allow_busy)
        measurement = measure(question.calls, options.rounds, baseline=next(iter(question.calls)))
        found.append(_result(question, measurement))
        torch._dynamo.reset()
    report(options.width).print(_table(found))
    file = write_result("serving", options.seed, {"workloads": found}, options.json)
    lines = [Line(row["title"], {OURS: 1 / row["gain"]}, {OURS: 1 / row["required"]}) for row in found]
    say_drawn(draw_ratios(file.with_suffix(".svg"), "Time over the best peer's; below 1 is faster", lines))
    return int(any(row["gain"] < row["required"] for row in found))


def _questions(options: argparse.Namespace) -> Iterator[Question]:
    hidden, mixtral, qwen3 = options.hidden, transformers.MixtralConfig, transformers.Qwen3MoeConfig
    few = mixtral(hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_local_experts=8, num_experts_per_tok=2)
    many = qwen3(hidden_size=hidden, moe_intermediate_size=hidden * 3 // 8, num_experts=128, num_experts_per_tok=8)
    models = {"Mixtral": (MixtralSparseMoeBlock, few), "Qwen3-MoE": (Qwen3MoeSparseMoeBlock, many)}
    for name in filter(None, options.models.split(",")):
        block, config = models[name]
        for dtype in options.dtypes.split(","):
            for rows in map(int, options.rows.split(",")):
                x = torch.randn(1, rows, hidden, generator=torch.Generator().manual_seed(options.seed))
                to = getattr(torch, dtype)
                kind = "prompt" if rows > 16 else "decode"
                torch.manual_seed(options.seed)
                yield Question(f"{name}, {dtype}, {rows} rows", kind, _experts(block, config, x.to(to)))
    for rows in (1, 8):
        yield Question(f"greedy choice, bfloat16, {rows} rows", "greedy", _greedy(rows, 2 * hidden, options.seed))
        yield Question(f"sampler, {rows} rows", "sampler", _sampler(rows, options.seed))


def _experts(block: Callable[[Any], nn.Module], config: Any, x: Tensor) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    weights: dict[str, Tensor] | None = None
    for spelling in SPELLINGS:
        own = copy.deepcopy(config)
        own._experts_implementation = spelling
        model = block(own).to(x.dtype).eval()
        weights = redraw(model).state_dict() if weights is None else weights
        model.load_state_dict(weights, assign=True)
        compiled = {BASELINE: model} | {
            name: torch.compile(model, backend=name, dynamic=False) for name in ("inductor", OURS)
        }
        calls |= {f"{name} {spelling}": partial(run, x) for name, run in compiled.items()}
    return calls


def _greedy(rows: int, width: int, seed: int) -> dict[str, Call]:
    """The projection to the vocabulary alone, as fusec runs it, and with the choice of the largest logit."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCABULARY, width, generator=generator).bfloat16()
    x = torch.randn(rows, width, generator=generator).bfloat16()

    def choose(x: Tensor) -> Tensor:
        return nn.functional.linear(x, weight).argmax(-1)

    compiled = partial(torch.compile, backend=OURS, dynamic=False)
    alone = compiled(partial(nn.functional.linear, weight=weight))
    return {"projection": partial(alone, x), OURS: partial(compiled(choose), x), BASELINE: partial(choose, x)}


def _sampler(rows: int, seed: int) -> dict[str, Call]:
    """Penalty, temperature, top-k, top-p and draw, on logits of as many rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, 256), generator=generator)
    logits = 3 * torch.randn(rows, VOCABULARY, generator=generator)
    processors = (
        RepetitionPenaltyLogitsProcessor(1.1), TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(50), TopPLogitsWarper(0.9),
    )  # fmt: skip

    def draw(ids: Tensor, scores: Tensor) -> Tensor:
        for process in processors:
            scores = process(ids, scores)
        return torch.multinomial(scores.softmax(-1), 1)

    compiled = {name: torch.compile(draw, backend=name, dynamic=False) for name in ("inductor", OURS)}
    return {name: partial(run, ids, logits) for name, run in ({BASELINE: draw} | compiled).items()}


def _result(question: Question, measurement: Measurement) -> dict[str, Any]:
    """Return the fastest of our own and of the others, and their ratio in the rounds that both ran in."""
    rows = {name: measurement.row(name) for name in question.calls}
    ours = min((r for n, r in rows.items() if n.startswith(OURS)), key=lambda r: r.ratio)
    others = [r for n, r in rows.items() if not n.startswith(OURS)]
    if question.kind == "greedy":
        others = [rows["projection"]]
    best = min(others, key=lambda r: r.ratio)
    return {
        "title": question.title, "kind": question.kind, "required": REQUIRED[question.kind],
        "best": best.name, "gain": best.ratio / ours.ratio, "noise": measurement.noise,
        "busy": measurement.disturbed, "rows": [asdict(row) for row in rows.values()],
    }  # fmt: skip


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table("workload", "ms", "best peer", "its ms", "peer / fusec", "required", "noise")
    for result in found:
        rows = {row["name"]: row for row in result["rows"]}
        ours = min(row["milliseconds"] for name, row in rows.items() if name.startswith(OURS))
        table.add_row(
            result["title"], f"{ours:.3g}", result["best"], f"{rows[result['best']]['milliseconds']:.3g}",
            f"{result['gain']:.2f}", f"{result['required']:.2f}", f"{result['noise']:.1%}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    raise SystemExit(main())
