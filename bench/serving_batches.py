"""Many requests by the continuous batching of transformers, whose steps fusec compiles or not."""

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching.utils import logger

from bench.harness import BASELINE, OURS
from bench.serving_question import Question
from bench.serving_steps import PAGE, paged, weights
from bench.workloads import llama

REQUESTS, SHORTEST, LONGEST, NEW = 32, 8, 200, 64
"""Requests, the range of their prompts' lengths, and new tokens of each."""
ROUNDS = 3


class Batch:
    """Requests that one manager answers again and again."""

    def __init__(self, model: Any, options: argparse.Namespace, **compiling: Any) -> None:
        draw, longest = random.Random(options.seed), min(LONGEST, options.context)
        lengths = [draw.randint(SHORTEST, longest) for _ in range(options.requests)]
        self.prompts = [[draw.randint(3, model.config.vocab_size - 1) for _ in range(n)] for n in lengths]
        self.new, self.model = min(NEW, options.context), model
        self.greedy = transformers.GenerationConfig(
            max_new_tokens=self.new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        pages = sum(-(-(n + self.new) // PAGE) for n in lengths)
        self.settings = transformers.ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=pages + REQUESTS, max_batch_tokens=256, **compiling
        )
        self.outputs: list[Any] = []
        self.seconds = 0.0

    def __call__(self) -> list[list[int]]:
        """Answer all requests, and return their new tokens."""
        start = time.perf_counter()
        found = self.model.generate_batch(
            self.prompts, self.greedy, self.settings, record_timestamps=True, warmup=False, persistent_manager=True
        )
        self.seconds, self.outputs = time.perf_counter() - start, [found[name] for name in sorted(found)]
        return [output.generated_tokens for output in self.outputs]

    @property
    def tokens(self) -> int:
        """Tokens that the model processes: of prompts, and new ones but the last."""
        return sum(map(len, self.prompts)) + len(self.prompts) * (self.new - 1)

    def figures(self) -> dict[str, Any]:
        """What a server reports, of the last run."""
        first = [output.timestamps[0] - output.created_time for output in self.outputs]
        each = [(o.timestamps[-1] - o.timestamps[0]) / max(1, len(o.timestamps) - 1) for o in self.outputs]
        return {
            "ttft_ms": percentiles(first), "tpot_ms": percentiles(each),
            "new_tokens_s": len(self.outputs) * self.new / self.seconds, "qps": len(self.outputs) / self.seconds,
        }  # fmt: skip


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Median and the 95th percentile, in milliseconds."""
    of_hundred = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
    return {"p50": 1e3 * of_hundred[49], "p95": 1e3 * of_hundred[94]}


def batches(options: argparse.Namespace) -> Iterator[Question]:
    """Tokens a second of ``generate_batch``, over the same with eager steps."""
    logger.setLevel("CRITICAL")
    for name in options.dtypes.split(","):
        dtype = getattr(torch, name)
        eager = Batch(llama(dtype, options.seed, options.llama_hidden, options.llama_layers), options)
        compiling = transformers.CompileConfig(backend=OURS, mode=None)
        ours = Batch(paged(dtype, options), options, varlen_compile_config=compiling, q_padding_interval_size=8,
                     kv_padding_interval_size=64)  # fmt: skip
        yield Question(f"{options.requests} requests, {name}", "batch", {BASELINE: eager, OURS: ours}, ours.tokens,
                       2 * ours.tokens * weights(ours.model), name, ROUNDS, ours.figures)  # fmt: skip
