"""How many things a layer of a model does: kernels, calls, copies and writes, counted as what one more layer adds."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers

from fusec.codegen import target_named
from fusec.codegen.kernel import Kernel
from fusec.codegen.program import build_program
from fusec.config import Config
from fusec.debug.capture import capture
from fusec.ir.graph import Node
from fusec.passes import default_pipeline
from fusec.pipeline import Context

SIZES = [(64, 4), pytest.param(1024, 16, marks=pytest.mark.slow)]
DTYPES = [torch.float32, torch.bfloat16]


class Scheduled:
    """The C++ target without a compiler: what a program does is known once its kernels are scheduled."""

    name, lanes, whole_row = "cpp", 16, False

    def __init__(self, kernel: Kernel | None = None) -> None:
        self.source = ""
        self.name = kernel.name if kernel is not None else "cpp"

    def __call__(self, buffers: Sequence[Any], symbols: Sequence[int]) -> None:
        raise AssertionError("only counted")

    def schedule(self, region: Node, name: str) -> Kernel:
        return target_named("cpp").schedule(region, name)

    def print(self, kernel: Kernel) -> str:
        return ""

    def build(self, kernels: Sequence[Kernel], config: Config) -> list[Any]:
        return [Scheduled(kernel) for kernel in kernels]


def steps(model: nn.Module, *inputs: Any, **keywords: Any) -> Counter[str]:
    """What one call of a model does, by kind."""
    torch._dynamo.reset()
    (graph,) = capture(model, *inputs, **keywords)
    context = Context(Config(strict=True))
    default_pipeline(context.config).run(graph, context)
    return Counter(step.kind for step in build_program(graph, Scheduled(), context).steps)


def decoding(layers: int, hidden: int, heads: int, dtype: torch.dtype) -> Counter[str]:
    """One token of a Llama whose static cache holds some already."""
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    cache = transformers.StaticCache(config=config, max_cache_len=64)
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.int64), past_key_values=cache, use_cache=True)
        return steps(model, torch.ones(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)


def encoding(layers: int, hidden: int, heads: int, dtype: torch.dtype) -> Counter[str]:
    """A few tokens through BERT."""
    config = transformers.BertConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        vocab_size=64,
    )  # fmt: skip
    model = transformers.BertModel(config, add_pooling_layer=False).eval().to(dtype)
    return steps(model, torch.ones(1, 9, dtype=torch.int64))


@pytest.mark.parametrize(("hidden", "heads"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("model", "most"), [(decoding, 5), (encoding, 6)], ids=["decoding", "encoding"])
def test_a_layer_is_few_kernels_and_nothing_else(
    model: Any, most: int, hidden: int, heads: int, dtype: torch.dtype
) -> None:
    """Norm, projections, rope and cache; attention; its projection; norm, gate and up; down. BERT has one more."""
    fewer, more = (model(layers, hidden, heads, dtype) for layers in (2, 3))
    assert set(more - fewer) == {"kernel"} and (more - fewer)["kernel"] <= most, (fewer, more)
