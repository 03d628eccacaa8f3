"""What is measured on a processor: decoding and prefill of a Llama, encoders, and a model that is all overhead."""

import copy
import functools
import random
import runpy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import console
from bench.peers import peer
from fusec.models.weights import redraw

DEMO = Path(__file__).parents[1] / "examples" / "embed.py"
CAPACITY, VALID = 512, 256
"""Tokens that a static cache holds at most, and that it holds when a step of decoding begins."""
HIDDEN, LAYERS, HEADS, KEY_HEADS, MLP, VOCABULARY = 1024, 12, 16, 4, 2816, 32000
"""The Llama's sizes."""
SMALL_HIDDEN, SMALL_LAYERS = 64, 2
SENTENCES, BATCH = 72, 4
"""How many sentences are embedded, and how many together."""

Compile = Callable[[nn.Module], Callable[..., Any]]
Call = Callable[[], object]


@dataclass(frozen=True)
class Prepared:
    """A workload ready to be run by anyone."""

    model: Any
    call: Callable[[Callable[..., Any]], Call]
    """Gives the call that is timed, for a compiled model; whatever it changes is that call's own."""
    rows: int
    """Tokens in one call."""
    dynamic: bool | None = None
    """What ``torch.compile`` is told of sizes."""
    forwards: int = 1
    """How often a call runs the model."""
    gives: str = ""
    """``first token``, after a prompt, whose logits alone are made; ``next token`` of each row; "" where neither."""

    @property
    def weights(self) -> list[Tensor]:
        """The matrices, which every call has to read; tables that are only looked up in are left out."""
        used = {id(module.weight) for module in self.model.modules() if isinstance(module, nn.Linear)}
        return [p for p in self.model.parameters() if id(p) in used]

    @property
    def weight_bytes(self) -> int:
        """Bytes of these that a call reads."""
        return self.forwards * sum(weight.nbytes for weight in self.weights)

    @property
    def flops(self) -> int:
        """Operations of the products with them; attention's are left out."""
        head = self.model.get_output_embeddings() if self.gives == "first token" else None
        saved = (self.rows - 1) * head.weight.numel() if head is not None else 0
        return 2 * (self.rows * sum(weight.numel() for weight in self.weights) - saved)


@dataclass(frozen=True)
class Workload:
    """Its name, and how it is made."""

    name: str
    dtype: torch.dtype
    prepare: Callable[[torch.dtype, int], Prepared]
    least: tuple[float, float]
    """Best peer's time over ours, at least: our defaults against eager and Inductor, frozen against all."""

    @property
    def title(self) -> str:
        """Name and dtype."""
        return f"{self.name}, {str(self.dtype).removeprefix('torch.')}"


def llama(dtype: torch.dtype, seed: int, hidden: int = HIDDEN, layers: int = LAYERS, mlp: int = 0) -> Any:
    """The Llama, its parameters redrawn."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=mlp or hidden * MLP // HIDDEN, num_hidden_layers=layers,
        num_attention_heads=HEADS * hidden // HIDDEN or 1, num_key_value_heads=KEY_HEADS * hidden // HIDDEN or 1,
        vocab_size=VOCABULARY * hidden // HIDDEN, max_position_embeddings=8192,
    )  # fmt: skip
    return redraw(LlamaForCausalLM(config).eval(), seed).to(dtype)


def decode(
    dtype: torch.dtype,
    seed: int,
    batch: int = 1,
    hidden: int = HIDDEN,
    layers: int = LAYERS,
    valid: int = VALID,
    capacity: int = CAPACITY,
    mlp: int = 0,
    new: int = 1,
) -> Prepared:
    """``new`` more tokens for each of ``batch`` rows beside a static cache, again and again at the same place."""
    model = llama(dtype, seed, hidden, layers, mlp)
    tokens = _tokens(model.config.vocab_size, batch, valid, seed)

    @functools.cache
    def filled() -> Any:
        cache = _cache(model, capacity)
        with torch.no_grad():
            model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def call(run: Callable[..., Any]) -> Call:
        return partial(_again, run, tokens[:, -new:], copy.deepcopy(filled()), valid)

    return Prepared(model, call, batch * new, gives="next token")


def prefill(dtype: torch.dtype, seed: int, length: int) -> Prepared:
    """A prompt of one row into an empty static cache; logits of its last token, as ``generate()`` asks for them."""
    model = llama(dtype, seed)
    tokens = _tokens(model.config.vocab_size, 1, length, seed)

    def call(run: Callable[..., Any]) -> Call:
        cache = _cache(model, max(CAPACITY, length))
        with torch.no_grad():
            model(tokens, past_key_values=cache, use_cache=True)
        return partial(_again, run, tokens, cache, 0, logits_to_keep=1)

    return Prepared(model, call, length, gives="first token")


def bert(dtype: torch.dtype, seed: int, batch: int, length: int) -> Prepared:
    """BERT-base without padding."""
    from transformers import BertConfig, BertModel

    model: Any = redraw(BertModel(BertConfig(), add_pooling_layer=False).eval(), seed).to(dtype)
    tokens = _tokens(model.config.vocab_size, batch, length, seed)
    return Prepared(model, lambda run: partial(run, tokens), batch * length)


def embedding(dtype: torch.dtype, seed: int) -> Prepared:
    """The demo's sentence-embedding model, in one graph for all lengths: a call is all of some batches, one by one.

    Like lengths go together, as in the demo; sentences, and the order of the batches, are drawn. Padding counts for
    nothing, neither as tokens nor as operations.
    """
    demo, draw = runpy.run_path(str(DEMO)), random.Random(seed)
    tokenizer, model = demo["load"]()
    lines = draw.sample(demo["SENTENCES"].read_text(encoding="utf-8").splitlines(), SENTENCES)
    rows = sorted((tokenizer.encode(line).ids for line in lines), key=len)
    batches = demo["in_batches"](rows, BATCH)
    draw.shuffle(batches)

    def call(run: Callable[..., Any]) -> Call:
        def every() -> None:
            for tokens, mask in batches:
                run(tokens, mask)

        return every

    return Prepared(model.to(dtype), call, sum(map(len, rows)), dynamic=True, forwards=len(batches))


WORKLOADS: tuple[Workload, ...] = tuple(
    Workload(name, dtype, prepare, least)
    for name, prepare, bounds in (
        ("decode 1", decode, {"float32": (2.2, 1.0), "bfloat16": (2.2, 1.7)}),
        ("decode 8", partial(decode, batch=8), {"float32": (2.2, 1.7), "bfloat16": (1.8, 1.8)}),
        ("prefill 32", partial(prefill, length=32), {"float32": (1.2, 1.3), "bfloat16": (1.2, 1.0)}),
        ("prefill 128", partial(prefill, length=128), {"float32": (1.03, 1.05), "bfloat16": (1.03, 1.05)}),
        ("prefill 512", partial(prefill, length=512), {"float32": (1.03, 1.05), "bfloat16": (1.03, 1.05)}),
        ("BERT-base 1×16", partial(bert, batch=1, length=16), {"float32": (1.3, 1.4)}),
        ("BERT-base 1×128", partial(bert, batch=1, length=128), {"float32": (1.03, 1.1)}),
        ("BERT-base 8×128", partial(bert, batch=8, length=128), {"float32": (1.0, 1.05)}),
        ("sentence embeddings", embedding, {"float32": (1.3, 1.4)}),
        ("decode 1, hidden 64", partial(decode, hidden=SMALL_HIDDEN, layers=SMALL_LAYERS), {"float32": (2.0, 2.0)}),
    )
    for dtype, least in ((getattr(torch, name), bound) for name, bound in bounds.items())
)


def calls(prepared: Prepared, ours: str, peers: Iterable[str]) -> tuple[dict[str, Call], dict[str, str]]:
    """The call of ours and of every peer that runs the workload at all, compiled; why the others do not."""
    torch._dynamo.reset()
    candidates: dict[str, Call] = {}
    failed: dict[str, str] = {}
    for name in (ours, *peers):
        console.print(f"  compile {name}", style="dim", highlight=False)
        try:
            with torch.no_grad():
                call = prepared.call(peer(name, prepared.model, prepared.dynamic))
                call()
        except Exception as problem:
            if name == ours:
                raise
            failed[name] = described(problem)
            continue
        candidates[name] = call
    return candidates, failed


def described(problem: Exception) -> str:
    """What went wrong, in a line."""
    return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"


def _again(run: Callable[..., Any], tokens: Tensor, cache: Any, valid: int, **options: Any) -> object:
    for layer in cache.layers:
        layer.cumulative_length.fill_(valid)
    return run(tokens, past_key_values=cache, use_cache=True, **options)


def _cache(model: Any, capacity: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=capacity)


def _tokens(vocabulary: int, batch: int, length: int, seed: int) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))
