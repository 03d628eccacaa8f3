"""Continuous batching of transformers: requests packed one after another, keys and values in pools of rows."""

import copy
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import fusec
from fusec import continuous_batching
from fusec.analysis.memory import moved_bytes
from fusec.config import Config
from fusec.dynamo import backend_for, compiled_graphs
from fusec.errors import OptionError
from fusec.ir.graph import storage
from fusec.models.weights import redraw
from fusec.reference.contract import compare_outputs
from tests.machines import profile

transformers = pytest.importorskip("transformers")
paged = pytest.importorskip("transformers.generation.continuous_batching.cache")
LAYERS, HEADS, WIDTH, ROWS = 2, 2, 8, 600


def llama(dtype: torch.dtype) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=HEADS, vocab_size=128, max_position_embeddings=512, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = redraw(transformers.LlamaForCausalLM(config).eval()).to(dtype)
    model.set_attn_implementation("sdpa")
    return model


class Pools(paged.PagedAttentionCache):  # type: ignore[misc, name-defined]
    """A cache of one pool each for keys and values of a layer, updated in the graph as transformers does outside."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.pools = [[torch.zeros(ROWS, HEADS, WIDTH, dtype=dtype) for _ in range(2)] for _ in range(LAYERS)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        for pool, new in zip(self.pools[layer_idx], (key_states, value_states), strict=True):
            pool.index_copy_(0, kwargs["write_index"], new.squeeze(0).transpose(0, 1))
        found = (pool.index_select(0, kwargs["read_index"]) for pool in self.pools[layer_idx])
        return tuple(rows.transpose(0, 1).unsqueeze(0) for rows in found)


class Requests:
    """Sequences that grow, with rows in random places of the pools."""

    def __init__(self, count: int) -> None:
        self.random = random.Random(count)
        self.rows: list[list[int]] = [[] for _ in range(count)]
        self.free = self.random.sample(range(ROWS), ROWS)

    def batch(self, lengths: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
        """The inputs for new tokens of each sequence; the mask is of the lowest number, as in transformers."""
        positions, write, read, seen = list[int](), list[int](), list[int](), list[tuple[int, int]]()
        for rows, length in zip(self.rows, lengths, strict=True):
            before, first = len(rows), len(read)
            rows += [self.free.pop() for _ in range(length)]
            positions += range(before, len(rows))
            write += rows[before:]
            read += rows
            seen += [(first, first + place + 1) for place in range(before, len(rows))]
        mask = torch.full((1, 1, len(write), len(read)), torch.finfo(dtype).min, dtype=dtype)
        for query, (start, stop) in enumerate(seen):
            mask[..., query, start:stop] = 0
        return {
            "input_ids": torch.tensor([[self.random.randint(1, 127) for _ in write]]), "attention_mask": mask,
            "position_ids": torch.tensor([positions]), "read_index": torch.tensor(read),
            "write_index": torch.tensor(write),
        }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)], ids=str)
def test_pools_are_read_and_written_in_place(dtype: torch.dtype) -> None:
    """Prompts and single tokens: one compilation for the first lengths, one for all others."""
    model = llama(dtype)
    real = copy.deepcopy(model).double()
    torch._dynamo.reset()
    fast = torch.compile(model, backend=backend_for(Config(strict=True)))
    requests = Requests(4)
    runs = [(run, Pools(t), t) for run, t in ((model, dtype), (fast, dtype), (real, torch.float64))]
    for lengths in ([5, 37, 12, 70], [1, 1, 1, 1], [1, 40, 1, 1], [1, 1, 1, 1]):
        given = requests.batch(lengths, dtype)
        with torch.no_grad():
            want, got, exact = (
                run(**given | {"attention_mask": given["attention_mask"].to(t)}, cache=pools, use_cache=False).logits
                for run, pools, t in runs
            )
        assert compare_outputs(want, got, exact).passed, lengths
    for i in range(LAYERS):
        for kind in range(2):
            assert compare_outputs(*(pools.pools[i][kind] for _, pools, _ in runs)).passed
    results = compiled_graphs()
    assert len(results) == 2
    for result in results:
        assert not {"opaque", "write"} & {step.kind for step in result.program.steps}
        labels = [n.attributes.get("label", "") for n in result.graph.nodes]
        assert sum("attention" in label for label in labels) == LAYERS and "take" not in labels
        assert sum(bool(n.writes) for n in result.graph.nodes) <= 2 * LAYERS


class Contiguous(Pools):
    """The same keys and values, put together before the graph."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        return tuple(self.pools[layer_idx])


@pytest.mark.thorough
def test_bytes_of_paged_decoding_are_those_of_contiguous_keys_and_the_index() -> None:
    dtype, requests = torch.float32, Requests(4)
    model, pools, plain = llama(dtype), Pools(dtype), Contiguous(dtype)
    found = list[list[int]]()
    with torch.no_grad():
        model(**requests.batch([30, 20, 70, 9], dtype), cache=pools, use_cache=False)
        given = requests.batch([1, 1, 1, 1], dtype)
        rows = [[pool[given["read_index"]] for pool in layer] for layer in pools.pools]
        plain.pools = [[x.transpose(0, 1)[None].contiguous() for x in layer] for layer in rows]
        for cache in (pools, plain):
            torch._dynamo.reset()
            torch.compile(model, backend=backend_for(Config(strict=True)))(**given, cache=cache, use_cache=False)
            regions = [n for n in compiled_graphs()[-1].graph.nodes if "attention" in n.attributes.get("label", "")]
            found.append([moved_bytes(n) for n in regions])
            assert len(regions) == LAYERS
    for one, other in zip(*found, strict=True):
        assert one == other + given["read_index"].nbytes


PROMPTS = [torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 37, 12, 3, 70)]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def generated(model: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    """New tokens of each request, by transformers' own manager, which takes at most 96 tokens at a time."""
    batching = transformers.ContinuousBatchingConfig(
        page_size=16, num_blocks=64, max_batch_tokens=96, use_cuda_graph=False, use_async_batching=False, **options
    )
    greedy = transformers.GenerationConfig(**GREEDY)
    found = model.generate_batch(
        prompts, generation_config=greedy, continuous_batching_config=batching, warmup=False, progress_bar=False
    )
    return [found[name].generated_tokens for name in sorted(found)]


def assert_same_or_ties(model: Any, got: list[list[int]], want: list[list[int]]) -> None:
    """In float32 the same tokens; in bfloat16, where two logits are nearer than eager's error, another is as right."""
    real = copy.deepcopy(model).double()
    for prompt, ours, eagers in zip(PROMPTS, got, want, strict=True):
        place = next((i for i, (a, b) in enumerate(zip(ours, eagers, strict=True)) if a != b), None)
        if place is not None:
            ids = torch.tensor([prompt + eagers[:place]])
            with torch.no_grad():
                rounded, exact = (m(ids, use_cache=False).logits[0, -1].double() for m in (model, real))
            behind = exact.max() - exact[ours[place]]
            assert model.dtype != torch.float32 and behind <= 2 * (rounded - exact).abs().max(), "it is no tie"


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_requests_of_mixed_lengths(dtype: torch.dtype) -> None:
    """``generate_batch`` makes eager's tokens; transformers itself updates its cache outside of the graphs."""
    model = llama(dtype)
    want = generated(model)
    torch._dynamo.reset()
    compiling = transformers.CompileConfig(backend=backend_for(Config(strict=True)), mode=None)
    assert_same_or_ties(model, generated(model, varlen_compile_config=compiling), want)
    steps = Counter(step.kind for result in compiled_graphs() for step in result.program.steps)
    assert steps["kernel"] > 10 and not steps["opaque"]


@pytest.fixture
def paged_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuous batching attends by ``fusec.paged_attention`` where a model's own attention is eager."""
    registered = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(registered, "paged|eager", registered["paged|eager"])  # what is registered next is undone
    transformers.AttentionInterface.register("paged|eager", fusec.paged_attention)


@pytest.mark.slow
@pytest.mark.usefixtures("paged_attention")
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)], ids=str)
def test_a_step_is_one_graph(dtype: torch.dtype) -> None:
    """Few and many tokens, with and without earlier keys; nothing else is compiled again as lengths change."""
    model = llama(dtype)
    want = generated(model)
    model.set_attn_implementation("eager")
    assert_same_or_ties(model, generated(model), want)
    torch._dynamo.reset()
    padded = {"q_padding_interval_size": 8, "kv_padding_interval_size": 32}
    backend = backend_for(profile(f32=120.0, bf16=120.0))  # a kernel writes keys only where it also computes them
    compiling = transformers.CompileConfig(backend=backend, mode=None, fullgraph=True)
    assert_same_or_ties(model, generated(model, varlen_compile_config=compiling, **padded), want)
    graphs = compiled_graphs()
    assert 2 <= len(graphs) <= 5
    for result in graphs:
        assert not {"opaque", "interpreted"} & {step.kind for step in result.program.steps}
        labels = [n.attributes.get("label", "") for n in result.graph.nodes]
        assert sum("attention" in label for label in labels) == LAYERS
        (pool,) = (i for i in result.graph.written_inputs if result.graph.inputs[i].tensor.rank == 1)
        assert all(n.attributes.get("label") for n in result.graph.nodes if n.writes and storage(n.written[0]) is
                   result.graph.inputs[pool]), "only kernels write to the cache"  # fmt: skip


@pytest.mark.usefixtures("paged_attention")
def test_rows_of_another_request_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(torch.float32)
    want = generated(model)
    model.set_attn_implementation("eager")
    own_keys = continuous_batching._own_keys

    def neighbours(read: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return own_keys(read.roll(1), *rest)

    monkeypatch.setattr(continuous_batching, "_own_keys", neighbours)
    assert generated(model) != want


@pytest.mark.usefixtures("paged_attention")
def test_attention_that_is_not_plain_is_refused() -> None:
    model = llama(torch.float32)
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.zeros(8)
    model.set_attn_implementation("paged|eager")
    with pytest.raises(OptionError, match="plain attention"):
        model(torch.tensor([[1, 2]]))
