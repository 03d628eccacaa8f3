"""Mixtures of experts of transformers: the same kernels from each way to write them, and none is sorted or copied."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.published import PUBLISHED, Step, capture
from fusec.compiler import Compiled
from fusec.config import Config
from fusec.dynamo import backend_for, compiled_graphs
from fusec.models.weights import redraw
from fusec.passes import default_pipeline
from tests.codegen.test_dynamic_indices import both
from tests.contexts import context_of

transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 32, "num_experts": 8},
    "Qwen3Moe": {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 16},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}


def compiled(family: str, implementation: str, length: int, target: str = "cpp") -> Compiled:
    """Compile a model, compare its logits with eager's, and return its only graph."""
    config = getattr(transformers, f"{family}Config")(**SMALL, **FAMILIES[family])
    config._experts_implementation = implementation
    torch.manual_seed(0)
    model = redraw(transformers.AutoModelForCausalLM.from_config(config).eval())
    ids = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    with torch.no_grad():
        eager = model(ids, use_cache=False).logits
        found = torch.compile(model, backend=backend_for(Config(strict=True, target=target)))(
            ids, use_cache=False
        ).logits
    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-4)
    return compiled_graphs()[-1]


def labels(made: Compiled) -> list[str]:
    return [n.attributes["label"] for n in made.graph.nodes if n.is_op("region")]


@both
@pytest.mark.parametrize(
    "family", ["Mixtral", *(pytest.param(f, marks=pytest.mark.thorough) for f in list(FAMILIES)[1:])]
)
def test_experts_are_two_grouped_products(family: str, target: str) -> None:
    made = compiled(family, "grouped_mm", 7, target)
    assert sum("grouped_linear" in label for label in labels(made)) == 2
    opaque = {n.attributes["target"] for n in made.graph.nodes if n.is_op("opaque")}
    assert not opaque


def test_a_batch_of_matrices_compiles_to_the_same_kernels() -> None:
    assert labels(compiled("Mixtral", "batched_mm", 7)) == labels(compiled("Mixtral", "grouped_mm", 7))


def test_no_device_sorts_tokens() -> None:
    """Models call the library with other types where the device is no CPU; this one has no memory."""
    published = replace(PUBLISHED["mixtral"], options=PUBLISHED["mixtral"].options | {"num_hidden_layers": 1})
    graph = capture(published, Step("prefill", 9), torch.bfloat16)
    default_pipeline(Config()).run(graph, context_of("triton"))
    assert not [n.op.name for n in graph.nodes if n.is_op("argsort", "opaque")]
    regions = [n.attributes["label"] for n in graph.nodes if n.is_op("region")]
    assert sum("grouped_linear" in label for label in regions) == 2
