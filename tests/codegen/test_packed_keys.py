"""Attention over caches of bytes: quantised where keys and values are made, unpacked inside of the attention kernel."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.kernel import ComputedDot, walk
from fusec.compiler import Compiled, compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.reference.contract import compare_outputs
from tests.combinations import named, rotating

HEADS, SHARED, HEAD, CAPACITY = 4, 2, 32, 300


def per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes and their scales, in float32."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-20)
    return (x.float() / scale).round().to(torch.int8), scale


def per_channel(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-2, keepdim=True) / 127
    return (x.float() / scale).round().to(torch.int8), scale


def unsigned(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes with a zero point."""
    low, high = x.float().aminmax(dim=-1, keepdim=True)
    scale = (high - low).clamp(min=1e-20) / 255
    return ((x.float() - low) / scale).round().to(torch.uint8), scale, low


def per_group(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = per_token(x.unflatten(-1, (-1, 8)))
    return codes.flatten(-2), scale.squeeze(-1)


def ungrouped(dtype: torch.dtype, codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.unflatten(-1, (-1, 8)).to(dtype) * scale.to(dtype)[..., None]).flatten(-2)


def nibbles(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of four bits with a zero point and a scale in half precision for each group of 16."""
    groups = x.float().unflatten(-1, (-1, 16))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round()
    codes = ((groups / scale).round() + zero).clamp(0, 15).to(torch.uint8).flatten(-2)
    return codes, scale.half().squeeze(-1), zero.clamp(0, 15).to(torch.uint8).squeeze(-1)


def pairs(x: Tensor) -> tuple[Tensor, ...]:
    codes, *scales = nibbles(x)
    return codes[..., ::2] | codes[..., 1::2] << 4, *scales


def halves(x: Tensor) -> tuple[Tensor, ...]:
    codes, *scales = nibbles(x)
    low, high = codes.chunk(2, -1)
    return low | high << 4, *scales


def with_zeros(dtype: torch.dtype, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    centered = codes.unflatten(-1, (-1, 16)).to(dtype) - zero.to(dtype)[..., None]
    return (centered * scale.to(dtype)[..., None]).flatten(-2)


def from_pairs(dtype: torch.dtype, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return with_zeros(dtype, torch.stack((codes & 15, codes >> 4), -1).flatten(-2), scale, zero)


def from_halves(dtype: torch.dtype, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return with_zeros(dtype, torch.cat((codes & 15, codes >> 4), -1), scale, zero)


def scaled(dtype: torch.dtype, codes: Tensor, scale: Tensor) -> Tensor:
    return codes.to(dtype) * scale.to(dtype)


def rounded(dtype: torch.dtype, codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.float() * scale).to(dtype)


def from_zero_point(dtype: torch.dtype, codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    return (codes.float() * scale + low).to(dtype)


FORMS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Tensor]]] = {
    "per token": (per_token, scaled),
    "per token, rounded": (per_token, rounded),
    "per channel": (per_channel, rounded),
    "zero points": (unsigned, from_zero_point),
    "one scale": (lambda x: (per_token(x)[0],), lambda dtype, codes: codes.to(dtype) * 0.03),
    "unscaled": (lambda x: ((4 * x).to(torch.int8),), lambda dtype, codes: codes.to(dtype)),
    "wrapped": (unsigned, lambda dtype, codes, scale, _: codes.to(torch.int8).to(dtype) * scale.to(dtype)),
    "per group": (per_group, ungrouped),
    "four bits, pairs": (pairs, from_pairs),
    "four bits, halves": (halves, from_halves),
    "float8": (lambda x: (x.to(torch.float8_e5m2),), lambda dtype, codes: codes.to(dtype)),
}


def over(form: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    unpack = FORMS[form][1]

    def run(query: Tensor, mask: Tensor, *packed: Tensor) -> Tensor:
        half = len(packed) // 2
        keys, values = (unpack(query.dtype, *parts) for parts in (packed[:half], packed[half:]))
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

    return run


def sample(form: str, dtype: torch.dtype, queries: int) -> tuple[Tensor, ...]:
    keys, values = torch.randn(2, 2, SHARED, CAPACITY, HEAD).unbind()
    seen = torch.arange(CAPACITY) <= torch.arange(queries)[:, None] + 200
    pack = FORMS[form][0]
    return torch.randn(2, HEADS, queries, HEAD).to(dtype), seen, *pack(keys), *pack(values)


def built(function: Callable[..., object], inputs: tuple[Tensor, ...], target: str = "cpp") -> Compiled:
    return compile_graph(trace(function, inputs, symbolic=False), replace(Config(target=target), strict=True))


def agrees(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], found: Tensor) -> bool:
    exact = function(*(x.double() if x.dtype in (torch.float32, torch.bfloat16) else x for x in inputs))
    return compare_outputs([function(*inputs)], [found], [exact]).passed


TURNS = [("cpp", 1, torch.bfloat16), ("cpp", 40, torch.float32)]
EACH = ("triton", 40, torch.bfloat16)
"""Target, number of queries, and dtype: every form has one of these in turn, and the last; others are thorough."""


def cases() -> Iterator[Any]:
    settings = list(product(("cpp", "triton"), (1, 5, 40), (torch.float32, torch.bfloat16)))
    for (i, form), setting in product(enumerate(FORMS), settings):
        marks = () if setting in (TURNS[i % 2], EACH) else pytest.mark.thorough
        yield pytest.param(form, *setting, marks=marks)


@pytest.mark.parametrize(("form", "target", "queries", "dtype"), list(cases()))
def test_keys_and_values_are_unpacked_in_the_kernel(form: str, dtype: torch.dtype, queries: int, target: str) -> None:
    function, inputs = over(form, dtype), sample(form, dtype, queries)
    found = built(function, inputs, target)
    (kernel,) = found.program.kernels.values()
    assert kernel.kind == "attention" and unproven_accesses(kernel) == []
    assert agrees(function, inputs, found.program(list(inputs))[0])


@pytest.mark.parametrize("form", ["per token", "per token, rounded", "zero points"])
def test_scales_of_a_narrower_type_than_the_sums(form: str) -> None:
    function, inputs = over(form, torch.float64), sample(form, torch.float64, 1)
    found = built(function, inputs)
    assert [kernel.kind for kernel in found.program.kernels.values()] == ["attention"]
    torch.testing.assert_close(found.program(list(inputs))[0], function(*inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("form", "part"),
    [*(("per token", part) for part in range(2, 6)), *(("four bits, pairs", part) for part in range(2, 8))],
)
def test_planted_mistakes_are_found(form: str, part: int) -> None:
    function, inputs = over(form, torch.float32), sample(form, torch.float32, 1)
    wrong = (*inputs[:part], inputs[part].roll(1, 2), *inputs[part + 1 :])
    assert agrees(function, inputs, function(*inputs)) and not agrees(function, inputs, function(*wrong))


def test_a_step_quantizes_what_it_stores_in_one_kernel_and_reads_it_in_another() -> None:
    def step(query: Tensor, key: Tensor, value: Tensor, position: Tensor, *cache: Tensor) -> Tensor:
        for place, new in zip(cache, (*per_token(key), *per_token(value)), strict=True):
            place.index_copy_(2, position, new)
        keys, values = (scaled(query.dtype, *parts) for parts in (cache[:2], cache[2:]))
        seen = torch.arange(CAPACITY) <= position[:, None]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)

    query, _, *cache = sample("per token", torch.float32, 1)
    inputs = query, *torch.randn(2, 2, SHARED, 1, HEAD).unbind(), torch.tensor([250]), *cache
    want, own = ([x.clone() for x in inputs] for _ in range(2))
    found = built(step, inputs)
    assert len(found.program.kernels) == 2
    torch.testing.assert_close(found.program(list(own))[0], step(*want))
    assert all(torch.equal(a, b) for a, b in zip(own, want, strict=True))


@pytest.mark.usefixtures("nothing_is_built")
def test_scales_of_tokens_are_applied_behind_the_sums() -> None:
    """Few queries are multiplied with the codes as they are loaded; a product that is rounded first is not."""
    for form, unpacks in (("per token", False), ("per token, rounded", True), ("per channel", True)):
        found = built(over(form, torch.bfloat16), sample(form, torch.bfloat16, 1))
        (kernel,) = found.program.kernels.values()
        assert any(isinstance(s, ComputedDot) for s in walk(kernel.body)) is unpacks, form


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize(
    ("queries", "dtype", "computed"), [(4, torch.bfloat16, True), (5, torch.bfloat16, False), (1, torch.float64, False)]
)
def test_few_queries_unpack_in_registers(queries: int, dtype: torch.dtype, computed: bool) -> None:
    """For each eight of them once; more of them, and sums of float64, take blocks in scratch."""
    found = built(over("four bits, halves", dtype), sample("four bits, halves", dtype, queries))
    (kernel,) = found.program.kernels.values()
    scratch = [buffer for buffer in kernel.buffers if buffer.name.startswith("unpacked")]
    products = [s for s in walk(kernel.body) if isinstance(s, ComputedDot)]
    assert (len(scratch), len(products)) == ((0, 3) if computed else (1, 0))
    assert [len(s.lefts) for s in products] == [2, 1, 1][: len(products)]  # one for each half of a byte


@pytest.mark.parametrize("queries", [1, 40])
def test_values_that_lie_along_the_tokens(queries: int) -> None:
    def run(query: Tensor, keys: Tensor, key_scales: Tensor, values: Tensor, value_scales: Tensor) -> Tensor:
        keys, values = keys.to(query.dtype) * key_scales, values.to(query.dtype) * value_scales
        return torch.softmax(query @ keys, -1) @ values.transpose(-1, -2).contiguous()

    packed = [part.transpose(-1, -2).contiguous() for _ in range(2) for part in per_token(torch.randn(2, 50, 24))]
    inputs = torch.randn(2, queries, 24), *packed
    assert agrees(run, inputs, built(run, inputs).program(list(inputs))[0])


@pytest.mark.parametrize("queries", [1, 40])
def test_scores_that_are_nothing_but_products(queries: int) -> None:
    def run(query: Tensor, keys: Tensor, key_scales: Tensor, values: Tensor, value_scales: Tensor) -> Tensor:
        keys, values = keys.to(query.dtype) * key_scales, values.to(query.dtype) * value_scales
        return torch.softmax(query @ keys.transpose(-1, -2), -1) @ values

    inputs = torch.randn(2, queries, 24), *(part for _ in range(2) for part in per_token(torch.randn(2, 50, 24)))
    found = built(run, inputs)
    assert [kernel.kind for kernel in found.program.kernels.values()] == ["attention"]
    assert agrees(run, inputs, found.program(list(inputs))[0])


def test_caches_that_grow_have_one_program() -> None:
    function = torch.compile(over("per token", torch.float32), backend="fusec", dynamic=True, options={"strict": True})
    query, _, *cache = sample("per token", torch.float32, 1)
    for length in (150, 151, 290):
        inputs = query, torch.ones(1, length, dtype=torch.bool), *(x[:, :, :length].contiguous() for x in cache)
        assert agrees(over("per token", torch.float32), inputs, function(*inputs))


def test_keys_of_as_many_bytes_are_computed_ahead() -> None:
    """They are computed once, rather than in each block of queries."""

    def run(query: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, keys * scale, keys)

    keys = torch.randn(2, 2, CAPACITY, HEAD)
    found = built(run, (torch.randn(2, 2, 3, HEAD), keys, torch.randn(CAPACITY, HEAD)))
    assert [kernel.kind for kernel in found.program.kernels.values()] == ["pointwise", "attention"]


def of_one_element(query: Tensor, codes: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    keys = (codes.unflatten(-1, (-1, 1)).to(query.dtype) * scales[..., None]).flatten(-2)
    return F.scaled_dot_product_attention(query, keys, values)


def of_two_halves(query: Tensor, codes: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    keys = torch.cat((codes & 15, codes >> 4), -1).to(query.dtype) * scales
    return F.scaled_dot_product_attention(query.repeat(1, 1, 1, 2), keys, values)


@pytest.mark.parametrize(("function", "queries"), rotating((of_one_element, of_two_halves), (40, 2)), ids=named)
def test_keys_of_so_few_elements_are_no_attention_kernel(function: Callable[..., Tensor], queries: int) -> None:
    codes = torch.randint(0, 127, (1, 1, 70, 1), dtype=torch.uint8)
    inputs = torch.randn(1, 1, queries, 1), codes, torch.rand(1, 1, 70, 1) / 30, torch.randn(1, 1, 70, 8)
    assert agrees(function, inputs, built(function, inputs).program(list(inputs))[0])


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("keys", [64, 128, 256])
@pytest.mark.parametrize("queries", [2, 40])
def test_accesses_of_whole_blocks_are_proven(queries: int, keys: int) -> None:
    function, (query, mask, *cache) = (
        over("four bits, pairs", torch.float32),
        sample("four bits, pairs", torch.float32, queries),
    )
    inputs = query, mask[:, :keys], *(x[:, :, :keys].contiguous() for x in cache)
    (kernel,) = built(function, inputs).program.kernels.values()
    assert kernel.kind == "attention" and unproven_accesses(kernel) == []
