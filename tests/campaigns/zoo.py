"""Architectures of transformers, cut down by what the fields of their configurations are called: a row each."""

from collections.abc import Callable, Collection
from typing import Any

from bench.families import FAMILIES, VOCABULARY, WINDOW, Family, Sizes

POSITIONS = 128
"""Longest input, where positions are learned."""
_NAMES: tuple[tuple[Callable[[Sizes], Any], str], ...] = (
    (lambda s: s.hidden, "hidden_size d_model n_embd dim emb_dim embedding_size word_embed_proj_dim output_hidden_size "
                         "projection_dim embed_dim"),
    (lambda s: s.intermediate, "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size "
                               "hidden_dim"),
    (lambda s: s.layers, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers "
                         "num_encoder_layers num_decoder_layers"),
    (lambda s: s.heads, "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
                        "decoder_attention_heads attention_heads"),
    (lambda s: s.heads // 2, "num_key_value_heads num_kv_heads"),
    (lambda s: s.head, "head_dim d_kv v_head_dim qk_nope_head_dim query_pre_attn_scalar"),
    (lambda s: s.head // 2, "rotary_dim qk_rope_head_dim"),
    (lambda s: s.head**-0.5, "attention_multiplier"),
    (lambda s: s.hidden // 2, "q_lora_rank moe_intermediate_size"),
    (lambda s: s.hidden // 4, "kv_lora_rank"),
    (lambda s: VOCABULARY, "vocab_size"),
    (lambda s: POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions "
                          "max_source_positions"),
    (lambda s: WINDOW, "sliding_window window_size local_attention"),
    (lambda s: 32, "image_size num_mel_bins"),
    (lambda s: 8, "patch_size n_routed_experts num_local_experts num_experts"),
    (lambda s: 2, "num_experts_per_tok n_group"),
    (lambda s: 1, "topk_group first_k_dense_replace decoder_start_token_id"),
    (lambda s: 0, "pad_token_id"),
    (lambda s: 1, "bos_token_id"),
    (lambda s: 2, "eos_token_id"),
)  # fmt: skip
FIELDS = {name: value for value, names in _NAMES for name in names.split()}
"""What each field is for given sizes, where a configuration has it."""


def small(config: str, changes: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """The options of a configuration in these sizes; what the row changes goes last."""
    import transformers

    return _small_fields(getattr(transformers, config)(), sizes, changes) | changes


def _small_fields(config: Any, sizes: Sizes, changes: Collection[str] = ()) -> dict[str, Any]:
    """Those of its fields that have a common name, and the same for configurations inside."""
    known = {*config.to_dict(), *(name for name, real in config.attribute_map.items() if real not in changes)}
    inside = {name: getattr(config, name) for name in config.sub_configs if getattr(config, name, None) is not None}
    fields = {name: value(sizes) for name, value in FIELDS.items() if name in known and name not in inside}
    return fields | {name: _small_fields(part, sizes) for name, part in inside.items()}


def _row(name: str, prefix: str, head: str = "Model", inputs: str = "tokens", **changes: Any) -> Family:
    config = changes.pop("config", f"{prefix}Config")
    routed, mixing = changes.pop("routed", False), changes.pop("mixing", "")
    return Family(name, f"{prefix}{head}", config, lambda sizes: small(config, changes, sizes), inputs, routed, mixing)


def _decoder(name: str, prefix: str, **changes: Any) -> Family:
    return _row(name, prefix, "ForCausalLM", **changes)


def _encoder_decoder(name: str, prefix: str, **changes: Any) -> Family:
    return _row(name, prefix, "ForConditionalGeneration", "tokens to tokens", **changes)


def _vision(name: str, prefix: str, **changes: Any) -> Family:
    return _row(name, prefix, inputs="images", **changes)


def _speech(name: str, prefix: str, **changes: Any) -> Family:
    return _row(name, prefix, inputs="speech", **_FILTERS, **changes)


_FILTERS: dict[str, Any] = {
    "conv_dim": (64, 64, 64),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_WINDOWED: dict[str, Any] = {"window_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "patch_size": 2}
_STAGES: dict[str, Any] = {"hidden_sizes": [32, 64], "depths": [2, 2], "num_stages": 2, "patch_size": 4}

ARCHITECTURES: dict[str, Family] = FAMILIES | {
    row.name: row
    for row in (
        _decoder("gemma", "Gemma"),
        _decoder("gemma2", "Gemma2"),
        _decoder("phi", "Phi"),
        _decoder("gptj", "GPTJ"),
        _decoder("gpt_neox", "GPTNeoX"),
        _decoder("gpt_neo", "GPTNeo", attention_types=[[["global", "local"], 1]]),
        _row("bloom", "Bloom", "ForCausalLM"),
        _row("mpt", "Mpt", "ForCausalLM"),
        _decoder("falcon", "Falcon", new_decoder_architecture=True),
        _decoder("cohere", "Cohere"),
        _decoder("stablelm", "StableLm"),
        _decoder("olmo", "Olmo"),
        _decoder("olmo2", "Olmo2"),
        _decoder("granite", "Granite"),
        _decoder("starcoder2", "Starcoder2"),
        _decoder("persimmon", "Persimmon"),
        _decoder("nemotron", "Nemotron"),
        _row("codegen", "CodeGen", "ForCausalLM"),
        _decoder("biogpt", "BioGpt"),
        _decoder("xglm", "XGLM"),
        _decoder("glm", "Glm"),
        _decoder("glm4", "Glm4"),
        _decoder("helium", "Helium"),
        _decoder("smollm3", "SmolLM3"),
        _decoder("gpt_bigcode", "GPTBigCode"),
        _row("albert", "Albert"),
        _row("electra", "Electra"),
        _row("distilbert", "DistilBert"),
        _row("mpnet", "MPNet"),
        _row("deberta_v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16),
        _row("modernbert", "ModernBert"),
        _row("xlm_roberta", "XLMRoberta"),
        _row("camembert", "Camembert"),
        _row("ernie", "Ernie"),
        _row("roformer", "RoFormer"),
        _row("fnet", "FNet", mixing="a Fourier transform"),
        _encoder_decoder("mt5", "MT5"),
        _encoder_decoder("bart", "Bart"),
        _encoder_decoder("mbart", "MBart"),
        _encoder_decoder("pegasus", "Pegasus"),
        _encoder_decoder("m2m_100", "M2M100"),
        _row("marian", "Marian", "MTModel", "tokens to tokens"),
        _encoder_decoder("blenderbot", "Blenderbot"),
        _row("whisper", "Whisper", "ForConditionalGeneration", "spectrogram to tokens", max_source_positions=32),
        _speech("wav2vec2", "Wav2Vec2"),
        _speech("hubert", "Hubert"),
        _vision("deit", "DeiT"),
        _vision("beit", "Beit", use_relative_position_bias=True),
        _vision("dinov2", "Dinov2"),
        _vision("swin", "Swin", **_WINDOWED),
        _vision("convnext", "ConvNext", **_STAGES),
        _row("clip", "CLIP", inputs="tokens and images"),
        _row("siglip", "Siglip", inputs="tokens and images"),
        _decoder("gpt_oss", "GptOss", routed=True),
        _decoder("qwen3_moe", "Qwen3Moe", routed=True),
    )
}
"""The families and more, by name."""
