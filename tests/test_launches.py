"""How many things a layer of a model does: kernels, calls, copies and writes, counted as what one more layer adds."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers

from fusec.analysis.machine import Machine, assumed_cpu, chip
from fusec.codegen import target_named
from fusec.codegen.program.program import build_program
from fusec.codegen.tile.kernel import Kernel
from fusec.compiler import context_for
from fusec.config import Config
from fusec.debug.capture import capture
from fusec.ir.graph import Node
from fusec.loops.kinds import Limits
from fusec.loops.plan import Plan
from fusec.passes import default_pipeline

SIZES = [(64, 4), pytest.param(1024, 16, marks=pytest.mark.thorough)]
DTYPES = [torch.float32, torch.bfloat16]
FEW_DTYPES = [pytest.param(torch.float32, marks=pytest.mark.thorough), torch.bfloat16]


class Printed:
    """A kernel that nobody launches."""

    def __init__(self, kernel: Kernel, source: str) -> None:
        self.name, self.source = kernel.name, source

    def __call__(self, buffers: Sequence[Any], symbols: Sequence[int]) -> None:
        raise AssertionError("only counted")


class Scheduled:
    """A target without its compiler: what a program does is known once its kernels are scheduled and printed."""

    def __init__(self, name: str) -> None:
        self.target = target_named(name)
        self.name, self.shares_code = name, self.target.shares_code

    def machine(self, config: Config) -> Machine:
        return assumed_cpu() if self.name == "cpp" else chip("")

    def limits(self, config: Config, machine: Machine) -> Limits:
        return self.target.limits(config, machine)

    def schedule(self, plan: Plan, name: str = "kernel", machine: Machine | None = None) -> Kernel:
        return self.target.schedule(plan, name, machine)

    def print(self, kernel: Kernel) -> str:
        return self.target.print(kernel)

    def build(self, kernels: Sequence[Kernel], config: Config) -> list[Any]:
        return [Printed(kernel, self.print(kernel)) for kernel in kernels]

    def select_kernel(self, region: Node, kernel: Kernel, built: Any, *_: Any) -> tuple[Kernel, Any]:
        return kernel, built


def steps(model: nn.Module, *inputs: Any, **keywords: Any) -> dict[str, Counter[str]]:
    """What one call of a model does on each target, by kind."""
    torch._dynamo.reset()
    (captured,) = capture(model, *inputs, **keywords)
    found = {}
    for target in map(Scheduled, ("cpp", "triton")):
        graph, config = captured.copy(), Config(strict=True)
        context, _ = context_for(target, config)
        default_pipeline(config).run(graph, context)
        found[target.name] = Counter(step.kind for step in build_program(graph, target, context).steps)
    return found


def llama(layers: int, hidden: int, heads: int, dtype: torch.dtype, capacity: int) -> tuple[nn.Module, Any]:
    """A model and a static cache for it, which has not been filled yet."""
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    return model, transformers.StaticCache(config=config, max_cache_len=capacity)


def decoding(layers: int, hidden: int, heads: int, dtype: torch.dtype) -> dict[str, Counter[str]]:
    """One token of a Llama whose static cache holds some already."""
    model, cache = llama(layers, hidden, heads, dtype, 64)
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.int64), past_key_values=cache, use_cache=True)
        return steps(model, torch.ones(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)


def prompting(layers: int, hidden: int, heads: int, dtype: torch.dtype) -> dict[str, Counter[str]]:
    """The prompt of a Llama whose static cache is made in the same graph.

    Its products are of many rows: kernels on the CPU, whose profile says so, and the vendor's on a GPU.
    """
    model, cache = llama(layers, hidden, heads, dtype, 256)
    with torch.no_grad():
        return steps(model, torch.ones(1, 128, dtype=torch.int64), past_key_values=cache, use_cache=True)


def encoding(layers: int, hidden: int, heads: int, dtype: torch.dtype) -> dict[str, Counter[str]]:
    """A few tokens through BERT."""
    config = transformers.BertConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        vocab_size=64,
    )  # fmt: skip
    model = transformers.BertModel(config, add_pooling_layer=False).eval().to(dtype)
    return steps(model, torch.ones(1, 9, dtype=torch.int64))


@pytest.mark.parametrize("dtype", FEW_DTYPES, ids=str)
def test_the_prompt_s_rows_go_into_the_cache_by_one_kernel(dtype: torch.dtype) -> None:
    """Products of q, with its rope, k and v; rope of keys, with both stores; attention; and so on. Two caches made."""
    fewer, more = (prompting(layers, 64, 4, dtype) for layers in (2, 3))
    cpp, triton = (more[target] - fewer[target] for target in ("cpp", "triton"))
    assert cpp == Counter(kernel=8, write=2), (fewer, more)
    assert triton == Counter(vendor=7, kernel=6, write=2), (fewer, more)


@pytest.mark.parametrize(("hidden", "heads"), SIZES)
@pytest.mark.parametrize("dtype", FEW_DTYPES, ids=str)
@pytest.mark.parametrize(("model", "most"), [(decoding, 5), (encoding, 6)], ids=["decoding", "encoding"])
def test_a_layer_is_few_kernels_and_nothing_else(
    model: Any, most: int, hidden: int, heads: int, dtype: torch.dtype
) -> None:
    """Norm, projections, rope and cache; attention; its projection; norm, gate and up; down. BERT has one more."""
    fewer, more = (model(layers, hidden, heads, dtype) for layers in (2, 3))
    cpp, triton = (more[target] - fewer[target] for target in ("cpp", "triton"))
    assert set(cpp) == {"kernel"} and cpp["kernel"] <= most, (fewer, more)
    assert set(triton) == {"kernel"} and 4 <= triton["kernel"] <= cpp["kernel"], (fewer, more)
