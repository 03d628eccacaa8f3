"""What a tuner holds a kernel against: products by the library, the rest in kernels, written where the kernel would."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.analysis.machine import chip
from fusec.codegen.triton import TritonTarget
from fusec.codegen.triton.autotune.vendor_attention import with_one_call
from fusec.codegen.triton.autotune.vendor_candidate import VendorCandidate
from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.graph import Node
from fusec.pipeline import Context
from tests.codegen.triton_regions import regions_of, regions_with_products
from tests.contexts import context_of


def context(**options: Any) -> Context:
    config = Config(mode="max-autotune", machine="h200", target="triton", **options)
    return context_of("triton", config, chip("h200"))


def candidate(region: Node, **options: Any) -> VendorCandidate:
    return VendorCandidate("k", region.body, TritonTarget(), context(**options))


def steps(program: VendorCandidate) -> list[str]:
    return [step.kind for step in program._program.steps]


def operands(region: Node, function: Callable[..., Any], given: Sequence[Tensor]) -> list[Tensor]:
    """What a function is given, in the order in which its one region takes it."""
    names = {v.name: x for v, x in zip(trace(function, given, symbolic=False).inputs, given, strict=True)}
    return [names[value.name] for value in region.operands]


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def biased(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, bias))


CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], list[str]]] = {
    "gated, few rows": (gated, ((3, 40), (24, 40), (24, 40)), ["vendor", "vendor", "kernel"]),
    "gated, many rows": (gated, ((40, 40), (24, 40), (24, 40)), ["vendor", "vendor", "kernel"]),
    "biased": (biased, ((2, 20, 40), (24, 40), (24,)), ["vendor", "kernel"]),
    "nothing else": (F.linear, ((40, 40), (24, 40)), ["vendor", "write"]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rest_is_one_kernel_that_stores_the_results(name: str) -> None:
    function, shapes, expected = CASES[name]
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape in shapes]
    (region,) = regions_with_products(function, given)
    program, out = candidate(region), torch.full_like(function(*given), torch.nan)
    assert steps(program) == expected
    before = [x.clone() for x in given]
    program([*operands(region, function, given), out])
    torch.testing.assert_close(out, function(*given))
    assert all(map(torch.equal, given, before))


def test_layers_that_share_a_kernel_share_no_weights() -> None:
    """Under `freeze` a program keeps what a weight decides; here another one may come with each call."""

    def exponential(x: Tensor, w: Tensor) -> Tensor:
        return F.relu(F.linear(x, w.exp()))

    x, *weights = torch.randn(40, 40), torch.randn(24, 40), torch.randn(24, 40)
    body = trace(exponential, [x, weights[0]], symbolic=False)
    for value in body.inputs:
        value.frozen = value.shape == (24, 40)
    program = VendorCandidate("k", body, TritonTarget(), context(freeze=True))
    for w in weights:
        out = torch.full((40, 24), torch.nan)
        program([x, w, out])
        torch.testing.assert_close(out, exponential(x, w))
    assert steps(program) == ["kernel", "vendor", "kernel"]


def test_attention_is_one_call_with_the_rest_behind_it() -> None:
    torch.manual_seed(0)
    q, k, v, gate = (torch.randn(1, 2, 40, 16) for _ in range(4))

    def function(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * torch.sigmoid(gate)

    (region,) = regions_of(function, [q, k, v, gate])
    program = VendorCandidate("k", with_one_call(region.body), TritonTarget(), context())
    out = torch.full_like(q, torch.nan)
    program([*operands(region, function, [q, k, v, gate]), out])
    assert steps(program) == ["opaque", "kernel"]
    torch.testing.assert_close(out, function(q, k, v, gate))
