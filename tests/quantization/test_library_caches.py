"""Quantized caches of transformers: eager's tokens, and what is dequantized inside of attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusec.config import Config
from fusec.dynamo import backend_for, compiled_graphs
from fusec.models.weights import redraw

transformers = pytest.importorskip("transformers")
LIBRARIES = {"fp8": "transformers", "hqq": "hqq", "quanto": "optimum.quanto"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_generation_gives_the_tokens_of_eager(library: str) -> None:
    pytest.importorskip(LIBRARIES[library])
    caches = pytest.importorskip("transformers.cache_utils")
    if library == "fp8" and not hasattr(caches, "Fp8QuantizedLayer"):
        pytest.skip("transformers has no cache of float8")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0,
    )  # fmt: skip
    model = redraw(transformers.LlamaForCausalLM(config).eval())
    ids = torch.randint(1, 128, (2, 20), generator=torch.Generator().manual_seed(0))
    eager = _generated(model, ids, caches.QuantizedCache(library, config))
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend=backend_for(Config()))
    assert torch.equal(_generated(model, ids, caches.QuantizedCache(library, config)), eager)
    decode = compiled_graphs()[-1]
    assert any(region.attributes["label"] == "attention" for region in decode.graph.nodes if region.is_op("region"))


def _generated(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    generate: Callable[..., torch.Tensor] = model.generate
    return generate(ids, past_key_values=cache, max_new_tokens=12, min_new_tokens=12, do_sample=False)
