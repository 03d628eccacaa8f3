"""Steps of a server, ours against ours: prompts among tokens, pages against one tensor, drafts against a token."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.initialization import resolve_continuous_batching_config
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.utils import build_attention_mask

import fusec
from bench.harness import OURS
from bench.serving_question import Question
from bench.workloads import Prepared, decode, llama

PAGE = 16
SINGLES, PROMPT, HELD = 8, 128, 256
"""Of the merged step: requests that get one more token, tokens of a prompt, tokens that the former hold already."""
CONTEXT = 2048
DRAFTS = 8


class Requests:
    """Requests in a paged cache of transformers, and what its manager passes to a model for their next tokens."""

    def __init__(self, model: Any, held: Sequence[int], room: int, seed: int) -> None:
        """Fill the pages of requests, which hold so many tokens and have room for more, in turn: they are mixed."""
        self.model, self.held = model, held
        settings = transformers.ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=sum(-(-(n + room) // PAGE) for n in held) + len(held), max_batch_tokens=4096
        )
        resolved = resolve_continuous_batching_config(model.config, settings, None, False, model.device)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.cache = PagedAttentionCache(
                model.config, resolved, model.device, DistributedHelper(None, None, {}), model.dtype, True
            )
            (self.allocator,) = self.cache.cache_allocators.values()
            self.allocator.cache_tensor.normal_()
        states = [RequestState(str(i), []) for i in range(len(held))]
        for reached in range(PAGE, max(held) + room + PAGE, PAGE):
            for state, tokens in zip(states, held, strict=True):
                if not self.cache.can_store_request_tokens(state, min(reached, tokens + room)):
                    raise MemoryError("the cache has too few pages")
        self.draw = torch.Generator().manual_seed(seed)

    def step(self, new: Sequence[int]) -> dict[str, Any]:
        """Return what the model is called with for as many new tokens of each request; 0 leaves it out."""
        places, write, read = list[int](), [list[int]()], [list[int]()]
        starts, key_starts = [0], [0]
        for i, (past, count) in enumerate(zip(self.held, new, strict=True)):
            if count:
                self.cache.extend_read_and_write_indices(str(i), past, count, read, write)
                places += range(past, past + count)
                starts.append(len(places))
                key_starts.append(len(read[0]))
        mask = torch.full((1, 1, len(places), len(read[0])), torch.finfo(self.model.dtype).min, dtype=self.model.dtype)
        build_attention_mask(mask, starts, key_starts)
        kind = self.allocator.layer_type
        ends = torch.tensor(starts[1:]) - 1
        return {
            "input_ids": torch.randint(3, self.model.config.vocab_size, (1, len(places)), generator=self.draw),
            "position_ids": torch.tensor([places]), "attention_mask": mask, "cache": self.cache, "use_cache": False,
            "read_index": [torch.tensor(read[0])], "write_index": [torch.tensor(write[0])],
            "cu_seq_lens_q": torch.tensor(starts, dtype=torch.int32), "logits_to_keep": ends,
            "cu_seq_lens_k": {kind: torch.tensor(key_starts, dtype=torch.int32)},
        }  # fmt: skip


def paged(dtype: torch.dtype, options: argparse.Namespace) -> Any:
    """The Llama, with attention that reads and writes pages inside the graph."""
    transformers.AttentionInterface.register("paged|eager", fusec.paged_attention)
    model = llama(dtype, options.seed, options.llama_hidden, options.llama_layers)
    model.set_attn_implementation("paged|eager")
    return model


def merged(options: argparse.Namespace) -> Iterator[Question]:
    """Single tokens and a prompt in one call, over the two one after the other."""
    for name in options.dtypes.split(","):
        model = paged(getattr(torch, name), options)
        requests = Requests(model, [HELD] * SINGLES + [0], PROMPT, options.seed)
        run = torch.compile(model, backend=OURS, dynamic=False)
        single, prompt = [1] * SINGLES + [0], [0] * SINGLES + [PROMPT]
        parts = [requests.step(new) for new in (single, prompt)]
        together = requests.step([a + b for a, b in zip(single, prompt, strict=True)])

        def apart(run: Any = run, parts: Any = parts) -> None:
            for part in parts:
                run(**part)

        yield _question(f"{SINGLES} tokens and a prompt of {PROMPT}, {name}", "merged", model, SINGLES + PROMPT, name,
                        {"apart": apart, OURS: partial(run, **together)})  # fmt: skip


def pages(options: argparse.Namespace) -> Iterator[Question]:
    """One more token from pages, over the same from one tensor for each layer."""
    context = min(options.context, CONTEXT)
    for name in options.dtypes.split(","):
        dtype = getattr(torch, name)
        for batch in (1, SINGLES):
            plain = decode(dtype, options.seed, batch, options.llama_hidden, options.llama_layers, context - 1, context)
            contiguous = plain.call(torch.compile(plain.model, backend=OURS, dynamic=False))
            model = paged(dtype, options)
            step = Requests(model, [context - 1] * batch, 1, options.seed).step([1] * batch)
            run = torch.compile(model, backend=OURS, dynamic=False)
            yield _question(f"a token for {batch} from pages of {PAGE}, {name}", "pages", model, batch, name,
                            {"one tensor": contiguous, OURS: partial(run, **step)})  # fmt: skip


def drafts(options: argparse.Namespace) -> Iterator[Question]:
    """Drafts of one request verified in one pass, over a single token: bfloat16, bound by memory."""
    calls, prepared = {}, dict[int, Prepared]()
    for new in (1, 1 + DRAFTS):
        one = prepared[new] = decode(
            torch.bfloat16, options.seed, hidden=options.llama_hidden, layers=options.llama_layers, new=new
        )
        calls["one token" if new == 1 else OURS] = one.call(torch.compile(one.model, backend=OURS, dynamic=False))
    yield _question(f"{DRAFTS} drafts verified, bfloat16", "drafts", prepared[1].model, 1 + DRAFTS, "bfloat16", calls)


def _question(title: str, kind: str, model: Any, tokens: int, dtype: str, calls: dict[str, Any]) -> Question:
    return Question(title, kind, calls, tokens, 2 * tokens * weights(model), dtype)


def weights(model: Any) -> int:
    """Elements of the matrices, the projection to the vocabulary included."""
    linear: list[Tensor] = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return sum(weight.numel() for weight in linear)
