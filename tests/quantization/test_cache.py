"""Caches of int8: generated tokens are eager's, and attention reads the codes."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fusec
from fusec.dynamo import compiled_graphs
from fusec.errors import OptionError

SIZES = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
)  # fmt: skip
MODELS = {
    "full": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES)),
    "sliding": (transformers.MistralForCausalLM, transformers.MistralConfig(**SIZES, sliding_window=12)),
}


def generated(model: Any, cache: Any, count: int = 20) -> Tensor:
    tokens = torch.arange(18).reshape(2, 9) % 7 + 1
    model.generation_config.update(do_sample=False, min_new_tokens=count, max_new_tokens=count, disable_compile=True)
    with torch.no_grad():
        found: Tensor = model.generate(tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache)
    return found


@pytest.mark.parametrize(
    ("name", "capacity", "format"),
    [
        ("full", None, "int4-g8"),
        *[
            pytest.param(name, capacity, format, marks=pytest.mark.thorough)
            for name in MODELS for capacity in (40, None) for format in ("int8-row", "int8-g8", "int4-g8")
        ],
    ],
)  # fmt: skip
def test_tokens_are_those_of_eager(name: str, capacity: int | None, format: str) -> None:
    architecture, config = MODELS[name]
    model = architecture(config).eval()
    expected = generated(model, fusec.quantized_cache(config, capacity, format))
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="fusec", options={"strict": True})
    assert torch.equal(generated(model, fusec.quantized_cache(config, capacity, format)), expected)


@pytest.mark.parametrize(("format", "more"), [("int8-row", 1), pytest.param("int4-g8", 2, marks=pytest.mark.thorough)])
def test_a_step_quantizes_in_few_kernels_and_stores_no_dense_cache(format: str, more: int) -> None:
    """Two codes of four bits become a byte in a kernel of its own."""
    architecture, config = MODELS["full"]
    model = architecture(config).eval()
    forward, runs, shapes = model.forward, {}, []
    for cache in (transformers.StaticCache(config=config, max_cache_len=40), fusec.quantized_cache(config, 40, format)):
        torch._dynamo.reset()
        model.forward = torch.compile(forward, backend="fusec", options={"strict": True})
        generated(model, cache, 4)
        step = compiled_graphs()[-1]
        runs[cache] = [s for s in step.program.steps if s.kind == "kernel"]
        shapes.append([v.shape for n in step.graph.nodes for v in n.results if v.dtype.is_float])
    dense, quantized = runs.values()
    assert len(quantized) == len(dense) + more * config.num_hidden_layers
    assert not any(shape[-2:] == (40, 16) for shape in shapes[1])


def test_the_error_and_the_size() -> None:
    for format, bytes_ in (("int8-row", 16 + 4), ("int8-g8", 16 + 8), ("int4-g8", 8 + 2 * 5), ("int4-row", 8 + 5)):
        layer = fusec.quantized_cache(MODELS["full"][1], 40, format).layers[0]
        keys, values = torch.randn(2, 2, 2, 6, 16).unbind()
        found = layer.update(keys, values)
        for dense, exact in zip(found, (keys, values), strict=True):
            error = (dense[:, :, :6] - exact).abs().reshape(2, 2, 6, -1, 8 if "g8" in format else 16)
            low, high = exact.reshape(error.shape).aminmax(dim=-1, keepdim=True)
            largest = torch.maximum(high, -low) / 127 if "int8" in format else (high.clamp(0) - low.clamp(max=0)) / 15
            assert (error <= largest / (2 if "int8" in format else 1) + 1e-6).all() and not dense[:, :, 6:].any()
        assert layer.nbytes == 2 * 2 * 2 * 40 * bytes_


@pytest.mark.parametrize(
    ("format", "message"), [("nf4", "no format nf4"), ("w8a8", "no format w8a8"), ("int5", "int5")]
)
def test_formats_that_caches_do_not_have(format: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fusec.quantized_cache(MODELS["full"][1], 40, format)


def test_groups_that_do_not_fill_a_head() -> None:
    with pytest.raises(OptionError, match="16 columns have no format int4-g32"):
        fusec.quantized_cache(MODELS["full"][1], 40, "int4-g32").layers[0].update(*torch.randn(2, 1, 2, 6, 16))


@pytest.mark.parametrize("capacity", [40, None])
def test_rows_and_tokens_are_moved_with_their_scales(capacity: int | None) -> None:
    cache = fusec.quantized_cache(MODELS["full"][1], capacity)
    layer, new = cache.layers[0], torch.randn(2, 2, 1, 16)
    keys, _ = layer.update(torch.randn(2, 2, 6, 16), torch.randn(2, 2, 6, 16))
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped, _ = layer.update(new, new)
    assert torch.equal(swapped[:, :, :6], keys.flip(0)[:, :, :6]) and layer.get_seq_length() == 7
    layer.reset()
    again, _ = layer.update(new, new)
    torch.testing.assert_close(again[:, :, :1], new, rtol=0, atol=0.02)
    assert layer.get_seq_length() == 1
