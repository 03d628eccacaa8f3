"""The regions that DeepSpeed-Inference and xFormers write by hand, each as one kernel of a model that has it."""

from collections import Counter
from functools import cache

import pytest

pytest.importorskip("transformers")

from bench.families import VOCABULARY, Sizes
from fusec.analysis.memory import flops
from fusec.ir.graph import Graph, Node
from fusec.ir.ops import Trait
from tests.golden_models import optimized
from tests.machines import cpu

FEW, MANY = (1, 8), (3, 40)
"""Tokens that products take with all that stands before and behind them, and that they take in blocks."""

REGIONS = [
    # name, model, shape, declared fusions, products, operations that have to be inside
    ("norm + QKV, separate weights, rotary embedding", "llama", FEW, "add_rms_norm rotary_embedding", 3, ""),
    ("norm of q or k + rotary embedding", "qwen3", FEW, "rms_norm rotary_embedding", 0, "rsqrt concat"),
    ("norm + QKV, separate weights with biases", "bert", FEW, "add_layer_norm", 3, "add"),
    ("norm + QKV, one packed weight with a bias", "gpt2", FEW, "add_layer_norm", 1, "add"),
    ("transpose + attention, q and k turned", "llama", MANY, "attention", 2, "exp"),
    ("transpose + attention, straight from the products", "bert", MANY, "attention", 2, "exp reshape"),
    ("residual + norm + gate·up + SwiGLU", "llama", FEW, "add_rms_norm gated_projection", 2, "sigmoid"),
    ("residual + norm + gate·up + GEGLU", "gemma3", FEW, "", 2, "tanh rsqrt"),
    ("bias + residual + norm + up + activation", "bert", FEW, "add_layer_norm linear_gelu", 1, "erf"),
    ("norm + up + activation, before the residual", "gpt2", FEW, "layer_norm", 1, "tanh"),
    ("product + bias + residual, in blocks of rows", "bert", MANY, "", 1, "add"),
    ("product + bias + activation, in blocks of rows", "bert", MANY, "linear_gelu", 1, "erf"),
    ("gate·up + SwiGLU, in blocks of rows", "llama", MANY, "gated_projection", 2, "sigmoid"),
    ("bias + residual + norm beside the vendor's products", "bert", MANY, "add_layer_norm", 0, "rsqrt"),
    ("bias + activation beside the vendor's products", "bert", MANY, "linear_gelu", 0, "add erf"),
    ("SwiGLU beside the vendor's products", "llama", MANY, "gated_projection", 0, "sigmoid"),
    ("layer norm", "bert", MANY, "layer_norm", 0, "rsqrt"),
]


@cache
def kernels(family: str, shape: tuple[int, int], library: bool) -> list[Node]:
    machine = cpu() if library else cpu(f32=100.0)
    graphs = optimized(family, *shape, machine=machine)
    return [node for graph in graphs for node in graph if node.attributes.get("kind") == "kernel"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family", "shape", "fusions", "products", "operations"), REGIONS, ids=[r[0] for r in REGIONS]
)
def test_region_is_one_kernel(
    name: str, family: str, shape: tuple[int, int], fusions: str, products: int, operations: str
) -> None:
    all_kernels = kernels(family, shape, library="vendor" in name)
    found = [
        node
        for node in all_kernels
        if set(fusions.split()) <= set(node.attributes["fusions"])
        and count(node.body, Trait.CONTRACTION) == products
        and set(operations.split()) <= set(ops(node.body))
    ]
    shown = Counter((n.attributes["label"], count(n.body, Trait.CONTRACTION)) for n in all_kernels)
    assert found, f"{family} has {dict(shown)}"


@pytest.mark.slow
def test_only_the_last_token_goes_through_what_only_it_needs() -> None:
    """The last layer's output projection, norm and MLP, the final norm and the head."""
    every, last = (int(sum(flops(n) for g in graphs for n in g)) for graphs in (
        optimized("llama", *MANY), optimized("llama", *MANY, logits_to_keep=1)
    ))  # fmt: skip
    hidden, intermediate = Sizes(hidden=64).hidden, Sizes(hidden=64).intermediate
    tokens = MANY[0] * (MANY[1] - 1)
    products = hidden * hidden + 3 * hidden * intermediate + hidden * VOCABULARY
    assert every - last >= 2 * tokens * products


def count(body: Graph, trait: Trait) -> int:
    return sum(n.has(trait) for n in body.nodes)


def ops(body: Graph) -> list[str]:
    return [n.op.name for n in body.nodes]
