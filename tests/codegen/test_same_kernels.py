"""A model without caches has the same kernels on both targets."""

from typing import Any

import pytest
import torch

from fusec.codegen import target_named
from fusec.codegen.tile.kernel import Kernel
from fusec.config import Config
from fusec.debug.capture import capture
from fusec.dynamo import backend, compiled_graphs
from fusec.ir.ops import Trait
from fusec.loops.plan import plan_kernel
from fusec.models.bert import PRESETS as BERT_PRESETS
from fusec.models.bert import Bert
from fusec.models.inputs import padded_mask, sample_tokens
from fusec.models.llama import PRESETS as LLAMA_PRESETS
from fusec.models.llama import Llama
from fusec.passes import default_pipeline
from fusec.reference.contract import compare_outputs
from tests.contexts import context_of

MODELS = {"llama": (Llama(LLAMA_PRESETS["tiny"]), 1), "bert": (Bert(BERT_PRESETS["tiny"]), 16)}
"""Each with the number of its tokens."""


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.thorough), torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_both_targets_have_the_same_kernels(name: str, dtype: torch.dtype) -> None:
    model, tokens = MODELS[name]
    torch._dynamo.reset()
    (captured,) = capture(model.to(dtype).eval(), sample_tokens(100, 1, tokens), padded_mask(1, tokens, "none"))
    kinds: list[list[str]] = []
    for target in map(target_named, ("cpp", "triton")):
        graph, config = captured.copy(), Config()
        context = context_of(target.name, config)
        default_pipeline(config).run(graph, context)
        regions = [node for node in graph if node.is_op("region")]
        assert not any(node.has(Trait.CONTRACTION) for node in graph)  # no product is left to the vendor
        kernels: list[Kernel] = [target.schedule(plan_kernel(region.body, context.limits)) for region in regions]
        assert all(map(target.print, kernels))
        kinds.append([kernel.kind for kernel in kernels])
    assert kinds[0] == kinds[1]
    assert kinds[0].count("contraction") >= 6 and kinds[0].count("attention") == (2 if tokens > 1 else 0)


def test_a_model_runs_on_triton() -> None:
    torch._dynamo.reset()
    model, _ = MODELS["llama"]
    inputs = sample_tokens(100, 2, 3), padded_mask(2, 3, "left")
    fast = torch.compile(model.float().eval(), backend=backend, options={"strict": True, "target": "triton"})
    with torch.no_grad():
        assert compare_outputs(model(*inputs), fast(*inputs), model.double()(*inputs)).passed
    (result,) = compiled_graphs()
    assert {kernel.kind for kernel in result.program.kernels.values()} >= {"contraction", "attention"}


def test_a_model_with_products_of_many_rows_runs_on_triton() -> None:
    """Those that take something along are generated, the others stay the library's."""
    torch._dynamo.reset()
    model, _ = MODELS["llama"]
    inputs = sample_tokens(100, 2, 20), padded_mask(2, 20, "left")
    options: dict[str, Any] = {"strict": True, "target": "triton", "machine": "h200", "mode": "max-autotune"}
    fast = torch.compile(model.bfloat16().eval(), backend=backend, options=options)
    with torch.no_grad():
        assert compare_outputs(model(*inputs), fast(*inputs), model.double()(*inputs)).passed
    (result,) = compiled_graphs()
    generated = {kernel.name for kernel in result.program.kernels.values() if kernel.kind == "contraction"}
    assert generated == {"linear_rotary_embedding", "linear_rotary_embedding_2", "gated_projection"}
    assert [step.kind for step in result.program.steps].count("vendor") == 2 * 3 + 1  # v, o, down; the vocabulary


def test_a_model_decodes_on_triton_with_a_static_cache() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()

    def decode(model: Any) -> list[torch.Tensor]:
        """Logits of a prompt and of two more tokens, and what the cache holds then."""
        torch._dynamo.reset()
        cache = transformers.StaticCache(config=config, max_cache_len=48)
        with torch.no_grad():
            found = [model(t, past_key_values=cache).logits for t in sample_tokens(64, 2, 7).split([5, 1, 1], 1)]
        return found + [x for layer in cache.layers for x in (layer.keys, layer.values)]

    fast = torch.compile(model, backend=backend, options={"strict": True, "target": "triton"})
    for want, got in zip(decode(model), decode(fast), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    for result in compiled_graphs():
        assert {kernel.kind for kernel in result.program.kernels.values()} >= {"contraction", "attention"}
