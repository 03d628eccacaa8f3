"""llama.cpp as a peer: a Llama of transformers, written as GGUF and run by llama.cpp's bindings for Python.

Needs ``llama-cpp-python``, built for the machine, and ``gguf``; neither is installed with fusec.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.workloads import CAPACITY, Call

FORMATS = ("BF16", "Q8_0", "Q4_0", "Q4_K_M")
"""Types of the file: of Q4_0 and Q4_K_M the head has six bits."""
_CONTEXTS: list[Any] = []
"""Models and contexts that are in use: the bindings free them once nothing in Python refers to them."""


def is_installed() -> bool:
    """Return whether llama.cpp and the writer of its files can be imported."""
    return find_spec("llama_cpp") is not None and find_spec("gguf") is not None


def write_model(model: Any, file: Path) -> None:
    """Write a Llama of transformers as GGUF, in bfloat16."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    kinds = gguf.GGMLQuantizationType
    for name, weight in _tensors(model):
        kind = kinds.F32 if weight.ndim == 1 else kinds.BF16
        data = gguf.quants.quantize(weight.detach().float().numpy(), kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized(file: Path, format: str) -> Path:
    """Return the file of a model in another type, which llama.cpp writes beside it."""
    import llama_cpp

    if format == "BF16":
        return file
    found = file.with_name(f"{file.stem}-{format}.gguf")
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{format}")
    with _quiet():
        failed = llama_cpp.llama_model_quantize(str(file).encode(), str(found).encode(), parameters)
    if failed:
        raise RuntimeError(f"llama.cpp did not write {found.name}")
    return found


class Runner:
    """A model of llama.cpp, with a cache of its own."""

    def __init__(self, file: Path, sequences: int = 1, capacity: int = CAPACITY) -> None:
        import llama_cpp

        self.library = llama_cpp
        with _quiet():
            options = llama_cpp.llama_model_default_params()
            options.n_gpu_layers = 0
            self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
            wanted = llama_cpp.llama_context_default_params()
            wanted.n_ctx, wanted.n_seq_max = capacity * sequences, sequences
            wanted.n_batch = wanted.n_ubatch = max(512, capacity * sequences)
            wanted.n_threads = wanted.n_threads_batch = torch.get_num_threads()
            self.context = llama_cpp.llama_init_from_model(self.model, wanted)
        if not self.context:
            raise RuntimeError(f"llama.cpp did not load {file.name}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        _CONTEXTS.append(self)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return int(self.library.llama_model_size(self.model))

    def run(self, tokens: Tensor, position: int) -> None:
        """Append [sequences, length] tokens at a position of the cache; the last of each has logits.

        Raises:
            RuntimeError: if llama.cpp refuses them.
        """
        length = tokens.shape[1]
        batch = self.library.llama_batch_init(tokens.numel(), 0, 1)
        batch.n_tokens = tokens.numel()
        for i, token in enumerate(tokens.flatten().tolist()):
            batch.token[i], batch.pos[i] = token, position + i % length
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, i // length
            batch.logits[i] = i % length == length - 1
        failed = self.library.llama_decode(self.context, batch)
        self.library.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama.cpp did not decode: {failed}")

    def logits(self, token: int) -> Tensor:
        """Return the logits of a token of the last run, by its number."""
        found = self.library.llama_get_logits_ith(self.context, token)
        return torch.tensor(found[: self.vocabulary])

    def forget(self, position: int) -> None:
        """Drop what the cache has from a position on."""
        self.library.llama_memory_seq_rm(self.memory, -1, position, -1)


def call(file: Path, tokens: Tensor, valid: int) -> tuple[Call, int]:
    """Return a call that runs tokens beside so many in the cache, again and again, and the bytes of the weights."""
    runner = Runner(file, tokens.shape[0])
    if valid:
        runner.run(tokens[:, :1].expand(-1, valid), 0)

    def again() -> None:
        runner.run(tokens, valid)
        runner.forget(valid)

    return again, runner.weight_bytes


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of GGUF and the tensors of a Llama."""
    yield "token_embd", model.model.embed_tokens.weight
    for i, layer in enumerate(model.model.layers):
        attention, mlp, config = layer.self_attn, layer.mlp, model.config
        yield f"blk.{i}.attn_norm", layer.input_layernorm.weight
        yield f"blk.{i}.attn_q", _interleaved(attention.q_proj, config.num_attention_heads)
        yield f"blk.{i}.attn_k", _interleaved(attention.k_proj, config.num_key_value_heads)
        yield f"blk.{i}.attn_v", attention.v_proj.weight
        yield f"blk.{i}.attn_output", attention.o_proj.weight
        yield f"blk.{i}.ffn_norm", layer.post_attention_layernorm.weight
        yield f"blk.{i}.ffn_gate", mlp.gate_proj.weight
        yield f"blk.{i}.ffn_up", mlp.up_proj.weight
        yield f"blk.{i}.ffn_down", mlp.down_proj.weight
    yield "output_norm", model.model.norm.weight
    yield "output", model.lm_head.weight


def _interleaved(linear: nn.Linear, heads: int) -> Tensor:
    """Return a projection whose rotary embedding turns neighbours, not the halves of a head."""
    columns = linear.weight.shape[1]
    return linear.weight.reshape(heads, 2, -1, columns).transpose(1, 2).reshape(-1, columns)


@contextmanager
def _quiet() -> Iterator[None]:
    import llama_cpp

    ignore = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(ignore, None)
    _CONTEXTS.append(ignore)
    yield
