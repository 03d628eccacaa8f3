"""What is measured on a GPU: Llamas of published sizes that decode and prefill, BERT, and the same at toy sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.published import PUBLISHED
from bench.workloads import Prepared
from fusec.models.weights import redraw

ROOM = 128
"""Tokens that a static cache holds beyond its context."""
DTYPE = torch.bfloat16

_LLAMA_8B = PUBLISHED["llama"].options
_LLAMA_1B = _LLAMA_8B | {
    "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
"""Llama 3.2 1B."""
_BERT = PUBLISHED["bert"].options
_TOY: dict[str, Mapping[str, Any]] = {
    "Llama": {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 72,
        "vocab_size": 72, "max_position_embeddings": 512,
    },
    "Bert": {
        "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 72, "vocab_size": 72,
        "max_position_embeddings": 64,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A model, and what it is asked again and again."""

    title: str
    model: str
    """Its name in transformers without what it is for."""
    config: Mapping[str, Any]
    depth: int
    """Layers that the model was published with."""
    ask: str
    """``decode`` one more token beside a static cache, ``prefill`` one, or ``encode`` whole sequences."""
    batch: int
    length: int
    """Tokens of a sequence: those in the cache, where one is decoded."""
    layers: int
    """How many are measured, unless all are asked for."""
    least: float | None = None
    """Inductor's best time over ours, at least; None for what is only checked."""
    aim: float | None = None

    def build(self, device: torch.device, seed: int) -> Any:
        """The model with random weights, made where it runs."""
        import transformers

        transformers.logging.set_verbosity_error()
        config = getattr(transformers, f"{self.model}Config")(
            attn_implementation="sdpa", num_hidden_layers=self.layers,
            **{k: v for k, v in self.config.items() if k != "num_hidden_layers"},
        )  # fmt: skip
        kind = getattr(transformers, f"{self.model}{'ForCausalLM' if self.model == 'Llama' else 'Model'}")
        options = {} if self.model == "Llama" else {"add_pooling_layer": False}
        with torch.device(device):
            return redraw(kind._from_config(config, dtype=DTYPE, **options).eval(), seed)

    def prepare(self, model: Any, seed: int) -> Prepared:
        """The model as what can be timed; every call has inputs of its own."""
        gives = {"decode": "next token", "prefill": "first token"}.get(self.ask, "")

        def call(run: Callable[..., Any]) -> Callable[[], object]:
            return partial(Turn(self, model, seed), run)

        return Prepared(model, call, self.batch if self.ask == "decode" else self.batch * self.length, gives=gives)


class Turn:
    """The inputs of one workload, which a call may change: a cache that holds a context is full after some tokens."""

    def __init__(self, workload: Workload, model: Any, seed: int) -> None:
        self.workload = workload
        self.draw = torch.Generator(model.device).manual_seed(seed)
        lengths = (workload.batch, 1 if workload.ask == "decode" else workload.length)
        tokens = torch.randint(3, model.config.vocab_size, lengths, generator=self.draw, device=model.device)
        self.inputs: dict[str, Any] = {"input_ids": tokens}
        self.layers: list[Any] = []
        self.left = 0
        if workload.ask != "encode":
            self.inputs |= {"past_key_values": self._cache(model), "use_cache": True}
        if workload.ask == "prefill":
            self.inputs["logits_to_keep"] = 1  # as generate() asks for them

    def __call__(self, run: Callable[..., Any]) -> Any:
        """One call."""
        if not self.left:
            self.rewind()
        self.left -= 1
        return run(**self.inputs)

    def rewind(self) -> None:
        """Let the caches hold what they held at first."""
        decodes = self.workload.ask == "decode"
        self.left = ROOM if decodes else 1
        for layer in self.layers:
            layer.cumulative_length.fill_(self.workload.length if decodes else 0)

    def results(self, run: Callable[..., Any]) -> list[Tensor]:
        """What a first call gives, and leaves in the caches."""
        self.rewind()
        with torch.no_grad():
            output = self(run)
        found = output.logits if hasattr(output, "logits") else output.last_hidden_state
        changed = [tensor for layer in self.layers for tensor in (layer.keys, layer.values, layer.cumulative_length)]
        return [found.clone(), *(tensor.clone() for tensor in changed)]

    def _cache(self, model: Any) -> Any:
        """A static cache of Hugging Face's, made by it, that holds random keys and values of the model's type."""
        from transformers import StaticCache

        cache: Any = StaticCache(config=model.config, max_cache_len=self.workload.length + ROOM)
        with torch.no_grad():
            model(self.inputs["input_ids"][:, :1], past_key_values=cache, use_cache=True)
        self.layers = list(cache.layers)
        for tensor in (tensor for layer in self.layers for tensor in (layer.keys, layer.values)):
            noise = torch.randn(tensor.shape, generator=self.draw, device=tensor.device, dtype=DTYPE)
            tensor.copy_(noise)
        return cache


def workloads(toy: bool = False, whole: bool = False) -> tuple[Workload, ...]:
    """What is measured.

    Args:
        toy: at sizes for an interpreter.
        whole: all layers of every model, where otherwise some stand in for them.
    """
    eight = partial(Workload, model="Llama", config=_LLAMA_8B, depth=32, layers=8)
    bert = partial(Workload, model="Bert", config=_BERT, depth=12, layers=12, ask="encode", length=128)
    found = (
        eight("8B decode 1", ask="decode", batch=1, length=1024, least=1.15, aim=1.5),
        Workload("1B decode 1", "Llama", _LLAMA_1B, 16, "decode", 1, 1024, 16, least=1.4, aim=2.0),
        eight("8B decode 32", ask="decode", batch=32, length=2048, least=1.5, aim=4.0),
        eight("8B prefill 4096", ask="prefill", batch=1, length=4096, least=1.0, aim=1.15),
        bert("BERT-base 1×128", batch=1, least=1.2, aim=1.6),
        bert("BERT-base 32×128", batch=32, least=1.0, aim=1.25),
    )
    return tuple(_toy(w) for w in found) if toy else tuple(replace(w, layers=w.depth) if whole else w for w in found)


def ragged(toy: bool = False) -> tuple[Workload, ...]:
    """Other shapes at the same sizes, no length a multiple of a block; they are only checked."""
    eight = partial(Workload, model="Llama", config=_LLAMA_8B, depth=32, layers=2)
    bert = partial(Workload, model="Bert", config=_BERT, depth=12, layers=2, ask="encode")
    found = (
        eight("8B decode 3", ask="decode", batch=3, length=333),
        eight("8B prefill 2×77", ask="prefill", batch=2, length=77),
        bert("BERT-base 3×77", batch=3, length=77),
    )
    return tuple(_toy(w) for w in found) if toy else found


def _toy(workload: Workload) -> Workload:
    """The same question of a model that is hardly there."""
    length = 5 + workload.length % 7
    return replace(workload, config=_TOY[workload.model], batch=min(workload.batch, 3), length=length, layers=1)


@dataclass(frozen=True)
class Rows:
    """An operation on rows, by itself: its memory traffic decides how long it takes."""

    title: str
    function: Callable[..., Tensor]
    operands: int
    """Matrices that it reads; it writes one."""
    columns: int
    weighted: bool = False
    """Whether it takes a weight for every column besides."""

    def inputs(self, rows: int, device: torch.device, draw: torch.Generator) -> list[Tensor]:
        """Random matrices, and the weight."""
        shapes = [(rows, self.columns)] * self.operands + [(self.columns,)] * self.weighted
        return [torch.randn(shape, generator=draw, device=device, dtype=DTYPE) for shape in shapes]


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate) * up


ROWS = (
    Rows("RMSNorm", _rms_norm, 1, 4096, weighted=True),
    Rows("softmax", _softmax, 1, 4096),
    Rows("SwiGLU", _swiglu, 2, 14336),
)
