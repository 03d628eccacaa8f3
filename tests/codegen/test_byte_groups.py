"""Bytes by codes with a scale for each group: exact in a group, one kernel with the norm before and what follows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.codegen import target_named
from fusec.codegen.cpp.build import BuildError, build
from fusec.codegen.cpp.printer import print_kernel
from fusec.codegen.cpp.schedules import gemm
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.kernel import GroupedDot, Kernel, walk
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.quantization.formats import quantized_rows
from fusec.reference.contract import compare_outputs
from fusec.reference.dtypes import torch_dtype
from tests.combinations import rotating

COLUMNS, DEPTH, GROUP = 40, 256, 64
ALL_BYTES = torch.arange(COLUMNS * DEPTH).reshape(COLUMNS, DEPTH).to(torch.uint8)
BF16_PRODUCTS = target_named("cpp").bf16_products
SCALES, ZEROS = torch.rand(COLUMNS, DEPTH // GROUP) * 0.01 + 0.01, ALL_BYTES[:, : DEPTH // GROUP].contiguous()
SIGNED, NIBBLES = ALL_BYTES.view(torch.int8), ALL_BYTES[:, ::2].contiguous()
LEAST = torch.full_like(SIGNED, -128)
ROWS = torch.rand(COLUMNS) + 0.5


EMULATED = """
#define __AVXVNNI__ 1
#define __builtin_ia32_vpdpbusd_v8si emulated_quads
typedef int Ints8 __attribute__((vector_size(32)));
static inline Ints8 emulated_quads(Ints8 sums, Ints8 codes, Ints8 left) {
  unsigned char u[32];
  signed char s[32];
  __builtin_memcpy(u, &codes, 32);
  __builtin_memcpy(s, &left, 32);
  for (int i = 0; i < 32; i++) sums[i / 4] += u[i] * s[i];
  return sums;
}
"""
"""The instruction for quads of bytes on a machine without it."""


@pytest.fixture(autouse=True)
def in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply in bytes also where pairs of bfloat16 are faster."""
    monkeypatch.setattr(gemm, "LEAST_IN_BYTES", 0)


def grouped(numbers: Tensor, scale: Tensor, zero: Tensor | float = 0) -> Tensor:
    """A weight from numbers in its dtype, in any shape, and zeros and scales of groups."""
    return ((numbers.reshape(COLUMNS, -1, GROUP) - zero) * scale.to(numbers.dtype)[..., None]).reshape(COLUMNS, DEPTH)


def neighbours(p: Tensor) -> Tensor:
    return torch.stack((p & 15, p >> 4), -1)


Weight = Callable[..., Tensor]
FORMS: dict[str, tuple[Weight, tuple[Tensor, ...]]] = {
    "int8": (lambda q, s, t: grouped(q.to(t), s), (SIGNED, SCALES)),
    "int8, all of them the least": (lambda q, s, t: grouped(q.to(t), s), (LEAST, SCALES)),
    "int8 with zeros": (
        lambda q, z, s, t: grouped(q.to(t), s, z.to(t)[..., None]),
        (SIGNED, ZEROS.view(torch.int8), SCALES),
    ),
    "uint8 with zeros": (lambda q, z, s, t: grouped(q.to(t), s, z.to(t)[..., None]), (ALL_BYTES, ZEROS, SCALES)),
    "uint8 with a constant zero": (lambda q, s, t: grouped(q.to(t), s, 128), (ALL_BYTES, SCALES)),
    "int4": (
        lambda p, z, s, t: grouped(neighbours(p).to(t), s, (z & 15).to(t)[..., None]),
        (NIBBLES, ZEROS, SCALES),
    ),
    "int4 less 8 in int8": (lambda p, s, t: grouped((neighbours(p).to(torch.int8) - 8).to(t), s), (NIBBLES, SCALES)),
    "halves of a group in a byte": (
        lambda p, s, t: grouped(torch.stack((p & 15, p >> 4), -2).to(t), s, 8),
        (NIBBLES.reshape(COLUMNS, -1, GROUP // 2), SCALES),
    ),
    "scales with scales": (
        lambda q, s, r, t: grouped(q.to(t), s) * r.to(t)[:, None],
        (SIGNED, SCALES, ROWS),
    ),
    "bytes that wrap around": (lambda q, s, t: grouped((q - 8).to(t), s), (ALL_BYTES, SCALES)),
}
FLOATS: dict[str, tuple[Weight, tuple[Tensor, ...]]] = {
    "a scale of each column": (lambda q, s, t: q.to(t) * s.to(t), (SIGNED, torch.rand(DEPTH))),
    "zeros that are no integers": (
        lambda q, s, t: grouped(q.to(t), s, s.to(t)[..., None] * 100),
        (ALL_BYTES, SCALES),
    ),
    "rounded": (lambda q, s, t: grouped(q.to(t), s).to(torch.bfloat16).to(t), (SIGNED, SCALES)),
    "other scales for each half of a row": (
        lambda p, s, t: grouped(torch.cat((p & 15, p >> 4), -1).reshape(COLUMNS, -1).to(t), s, 8),
        (NIBBLES, SCALES),
    ),
    "groups of half a register": (
        lambda p, s, t: grouped(torch.stack([p >> i & 3 for i in (0, 2, 4, 6)], -1).to(t), s),
        (ALL_BYTES[:, ::4].contiguous(), SCALES),
    ),
    "a constant zero of half": (lambda q, s, t: grouped(q.to(t), s, 7.5), (ALL_BYTES, SCALES)),
}


def layer(weight: Weight) -> Callable[..., Tensor]:
    def run(x: Tensor, residual: Tensor, *parts: Tensor) -> Tensor:
        codes, scale = quantized_rows(F.rms_norm(x, (DEPTH,)))
        return (F.linear(codes.to(x.dtype), weight(*parts, x.dtype)).float() * scale).to(x.dtype) + residual

    return run


def check(form: tuple[Weight, tuple[Tensor, ...]], rows: int, dtype: torch.dtype, **options: Any) -> Kernel:
    """Compile strictly, compare, and return the only kernel."""
    weight, parts = form
    torch.manual_seed(rows)
    x, residual = torch.randn(rows, DEPTH).to(dtype), torch.randn(rows, COLUMNS).to(dtype)
    inputs = (x, residual, *(p.to(dtype) if p.is_floating_point() else p for p in parts))
    run = layer(weight)
    found = compile_graph(trace(run, inputs, symbolic=False), replace(Config(), strict=True, **options))
    (kernel,) = found.program.kernels.values()
    assert [step.kind for step in found.program.steps] == ["kernel"] and unproven_accesses(kernel) == []
    exact = run(*(p.double() if p.is_floating_point() else p for p in inputs))
    comparison = compare_outputs([run(*inputs)], [found.program(list(inputs))[0]], [exact], dtype)
    assert comparison.passed, comparison
    return kernel


def test_sums_that_int32_cannot_hold_stay_floats() -> None:
    def run(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x.float(), (codes.reshape(8, 2, -1).float() * scale[..., None]).reshape(8, -1))

    x, codes = torch.full((1, 1 << 18), -128, dtype=torch.int8), torch.full((8, 1 << 18), 255, dtype=torch.uint8)
    inputs = (x, codes, torch.ones(8, 2))
    found = compile_graph(trace(run, inputs, symbolic=False), replace(Config(), strict=True)).program(list(inputs))[0]
    torch.testing.assert_close(found, torch.full((1, 8), -128.0 * 255 * (1 << 18)), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_of_many_groups(dtype: torch.dtype) -> None:
    """In a half type they are computed in lanes, ahead of the matmul."""

    def run(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        numbers = codes.to(scale.dtype) - zero.to(scale.dtype)[..., None]
        return F.linear(x.to(scale.dtype), (numbers * scale[..., None]).reshape(44, -1))

    x, codes = torch.randint(-128, 128, (3, 33 * 32)).char(), torch.randint(0, 256, (44, 33, 32)).to(torch.uint8)
    inputs = (x, codes, torch.rand(44, 33).to(dtype), torch.randint(0, 256, (44, 33)).to(torch.uint8))
    found = compile_graph(trace(run, inputs, symbolic=False), replace(Config(), strict=True)).program
    (kernel,) = found.kernels.values()
    assert is_grouped(kernel) and unproven_accesses(kernel) == []
    assert sum(b.name.startswith("scales") for b in kernel.buffers) == (dtype != torch.float32)
    exact = run(*(p.double() if p.is_floating_point() else p for p in inputs))
    assert compare_outputs([run(*inputs)], found(list(inputs)), [exact], dtype).passed


@pytest.mark.parametrize("form", ["int8", "int4", "uint8 with zeros"])
def test_vnni_as_emulated(form: str) -> None:
    kernel = check(FORMS[form], 3, torch.float32)
    text, sizes = print_kernel(kernel), [int(b.numel) for b in kernel.given]
    own, emulated = build([(kernel.name, text), (kernel.name, EMULATED + text)], Config())
    assert not isinstance(own, BuildError) and not isinstance(emulated, BuildError)
    buffers = [torch.randint(0, 9, (n,)).to(torch_dtype(b.dtype)) for n, b in zip(sizes, kernel.given, strict=True)]
    results = []
    for built in (own, emulated):
        copies = [x.clone() for x in buffers]
        built(tuple(copies), ())
        results.append(copies[-1])
    assert torch.equal(*results) and results[0].abs().sum() > 0


@pytest.mark.skipif(not BF16_PRODUCTS, reason="pairs of bfloat16 are not multiplied by one instruction")
@pytest.mark.parametrize(
    ("rows", "group", "in_bytes"), [(2, 64, True), (3, 64, False), (3, 128, True), (16, 32, False)]
)
def test_short_groups_of_several_rows_are_multiplied_in_pairs(
    rows: int, group: int, in_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()

    def run(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        weight = codes.reshape(COLUMNS, -1, group).to(scale.dtype) * scale[..., None]
        return F.linear(x.to(scale.dtype), weight.reshape(COLUMNS, 256))

    x, codes = (torch.randint(-128, 128, (n, 256)).char() for n in (rows, COLUMNS))
    inputs = x, codes, torch.rand(COLUMNS, 256 // group).bfloat16()
    found = compile_graph(trace(run, inputs, symbolic=False), replace(Config(), strict=True)).program
    (kernel,) = found.kernels.values()
    assert is_grouped(kernel) == in_bytes
    exact = run(*(p.double() if p.is_floating_point() else p for p in inputs))
    assert compare_outputs([run(*inputs)], found(list(inputs)), [exact], torch.bfloat16).passed


def is_grouped(kernel: Kernel) -> bool:
    return any(isinstance(s, GroupedDot) for s in walk(kernel.body))


@pytest.mark.parametrize(
    ("form", "rows", "dtype"),
    rotating(list(FORMS), (1, 3, 8, 13), (torch.float32, torch.bfloat16, torch.float16)),
    ids=str,
)
def test_groups_are_summed_in_bytes(form: str, rows: int, dtype: torch.dtype) -> None:
    assert is_grouped(check(FORMS[form], rows, dtype))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_rows_beyond_a_block(form: str) -> None:
    assert is_grouped(check(FORMS[form], 37, torch.float32, small_m=64))


@pytest.mark.parametrize("form", FLOATS)
def test_what_is_no_sum_of_bytes_stays_in_floats(form: str) -> None:
    assert not is_grouped(check(FLOATS[form], 2, torch.float32))
