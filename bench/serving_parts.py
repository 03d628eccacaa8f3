"""Parts of a server's step, against the other libraries: mixtures of experts, samplers, the choice of the next token.

Every block is measured as each library spells it, and the fastest of each library counts.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from bench.harness import BASELINE, OURS
from bench.serving_question import Call, Question
from fusec.models.weights import redraw

SPELLINGS = ("grouped_mm", "batched_mm")
"""Of experts, in transformers."""
VOCABULARY = 128_256
ROWS = (1, 8)
"""Of logits."""
BACKENDS = ("inductor", OURS)


def experts(options: argparse.Namespace) -> Iterator[Question]:
    """Blocks of Mixtral and Qwen3-MoE, by number of rows."""
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


def samplers(options: argparse.Namespace) -> Iterator[Question]:
    """The choice of the next token, greedy and drawn."""
    for rows in ROWS:
        yield Question(
            f"greedy choice, bfloat16, {rows} rows", "greedy", _greedy(rows, 2 * options.hidden, options.seed)
        )
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
        compiled = {BASELINE: model} | {name: torch.compile(model, backend=name, dynamic=False) for name in BACKENDS}
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

    compiled = {name: torch.compile(draw, backend=name, dynamic=False) for name in BACKENDS}
    return {name: partial(run, ids, logits) for name, run in ({BASELINE: draw} | compiled).items()}
