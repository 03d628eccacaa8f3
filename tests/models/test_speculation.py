"""Speculation of transformers with a compiled forward: eager's tokens, and the same graphs for drafts of any length.

Drafts are verified in one pass of 2 to 21 tokens; trees of them have a small mask of their own."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.config import Config
from fusec.dynamo import backend_for, compiled_graphs
from fusec.models.weights import redraw
from fusec.reference.contract import compare_outputs

transformers = pytest.importorskip("transformers")
NEW = 16
PROMPT = torch.tensor([[5, 9, 7, 5, 9, 7, 11, 5, 9]])
"""It repeats itself, so that looking it up drafts something."""
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def llama(noise: float = 0.0) -> Any:
    """A small Llama; with noise it drafts some tokens that the one without would not choose."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32, max_position_embeddings=512, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = redraw(transformers.LlamaForCausalLM(config).eval())
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model


def generated(model: Any, **options: Any) -> list[int]:
    """The new tokens."""
    mask = torch.ones_like(PROMPT)
    found = model.generate(PROMPT, attention_mask=mask, **OPTIONS, **options)[0, PROMPT.shape[1] :]
    return [int(token) for token in found]


@contextmanager
def with_forward(model: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[list[int]]:
    """Replace a model's forward; yield how many tokens each call has."""
    forward, lengths = change(model.forward), list[int]()

    @functools.wraps(model.forward)  # generate() looks at its parameters
    def counted(*args: Any, **kwargs: Any) -> Any:
        lengths.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    model.forward = counted
    try:
        yield lengths
    finally:
        del model.forward


def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(forward, backend=backend_for(Config(strict=True)))


def drafting(kind: str, count: int) -> dict[str, Any]:
    """The options that draft as many tokens."""
    if kind == "look-up":
        return {"prompt_lookup_num_tokens": count}
    assistant = llama(noise=0.15)
    assistant.generation_config.num_assistant_tokens = count
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0
    return {"assistant_model": assistant}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["assistant", "look-up"])
def test_drafts_of_every_length_run_in_the_same_graphs(kind: str) -> None:
    """Those for prompts, for one token and for several are made once, with drafts of one and two tokens."""
    model = llama()
    want = generated(model)
    with with_forward(model, compiled) as lengths:
        for count in (1, 2, 5, 8, 20):
            assert generated(model, **drafting(kind, count)) == want
            if count == 2:
                graphs = len(compiled_graphs())
    assert len(lengths) < 5 * NEW, "some drafts are accepted"
    assert len(set(lengths)) >= 6 and len(compiled_graphs()) == graphs <= 8
    assert not {step.kind for result in compiled_graphs() for step in result.program.steps} & {"opaque", "interpreted"}


@pytest.mark.slow
@pytest.mark.thorough
def test_layers_that_predict_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """MTP; its layers have random weights here, as there is no checkpoint that they could be read from."""
    mtp = pytest.importorskip("transformers.modeling_layers").MtpModel
    config = transformers.Glm4MoeConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=2, num_mtp_layers=1, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = redraw(transformers.Glm4MoeForCausalLM(config).eval())

    def drawn(main: Any, **_: Any) -> Any:
        made = mtp(main, main.config.num_mtp_layers).eval()
        redraw(made.layers)
        return made

    monkeypatch.setattr(mtp, "from_pretrained", drawn)
    want = generated(model)
    with with_forward(model, compiled) as lengths:
        assert generated(model, use_mtp=True) == want
        graphs = len(compiled_graphs())
        assert generated(model, use_mtp=True) == want
    assert set(lengths) == {PROMPT.shape[1], 2} and len(compiled_graphs()) == graphs <= 6


def accepting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The planted fault: whatever is drafted seems to be the model's own choice."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        output, tokens = forward(*args, **kwargs), kwargs["input_ids"]
        if 1 < tokens.shape[1] < PROMPT.shape[1]:
            chosen = F.one_hot(tokens[:, 1:], output.logits.shape[-1])
            output.logits[:, -tokens.shape[1] : -1] = 100.0 * chosen
        return output

    return wrong


@pytest.mark.parametrize("kind", ["assistant", "look-up"])
def test_a_draft_that_is_accepted_wrongly_is_found(kind: str) -> None:
    model = llama()
    want = generated(model)
    with with_forward(model, accepting):
        assert generated(model, **drafting(kind, 5)) != want


def tree_attention(q: Tensor, k: Tensor, v: Tensor, tree: Tensor) -> Tensor:
    """Drafts see what was accepted, and their ancestors."""
    past = torch.ones(tree.shape[0], k.shape[2] - tree.shape[0], dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.cat([past, tree], 1), enable_gqa=True)


def tree_of_cache(q: Tensor, k: Tensor, v: Tensor, tree: Tensor) -> Tensor:
    """The same in a cache with room: a dense mask over the drafts, a comparison over the rest."""
    drafts, keys = tree.shape[0], k.shape[2]
    accepted, places = keys - 40, torch.arange(keys)
    own = tree[:, (places - accepted).clamp(0, drafts - 1)] & (places >= accepted) & (places < accepted + drafts)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(places < accepted) | own, enable_gqa=True)


def ancestors(drafts: int) -> Tensor:
    """A random tree: each draft sees itself, and what its parent sees."""
    generator = torch.Generator().manual_seed(drafts)
    seen = torch.eye(drafts, dtype=torch.bool)
    for draft in range(1, drafts):
        seen[draft] |= seen[int(torch.randint(0, draft, (), generator=generator))]
    return seen


def sample(drafts: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(drafts)
    q, k, v = torch.randn(1, 8, drafts, 32), torch.randn(1, 2, keys, 32), torch.randn(1, 2, keys, 32)
    return q.to(dtype), k.to(dtype), v.to(dtype), ancestors(drafts)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [tree_attention, tree_of_cache], ids=lambda f: f.__name__)
def test_trees_of_drafts(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """One graph for all numbers of drafts, with one kernel; a mask of all keys is put together before, and is bool."""
    torch._dynamo.reset()
    run = torch.compile(function, backend=backend_for(Config(strict=True)))
    for drafts in (5, 2, 9, 16, 17, 21):  # the first has no size in common with another dim
        q, k, v, tree = sample(drafts, 200, dtype)
        for x, dim in ((q, 2), (tree, 0), (tree, 1)):
            torch._dynamo.maybe_mark_dynamic(x, dim)
        with torch.no_grad():
            got, want, exact = (
                run(q, k, v, tree),
                function(q, k, v, tree),
                function(*(x.double() for x in (q, k, v)), tree),
            )
        assert compare_outputs(want, got, exact).passed
        other = tree.clone()
        other[-1, 0] ^= True  # the root, which every draft sees
        assert not compare_outputs(want, run(q, k, v, other), exact).passed
    (result,) = compiled_graphs()
    kinds = ["copy", "kernel"] if function is tree_attention else ["kernel"]
    assert [step.kind for step in result.program.steps] == kinds
    assert "attention" in result.graph.nodes[-1].attributes["label"]
