"""Transformers at their published sizes, captured without memory: two layers, decoding with a cache and prefilling."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.decoding import one_more
from bench.families import FAMILIES
from fusec.config import Config
from fusec.dynamo import backend_with
from fusec.ir.graph import Graph

CACHED = 2048
"""Tokens that a cache has room for, where the model's positions go so far."""
SHORT = 512
"""Tokens in it: fewer than a sliding window has."""
LAYERS = 2
MOST_DECODED = 64
"""Sequences of which one more token is made."""


@dataclass(frozen=True)
class Published:
    """A model of ``FAMILIES`` at the sizes that it was published with."""

    family: str
    of: str
    """What has these sizes."""
    options: dict[str, Any]
    longest: int = 1 << 16
    """Tokens that it was made for; as many rows as are asked for beyond that are further sequences."""
    decodes: bool = True

    def build(self, dtype: torch.dtype) -> Any:
        """The model, whose parameters have sizes but no memory."""
        import transformers

        transformers.logging.set_verbosity_error()
        family = FAMILIES[self.family]
        config = getattr(transformers, family.config)(attn_implementation="sdpa", **self.options)
        config.use_cache = False
        with torch.device("meta"):
            return getattr(transformers, family.model)(config).eval().to(dtype)

    def shape(self, rows: int) -> tuple[int, int]:
        """Sequences and their length that are so many rows."""
        return (rows // self.longest, self.longest) if rows > self.longest else (1, rows)


@dataclass(frozen=True)
class Step:
    """What a model is asked to do: so many rows of one kind."""

    name: str
    rows: int

    @property
    def label(self) -> str:
        """How it is called in a report."""
        return f"{self.name} {self.rows}"


PUBLISHED = {
    model.family: model
    for model in (
        Published(
            "llama",
            "Llama 3.1 8B",
            {
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 14336,
                "vocab_size": 128256,
                "num_hidden_layers": LAYERS,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
            },
        ),
        Published(
            "qwen3",
            "Qwen3 8B",
            {
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 12288,
                "vocab_size": 151936,
                "num_hidden_layers": LAYERS,
                "max_position_embeddings": 40960,
            },
        ),
        Published(
            "gemma3",
            "Gemma 3 4B",
            {
                "hidden_size": 2560,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
                "intermediate_size": 10240,
                "vocab_size": 262208,
                "sliding_window": 1024,
                "num_hidden_layers": LAYERS,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
        Published(
            "gpt2",
            "GPT-2",
            {"n_embd": 768, "n_head": 12, "n_layer": LAYERS, "vocab_size": 50257, "n_positions": 1024},
            longest=1024,
        ),
        Published(
            "mixtral",
            "Mixtral 8x7B",
            {
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 14336,
                "vocab_size": 32000,
                "num_hidden_layers": LAYERS,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "max_position_embeddings": 32768,
            },
            longest=32768,
        ),
        Published(
            "bert",
            "BERT base",
            {
                "hidden_size": 768,
                "num_attention_heads": 12,
                "intermediate_size": 3072,
                "vocab_size": 30522,
                "num_hidden_layers": LAYERS,
                "max_position_embeddings": 512,
            },
            longest=512,
            decodes=False,
        ),
        Published(
            "t5",
            "T5 base",
            {
                "d_model": 768,
                "d_kv": 64,
                "num_heads": 12,
                "d_ff": 3072,
                "vocab_size": 32128,
                "num_layers": LAYERS,
                "num_decoder_layers": LAYERS,
            },
            longest=1024,
        ),
    )
}
"""By family."""


def steps(model: Published, rows: list[int]) -> list[Step]:
    """What a model is asked: up to ``MOST_DECODED`` rows are one more token of so many sequences, more are whole ones.

    An encoder, which makes no more tokens, is given one short sequence.
    """
    found = []
    for n in rows:
        if n > MOST_DECODED:
            found += [Step("prefill", n), Step("padded", n)]
        elif model.decodes:
            found += [Step("decode", n), Step("generate", n)]
        else:
            found += [Step("prefill", n)]
    return found


class _Captured(Exception):
    """Raised in the place of the first run: there is no memory to run on."""


def capture(model: Published, step: Step, dtype: torch.dtype) -> Graph:
    """The graph of one step as imported."""
    module = model.build(dtype)
    with torch.device("meta"), torch.no_grad():
        inputs = _INPUTS[step.name](model, module, step.rows)
    found: list[Graph] = []

    def keep(graph: Graph, config: Config) -> Any:
        def program(arguments: list[Any]) -> list[Any]:
            raise _Captured

        found.append(graph.copy())
        return SimpleNamespace(program=program)

    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.compile(module, backend=backend_with(keep), dynamic=False, fullgraph=True)(**inputs)
        except _Captured:
            pass
    (graph,) = found
    return graph


def _tokens(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def _prefill(model: Published, module: Any, rows: int) -> dict[str, Any]:
    tokens = _tokens(*model.shape(rows))
    both = {"decoder_input_ids": tokens} if module.config.is_encoder_decoder else {}
    return {"input_ids": tokens, **both}


def _padded(model: Published, module: Any, rows: int) -> dict[str, Any]:
    """The same with a mask that is loaded."""
    inputs = _prefill(model, module, rows)
    return inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}


def _decode(model: Published, module: Any, rows: int) -> dict[str, Any]:
    """One token for each sequence, its keys and values in a static cache."""
    return one_more(module, _tokens(rows, SHORT), min(CACHED, model.longest))


def _generate(model: Published, module: Any, rows: int) -> dict[str, Any]:
    """The same with masks made before."""
    room = min(CACHED, model.longest)
    return one_more(module, _tokens(rows, SHORT), room, masked=True)


_INPUTS: dict[str, Callable[[Published, Any, int], dict[str, Any]]] = {
    "prefill": _prefill,
    "padded": _padded,
    "decode": _decode,
    "generate": _generate,
}
