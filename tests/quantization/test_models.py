"""Models of transformers with quantized weights: compiled, they give what the same model gives in eager."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_model, save_model
from torch import Tensor

import fusec
from fusec import dynamo
from fusec.models.weights import redraw

SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
TEXT = SIZES | dict(num_key_value_heads=2, pad_token_id=0, max_position_embeddings=64)
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**TEXT, num_local_experts=4)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96, bos_token_id=1, eos_token_id=1)
    ),
    "vit": lambda: transformers.ViTModel(
        transformers.ViTConfig(**{**SIZES, "vocab_size": 0}, image_size=32, patch_size=8)
    ),
}
SKIPPED = {
    "llama": {"model.embed_tokens"},
    "mixtral": {"model.embed_tokens", "model.layers.0.mlp.gate"},
    "gpt2": {"transformer.wte", "transformer.wpe", "lm_head"},
    "vit": {"embeddings", "embeddings.patch_embeddings.projection"},
}
EXPERTS = {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
FEW = [("gpt2", "nf4"), ("vit", "w8a8")]
FORMATS = ("int4-g64", "w8a8", "nf4", "fp8")


def quantized(name: str, format: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = redraw(MODELS[name]()).eval()
    return model, fusec.quantize(model, format, progress=False)


def inputs(name: str) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)} if name == "vit" else {"input_ids": tokens(2, 9)}


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, 96, shape)


@pytest.mark.parametrize(
    ("name", "format"),
    FEW + [pytest.param(n, f, marks=pytest.mark.thorough) for n in MODELS for f in FORMATS if (n, f) not in FEW],
)
def test_a_model_gives_what_it_gives_in_eager(name: str, format: str) -> None:
    model, report = quantized(name, format)
    own = EXPERTS if name == "mixtral" else set()
    assert {skipped for skipped, _ in report.skipped} == SKIPPED[name] | (own if format == "w8a8" else set())
    assert own <= {layer.name for layer in report.layers} or format == "w8a8"
    assert max(layer.weight_error for layer in report.layers) < 0.15
    given = inputs(name)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(**given)[0]
        found = torch.compile(model, backend=dynamo.backend, options={"strict": True})(**given)[0]
    if format == "w8a8":  # a code of an input on the edge of two is now and then the next one
        off = (found - expected).abs().amax(-1)
        assert (off > 1e-3).float().mean() < 0.15 and off.max() < 0.05
    else:
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("format", [FORMATS[0], *(pytest.param(f, marks=pytest.mark.thorough) for f in FORMATS[1:])])
def test_generation_with_a_static_cache_gives_the_tokens_of_eager(format: str) -> None:
    model, _ = quantized("llama", format)
    prompt = tokens(2, 5)
    model.generation_config.update(do_sample=False, min_new_tokens=6, max_new_tokens=6, disable_compile=True)

    def generated() -> Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            return model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache)

    expected = generated()
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend=dynamo.backend, options={"strict": True})
    assert torch.equal(generated(), expected) and len(set(expected[0].tolist())) > 2
    assert len(dynamo.compiled_graphs()) == 2 and not dynamo.fallbacks()  # prompt and step


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_model_by_safetensors(name: str, tmp_path: Path) -> None:
    model, _ = quantized(name, "int4-g64")
    other = MODELS[name]().eval()
    fusec.quantize(other, "int4-g64", progress=False)
    save_model(model, str(tmp_path / "model.safetensors"))
    load_model(other, str(tmp_path / "model.safetensors"))
    given = inputs(name)
    with torch.no_grad():
        assert torch.equal(model(**given)[0], other(**given)[0])
