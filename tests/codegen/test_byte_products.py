"""Linear layers of bytes: quantised in the kernel of the norm before them, multiplied exactly, dequantised after."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.codegen.tile.bounds import unproven_accesses
from fusec.compiler import Compiled, compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.types import I8
from fusec.reference.contract import compare_outputs
from tests.combinations import rotating
from tests.machines import profile

COLUMNS, DEPTH = 72, 192
SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "_int_mm": lambda x, w: torch._int_mm(x, w.t()).float(),
    "int32": lambda x, w: (x.int() @ w.int().t()).float(),
    "float32": lambda x, w: F.linear(x.float(), w.float()),
    "float64": lambda x, w: F.linear(x.double(), w.double()).float(),
}


def quantized(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Per row, symmetric; of unsigned bytes around 128."""
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    codes = torch.clamp(torch.round(x.float() / scale), -128, 127)
    return (codes if dtype == torch.int8 else codes + 128).to(dtype), scale


def layer(spelling: str) -> Callable[..., Tensor]:
    def run(x: Tensor, residual: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        codes, scale = quantized(F.rms_norm(x, (DEPTH,)))
        return (SPELLINGS[spelling](codes, weight) * scale * scales).to(x.dtype) + residual

    return run


def parts(rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(rows)
    weight = torch.randint(-128, 128, (COLUMNS, DEPTH), dtype=torch.int8)
    return torch.randn(rows, DEPTH).to(dtype), torch.randn(rows, COLUMNS).to(dtype), weight, torch.rand(COLUMNS) * 0.01


def built(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], config: Config | None = None) -> Compiled:
    return compile_graph(trace(function, inputs, symbolic=False), replace(config or Config(), strict=True))


@pytest.mark.parametrize(("spelling", "rows"), rotating(list(SPELLINGS), (1, 8)))
def test_few_rows_are_one_kernel(spelling: str, rows: int) -> None:
    inputs = parts(rows, torch.float32)
    found = built(layer(spelling), inputs)
    assert [step.kind for step in found.program.steps] == ["kernel"]
    torch.testing.assert_close(found.program(list(inputs))[0], layer(spelling)(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fast", [True, False], ids=["generated", "vendor"])
def test_many_rows_are_a_kernel_ahead_of_the_matmul_and_its_own_or_the_librarys(fast: bool, dtype: torch.dtype) -> None:
    inputs = parts(40, dtype)
    found = built(layer("_int_mm"), inputs, profile(i8=100.0 if fast else 1.0))
    kinds = [step.kind for step in found.program.steps]
    assert kinds == (["kernel", "kernel"] if fast else ["kernel", "vendor", "kernel"])
    double = [x.double() if x.is_floating_point() else x for x in inputs]
    got, eager = found.program(list(inputs))[0], layer("_int_mm")(*inputs)
    comparison = compare_outputs([eager], [got], [layer("_int_mm")(*double)], dtype)
    assert comparison.passed, comparison


@pytest.mark.parametrize("rows", [2, 40])
def test_unsigned_bytes_with_a_zero_point(rows: int) -> None:
    x, _, weight, scales = parts(rows, torch.float32)

    def run(x: Tensor, weight: Tensor, scales: Tensor, sums: Tensor) -> Tensor:
        codes, scale = quantized(x, torch.uint8)
        return ((codes.int() @ weight.int().t()) - 128 * sums).float() * scale * scales

    inputs = (x, weight, scales, weight.sum(1, dtype=torch.int32))
    found = built(run, inputs, profile(i8=100.0))
    assert [step.kind for step in found.program.steps] == ["kernel"] * (1 if rows < 17 else 2)
    torch.testing.assert_close(found.program(list(inputs))[0], run(*inputs))


def asymmetric(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per row, with a zero point in int8."""
    least, most = x.float().amin(-1, keepdim=True).clamp(max=0), x.float().amax(-1, keepdim=True).clamp(min=0)
    scale = (most - least) / 255
    zero = (-128 - torch.round(least / scale)).clamp(-128, 127)
    return torch.clamp(torch.round(x.float() / scale) + zero, -128, 127).to(torch.int8), scale, zero.to(torch.int8)


SHIFTED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "subtracted in int32": lambda q, z, w: ((q.int() - z.int()) @ w.int().t()).float(),
    "subtracted in float32": lambda q, z, w: F.linear(q.float() - z.float(), w.float()),
    "times sums of columns": lambda q, z, w: (torch._int_mm(q, w.t()) - z.int() * w.sum(1, dtype=torch.int32)).float(),
    "times sums of columns in int64": lambda q, z, w: torch._int_mm(q, w.t()).float() - z.float() * w.sum(1).float(),
    "a constant": lambda q, z, w: ((q.int() + 7) @ w.int().t()).float(),
}


@pytest.mark.parametrize(
    ("spelling", "setting"),
    rotating(list(SHIFTED), ((1, torch.float32), (5, torch.bfloat16), (40, torch.bfloat16))),
    ids=str,
)
def test_zero_points_of_the_input(spelling: str, setting: tuple[int, torch.dtype]) -> None:
    """The weight stays in bytes; few rows are one kernel with the norm before."""
    rows, dtype = setting

    def run(x: Tensor, residual: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        codes, scale, zero = asymmetric(F.rms_norm(x, (DEPTH,)))
        return (SHIFTED[spelling](codes, zero, weight) * scale * scales).to(x.dtype) + residual

    inputs = parts(rows, dtype)
    found = built(run, inputs, profile(i8=100.0))
    assert [step.kind for step in found.program.steps] == ["kernel"] * (1 if rows < 17 else 3)
    matmuls = [n for region in found.graph.nodes for n in region.body.nodes if n.is_op("contraction")]
    assert len(matmuls) == 2 and all(v.dtype == I8 for n in matmuls for v in n.operands)
    assert not any(unproven_accesses(kernel) for kernel in found.program.kernels.values())
    double = [x.double() if x.is_floating_point() else x for x in inputs]
    comparison = compare_outputs([run(*inputs)], [found.program(list(inputs))[0]], [run(*double)], dtype)
    assert comparison.passed, comparison


UNPACKED: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda p: torch.cat([p & 15, p >> 4], -1).to(torch.int8),
    "bytes": lambda p: torch.cat([p, p], -1).view(torch.int8),
    "neighbours": lambda p: torch.stack([p & 15, p >> 4], -1).reshape(COLUMNS, DEPTH).to(torch.int8) - 8,
}


@pytest.mark.parametrize(
    ("rows", "unpacked", "spelling"),
    rotating((1, 5, 40, 2), list(UNPACKED), ("subtracted in float32", "times sums of columns")),
)
def test_bytes_that_are_computed(unpacked: str, spelling: str, rows: int) -> None:
    """The kernel unpacks the weight in registers, and sums in int32."""

    def run(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        codes, scale, zero = asymmetric(x)
        return SHIFTED[spelling](codes, zero, UNPACKED[unpacked](packed)) * scale * scales

    packed = torch.randint(0, 256, (COLUMNS, DEPTH // 2), dtype=torch.uint8)
    inputs = torch.randn(rows, DEPTH), packed, torch.rand(COLUMNS)
    found = built(run, inputs)
    exact = run(*(x.double() if x.is_floating_point() else x for x in inputs))
    assert compare_outputs([run(*inputs)], [found.program(list(inputs))[0]], [exact], torch.float32).passed


def test_a_zero_point_for_each_element_stays_with_the_codes() -> None:
    def run(q: Tensor, z: Tensor, w: Tensor) -> Tensor:
        return (q.int() - z.int()) @ w.int().t()

    q, z, w = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((3, 64), (3, 64), (8, 64)))
    for zero in (z, z[:1], z[0]):
        assert torch.equal(built(run, (q, zero, w)).program([q, zero, w])[0], run(q, zero, w))


def test_zero_points_whose_products_wrap_around() -> None:
    def run(q: Tensor, z: Tensor, w: Tensor) -> Tensor:
        return (q.int() - z) @ w.int().t()

    q, w = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((3, 64), (8, 64)))
    z = torch.tensor([[1 << 30], [-(1 << 31)], [(1 << 31) - 1]], dtype=torch.int32)
    assert torch.equal(built(run, (q, z, w)).program([q, z, w])[0], run(q, z, w))


def test_a_zero_point_so_large_that_int32_does_not_hold_the_sum() -> None:
    def run(q: Tensor, z: Tensor, w: Tensor) -> Tensor:
        return (q.float() - z.clamp(0, 1000).float()) @ w.float().t()

    inputs = (
        torch.zeros(3, 30_000, dtype=torch.uint8),
        torch.full((3, 1), 1000, dtype=torch.int32),
        torch.full((8, 30_000), -128, dtype=torch.int8),
    )
    torch.testing.assert_close(built(run, inputs).program(list(inputs))[0], torch.full((3, 8), 3.84e9))


@pytest.mark.parametrize(
    ("sizes", "dtypes"),
    rotating(
        ((3, 1, 64), (1, 1, 64), (5, 7, 1), (0, 4, 8), (4, 3, 0)),
        ((torch.int8, torch.int8), (torch.uint8, torch.int8), (torch.uint8, torch.uint8)),
    ),
    ids=str,
)
def test_the_smallest_shapes(dtypes: tuple[torch.dtype, torch.dtype], sizes: tuple[int, int, int]) -> None:
    rows, columns, depth = sizes
    x, w = (torch.full(shape, 255).to(t) for shape, t in zip(((rows, depth), (columns, depth)), dtypes, strict=True))

    def run(x: Tensor, w: Tensor) -> Tensor:
        return (x.int() @ w.int().t()) + 1

    found = compile_graph(trace(run, (x, w), symbolic=False), replace(Config(), strict=True))
    assert torch.equal(found.program([x, w])[0], run(x, w))


def test_products_of_single_bytes_are_summed_in_int32() -> None:
    x, w = (torch.full((rows, 1), -128, dtype=torch.int8) for rows in (3, 5))
    assert torch.equal(
        built(lambda x, w: torch._int_mm(x, w.t()), (x, w)).program([x, w])[0], torch.full((3, 5), 1 << 14).int()
    )


def test_sums_of_floats_that_int32_cannot_hold_stay_floats() -> None:
    x, w = (torch.full((rows, 40_000), 255, dtype=torch.uint8) for rows in (2, 8))
    found = built(lambda x, w: F.linear(x.float(), w.float()), (x, w)).program([x, w])[0]
    torch.testing.assert_close(found, torch.full((2, 8), 40_000.0 * 255 * 255), rtol=1e-4, atol=0)


@pytest.mark.parametrize("mistake", [lambda x: x.clamp(-100, 100), lambda x: x.roll(1, 1), lambda x: -x])
def test_planted_mistakes_are_found(mistake: Callable[[Tensor], Tensor]) -> None:
    x, residual, weight, scales = parts(2, torch.float32)
    right, wrong = (layer("int32")(x, residual, w, scales) for w in (weight, mistake(weight)))
    reference = layer("int32")(x.double(), residual.double(), weight, scales.double())
    assert compare_outputs([right], [right], [reference]).passed
    assert not compare_outputs([right], [wrong], [reference]).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_matmul_with_a_single_row_beside_one_with_more(dtype: torch.dtype) -> None:
    def run(x: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return F.linear(x, w) * F.linear(v.tanh(), u)

    inputs = tuple(torch.randn(shape).to(dtype) for shape in ((5, DEPTH), (1, DEPTH), (8, DEPTH), (8, DEPTH)))
    found = built(run, inputs)
    assert [step.kind for step in found.program.steps] == ["kernel"]
    exact = run(*(x.double() for x in inputs))
    assert compare_outputs([run(*inputs)], [found.program(list(inputs))[0]], [exact], dtype).passed
