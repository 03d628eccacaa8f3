"""Packed weights in Triton kernels: unpacked in the blocks of the product, never in memory; and products of bytes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusec.analysis.machine import chip as machine
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.kernel import Statement
from fusec.codegen.triton import TritonTarget
from fusec.codegen.triton.check import check_region
from fusec.codegen.triton.compile import compile_for
from fusec.codegen.triton.schedules import configs
from fusec.codegen.triton.schedules.gemm import _TiledContraction
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.graph import Graph
from fusec.loops.affine import Axis
from fusec.loops.indexing import IndexedExpr
from fusec.quantization.formats import format_named
from fusec.quantization.linear import QuantizedLinear
from fusec.quantization.rounding import round_to_nearest
from fusec.reference.contract import Comparison, compare_outputs
from tests.codegen.triton_regions import every_chip, kernel_regions, regions_of
from tests.combinations import rotating
from tests.contexts import plan_of
from tests.packed import COLUMNS, DEPTH, FORMS, Packed

GPU = Config(target="triton", machine="h100", strict=True)


def layer(form: Packed) -> Callable[..., Tensor]:
    """Return a linear layer with a norm before and a residual after it."""

    def run(x: Tensor, residual: Tensor, *parts: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (DEPTH,)), form.weight(*parts, x.dtype)) + residual

    return run


def compared(form: Packed, rows: int, dtype: torch.dtype, steps: int = 1) -> Comparison:
    """Compile a layer to so many kernels, and compare it with eager."""
    torch.manual_seed(rows)
    parts = tuple(p.to(dtype) if p.dtype == torch.float32 else p for p in form.parts())
    inputs = [torch.randn(rows, DEPTH).to(dtype), torch.randn(rows, COLUMNS).to(dtype), *parts]
    found = compile_graph(trace(layer(form), inputs, symbolic=False), GPU).program
    assert [step.kind for step in found.steps] == ["kernel"] * steps
    assert not any(unproven_accesses(kernel) for kernel in found.kernels.values())
    exact = layer(form)(*(x.double() if x.dtype == dtype else x for x in inputs))
    return compare_outputs([layer(form)(*inputs)], found(inputs), [exact], dtype)


SETTINGS = [(1, torch.bfloat16), (5, torch.float16), (1, torch.float32), (20, torch.bfloat16)]


@pytest.mark.parametrize(("form", "setting"), rotating(list(FORMS), SETTINGS), ids=str)
def test_a_packed_layer_is_one_kernel(form: str, setting: tuple[int, torch.dtype]) -> None:
    assert (comparison := compared(FORMS[form], *setting)).passed, comparison


@pytest.mark.parametrize("form", ["int8 per channel", "int4, halves in a byte", "GGUF Q4_0"])
def test_a_block_of_rows_unpacks_the_weight_for_itself(form: str) -> None:
    """The norm of so many is a kernel of its own."""
    assert (comparison := compared(FORMS[form], 50, torch.bfloat16, steps=2)).passed, comparison


@pytest.mark.parametrize("form", ["int4, neighbours in a byte", "int4, halves in a byte", "two bits"])
def test_exchanged_nibbles_are_found(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above fail if the schedule multiplies a part of the weight by the left operand of another."""
    schedule, lefts = _TiledContraction._products, list[IndexedExpr]()

    def by_the_first(
        self: _TiledContraction, name: str, left: IndexedExpr, right: IndexedExpr, axis: Axis
    ) -> Statement:
        lefts.append(left)
        return schedule(self, name, lefts[0], right, axis)

    monkeypatch.setattr(_TiledContraction, "_products", by_the_first)
    assert not compared(FORMS[form], 2, torch.float32).passed


@pytest.mark.parametrize("rows", [1, 5])
def test_special_values_of_scales(rows: int) -> None:
    """Lanes beyond the end of a row or group, where a weight would be 0 · inf, do not count."""
    torch.manual_seed(0)
    q, s = torch.randint(1, 9, (24, 2, 20), dtype=torch.int8), torch.rand(24, 2)
    s[3, 0], s[5, 1] = float("inf"), float("nan")
    x = torch.rand(rows, 40) + 0.5

    def linear(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, (q.to(x.dtype) * s[..., None]).reshape(24, 40))

    found = compile_graph(trace(linear, (x, q, s), symbolic=False), GPU).program
    torch.testing.assert_close(found([x, q, s])[0], linear(x, q, s), equal_nan=True)


# Products of bytes.


@pytest.mark.parametrize("rows", [1, 5, 20, 70])
def test_rows_are_quantized_in_the_kernel_of_their_product(rows: int) -> None:
    """As far as these are few; the largest codes and sums are exact."""
    torch.manual_seed(0)
    x, w, scale = torch.randn(rows, 300), torch.randint(-128, 128, (72, 300), dtype=torch.int8), torch.rand(72)
    w[0], x[0] = 127, x[0].abs().amax()

    def linear(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True) / 127
        return torch._int_mm((x / largest).round().to(torch.int8), w.t()).float() * largest * scale

    config = replace(GPU, mode="max-autotune") if rows > 16 else GPU
    found = compile_graph(trace(linear, (x, w, scale), symbolic=False), config).program
    assert [step.kind for step in found.steps] == ["kernel"] * (2 if rows > 16 else 1)
    torch.testing.assert_close(found([x, w, scale])[0], linear(x, w, scale))


def test_unsigned_bytes_are_left_to_the_library() -> None:
    """Matrix units multiply bytes of one kind."""
    x, w = torch.randint(0, 256, (4, 64), dtype=torch.uint8), torch.randint(-128, 128, (72, 64), dtype=torch.int8)

    def linear(x: Tensor, w: Tensor) -> Tensor:
        return (x.int() @ w.int().t()).float() * 0.5

    found = compile_graph(trace(linear, (x, w), symbolic=False), replace(GPU, strict=False)).program
    assert torch.equal(found([x, w])[0], linear(x, w))


# Compiled ahead of time.


def gated(name: str, rows: int, hidden: int = 2048, inner: int = 8192) -> Graph:
    """Return the first half of a quantized MLP of bfloat16."""
    chosen = format_named(name)
    dense = nn.Linear(hidden, inner, bias=False, dtype=torch.bfloat16, device="meta")
    layers = [QuantizedLinear(dense, chosen, round_to_nearest(dense.weight.data, chosen)) for _ in range(2)]
    parts = [dict(one.named_buffers()) for one in layers]

    def run(x: Tensor, scale: Tensor, *flat: Tensor) -> Tensor:
        given, h = iter(flat), F.rms_norm(x, (hidden,), scale)
        gate, up = (
            torch.func.functional_call(one, {name: next(given) for name in own}, (h,))
            for one, own in zip(layers, parts, strict=True)
        )
        return F.silu(gate) * up

    inputs = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((rows, hidden), (hidden,)))
    return trace(run, (*inputs, *(p for own in parts for p in own.values())), symbolic=False)


@every_chip
@pytest.mark.parametrize(("name", "rows"), [("int8", 8), ("int4", 1), ("int4", 8), ("int4", 64), ("nf4", 8)])
def test_a_quantized_gate_compiles_to_what_a_chip_should_run(name: str, rows: int, chip: str) -> None:
    (*_, region) = kernel_regions(gated(name, rows))
    kernel = TritonTarget().schedule(plan_of(region), "kernel", machine(chip))
    report = compile_for(kernel, chip)
    assert report.ok and (report.matrix_instructions or rows == 1), report


@every_chip
def test_bytes_are_multiplied_by_their_own_instructions(chip: str) -> None:
    (region,) = kernel_regions(gated("w8a8", 8))
    report = compile_for(TritonTarget().schedule(plan_of(region), "kernel", machine(chip)), chip)
    assert report.ok and all("i8" in name or "s8" in name for name in report.matrix_instructions), report


def test_sums_that_are_shorter_than_an_instruction() -> None:
    """Of bytes it multiplies 32; lanes beyond the end are 0."""
    (region,) = regions_of(lambda x, w: torch._int_mm(x, w.t()).float() * 0.5, [bytes_of(8, 16), bytes_of(64, 16)])
    assert (outcome := check_region(region, chips=("sm_90", "gfx942"))).ok, outcome


def bytes_of(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def test_blocks_of_candidates_are_not_deeper_than_a_group() -> None:
    plan = plan_of(kernel_regions(gated("int4", 8, hidden=256, inner=512))[0])
    assert {config.depth for config in configs(plan, machine("sm_90"))} <= {16, 32}
