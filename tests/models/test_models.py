"""Each model computes what transformers' own implementation computes from the same published weights."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from fusec.models import bert, gpt2, llama, t5, vit  # noqa: E402
from fusec.models.inputs import padded_mask, sample_images, sample_tokens  # noqa: E402
from fusec.models.weights import redraw  # noqa: E402


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def published(model: nn.Module, folder: Path) -> Path:
    """Redraw and save as transformers publishes weights; gives the folder."""
    redraw(model.eval(), seed=1).save_pretrained(folder)  # type: ignore[operator]
    return folder


def assert_equal_where_real(ours: Tensor, theirs: Tensor, mask: Tensor) -> None:
    """Logits grow with √hidden where the head is the embedding, hence the scale."""
    real = mask.bool()
    scale = theirs[real].abs().max()
    torch.testing.assert_close(ours[real] / scale, theirs[real] / scale, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def llama_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[llama.Llama, nn.Module]:
    c = llama.PRESETS["tiny"]
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocabulary,
            hidden_size=c.hidden,
            intermediate_size=c.intermediate,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            rms_norm_eps=c.eps,
        )
    )
    folder = tmp_path_factory.mktemp("llama")
    return llama.Llama.from_safetensors(published(theirs, folder), c).eval(), theirs


@pytest.fixture(scope="module")
def gpt2_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[gpt2.GPT2, nn.Module]:
    c = gpt2.PRESETS["tiny"]
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=c.vocabulary, n_positions=c.positions, n_embd=c.hidden, n_layer=c.layers, n_head=c.heads
        )
    )
    folder = tmp_path_factory.mktemp("gpt2")
    return gpt2.GPT2.from_safetensors(published(theirs, folder), c).eval(), theirs


@pytest.fixture(params=["llama_pair", "gpt2_pair"])
def decoder(request: pytest.FixtureRequest) -> tuple[Any, nn.Module]:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_decoder_gives_the_same_logits(decoder: tuple[Any, nn.Module], padding: Any) -> None:
    ours, theirs = decoder
    tokens, mask = sample_tokens(512, 3, 11), padded_mask(3, 11, padding)
    expected = theirs(tokens, attention_mask=mask, position_ids=torch.arange(11)[None]).logits
    assert_equal_where_real(ours(tokens, mask), expected, mask)
    if padding == "none":
        assert_equal_where_real(ours(tokens), expected, mask)


def test_static_cache_continues_as_one_pass_would(decoder: tuple[Any, nn.Module]) -> None:
    ours, _ = decoder
    tokens = sample_tokens(512, 2, 9)
    whole = ours(tokens)
    cache = ours.new_cache(batch=2, capacity=16)
    keys = cache.keys[0].data_ptr()
    parts = [ours(part, cache=cache) for part in (tokens[:, :6], tokens[:, 6:7], tokens[:, 7:8], tokens[:, 8:])]
    assert_equal_where_real(torch.cat(parts, 1), whole, torch.ones(2, 9))
    assert cache.length.item() == 9 and cache.keys[0].data_ptr() == keys


def test_padded_cache_follows_the_given_positions(decoder: tuple[Any, nn.Module]) -> None:
    ours, _ = decoder
    tokens, mask = sample_tokens(512, 2, 8), padded_mask(2, 8, "left", seed=3)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = ours.new_cache(batch=2, capacity=8)
    ours(tokens[:, :7], mask, cache, positions[:, :7])
    last = ours(tokens[:, 7:], mask, cache, positions[:, 7:])
    for row in range(2):
        alone = ours(tokens[row : row + 1, mask[row].bool()])[:, -1:]
        assert_equal_where_real(last[row : row + 1], alone, torch.ones(1, 1))


def test_long_waves_are_stretched_as_published() -> None:
    config = llama.LlamaConfig(rope_theta=500000.0, rope_factor=32.0, head=64)
    theirs = transformers.LlamaConfig(
        head_dim=64,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    rope = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    positions = torch.tensor([[0, 1, 50, 700]])
    for ours, expected in zip(
        llama.rotary_angles(positions, config, torch.float32), rope(torch.zeros(1), positions), strict=True
    ):
        torch.testing.assert_close(ours[:, 0], expected)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_bert_gives_the_same_states(padding: Any, tmp_path: Path) -> None:
    c = bert.PRESETS["tiny"]
    theirs = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=c.vocabulary,
            hidden_size=c.hidden,
            intermediate_size=c.intermediate,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
        )
    )
    ours = bert.Bert.from_safetensors(published(theirs, tmp_path), c)
    tokens, mask = sample_tokens(512, 3, 10), padded_mask(3, 10, padding)
    segments = (torch.arange(10) > 4).long().expand(3, -1)
    for segment in (None, segments):
        expected = theirs(tokens, attention_mask=mask, token_type_ids=segment).last_hidden_state
        assert_equal_where_real(ours(tokens, mask, segment), expected, mask)
    assert bert.encode(ours, tokens, mask).norm(dim=-1).sub(1).abs().max() < 1e-5


@pytest.mark.parametrize("preset", ["tiny", "tiny-gated"])
def test_t5_gives_the_same_logits(preset: str, tmp_path: Path) -> None:
    c = t5.PRESETS[preset]
    theirs = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=c.vocabulary,
            d_model=c.hidden,
            d_kv=c.head,
            d_ff=c.intermediate,
            num_layers=c.layers,
            num_heads=c.heads,
            feed_forward_proj="gated-gelu" if c.gated else "relu",
            tie_word_embeddings=not c.gated,
            decoder_start_token_id=0,
        )
    )
    ours = t5.T5.from_safetensors(published(theirs, tmp_path), c)
    tokens, mask, answer = sample_tokens(512, 3, 40), padded_mask(3, 40, "right"), sample_tokens(512, 3, 7, seed=1)
    expected = theirs(tokens, attention_mask=mask, decoder_input_ids=answer).logits
    assert_equal_where_real(ours(tokens, answer, mask), expected, torch.ones(3, 7))

    crossing, cache = ours.crossing(ours.encode(tokens, mask)), ours.new_cache(3, 12)
    parts = [ours.decode(part, crossing, mask, cache) for part in (answer[:, :5], answer[:, 5:6], answer[:, 6:])]
    assert_equal_where_real(torch.cat(parts, 1), expected, torch.ones(3, 7))


def test_vit_gives_the_same_states(tmp_path: Path) -> None:
    c = vit.PRESETS["tiny"]
    theirs = transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=c.hidden,
            intermediate_size=c.intermediate,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            image_size=c.image,
            patch_size=c.patch,
        )
    )
    ours = vit.ViT.from_safetensors(published(theirs, tmp_path), c)
    images = sample_images(2, c.channels, c.image)
    torch.testing.assert_close(ours(images), theirs(images).last_hidden_state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", [llama, gpt2, bert, t5, vit])
def test_presets_build(module: Any) -> None:
    model = next(m for n, m in vars(module).items() if n in ("Llama", "GPT2", "Bert", "T5", "ViT"))
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in model(config).parameters()) for name, config in module.PRESETS.items()}
    published_sizes = {"1b": 1.24e9, "8b": 8.03e9, "minilm-l6": 22.6e6, "base": 87e6}
    if module is not t5:
        published_sizes["small"] = 124e6
    for name, size in sizes.items():
        if name in published_sizes and not (module is bert and name == "base"):
            assert abs(size / published_sizes[name] - 1) < 0.02, (name, size)


def test_decode_compiles_once_without_breaks(llama_pair: tuple[llama.Llama, nn.Module]) -> None:
    ours, _ = llama_pair
    tokens = sample_tokens(512, 1, 5)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager", fullgraph=True, dynamic=False)
    cache, expected = ours.new_cache(1, 8), ours(tokens)
    steps = [compiled(tokens[:, i : i + 1], cache=cache) for i in range(2)]
    with torch.compiler.set_stance("fail_on_recompile"):
        steps += [compiled(tokens[:, i : i + 1], cache=cache) for i in range(2, 5)]
    assert_equal_where_real(torch.cat(steps, 1), expected, torch.ones(1, 5))
