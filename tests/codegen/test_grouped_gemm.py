"""Grouped GEMMs: rows with a matrix each, chosen at run time, as tokens and the weights of their experts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.analysis.machine import known_chip
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.kernel import Dot, DotTiles, Kernel, Loop, Statement, walk
from fusec.codegen.triton.schedules import schedule
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.ir.parser import parse_graph
from fusec.reference.interpreter import evaluate
from tests.codegen.test_dynamic_indices import agrees, both, program, raises
from tests.codegen.test_packed_lookups import nibbles
from tests.codegen.triton_regions import every_chip, kernel_regions, regions_of
from tests.combinations import rotating
from tests.contexts import plan_of

GATED = """graph gated(%x: {dtype}[{rows}, 40], %w: {dtype}[6, 96, 40], %ids: i64[{rows}]) {{
  %e: {dtype}[{rows}, 96, 40] = take(%w, %ids) {{dim=-3}}
  %a: {dtype}[{rows}, 1, 40] = reshape(%x) {{shape=({rows}, 1, 40)}}
  %p: {dtype}[{rows}, 96, 40] = mul(%e, %a)
  %s: {dtype}[{rows}, 96, 1] = sum(%p) {{dims=(-1,)}}
  %h: {dtype}[{rows}, 96] = reshape(%s) {{shape=({rows}, 96)}}
  %g: {dtype}[{rows}, 48] = slice(%h) {{dim=-1, start=0, stop=48, step=1}}
  %u: {dtype}[{rows}, 48] = slice(%h) {{dim=-1, start=48, stop=96, step=1}}
  %i: {dtype}[{rows}, 48] = sigmoid(%g)
  %y: {dtype}[{rows}, 48] = mul(%i, %u)
  return %y
}}"""
"""Two products of one row, of halves of its matrix, and what joins them."""

THIRDS = """graph thirds(%x: f32[{rows}, 40], %w: f32[6, {all}, 40], %ids: i64[{rows}]) {{
  %e: f32[{rows}, {all}, 40] = take(%w, %ids) {{dim=-3}}
  %a: f32[{rows}, 1, 40] = reshape(%x) {{shape=({rows}, 1, 40)}}
  %p: f32[{rows}, {all}, 40] = mul(%e, %a)
  %s: f32[{rows}, {all}, 1] = sum(%p) {{dims=(-1,)}}
  %h: f32[{rows}, {all}] = reshape(%s) {{shape=({rows}, {all})}}
  %f: f32[{rows}, {n}] = slice(%h) {{dim=-1, start=0, stop={n}, step=1}}
  %g: f32[{rows}, {n}] = slice(%h) {{dim=-1, start={n}, stop={two}, step=1}}
  %u: f32[{rows}, {n}] = slice(%h) {{dim=-1, start={two}, stop={all}, step=1}}
  %i: f32[{rows}, {n}] = mul(%f, %g)
  %y: f32[{rows}, {n}] = add(%i, %u)
  return %y
}}"""
"""Three products of one row, which share a block of columns."""

TRANSPOSED = """graph transposed(%x: f32[3, {rows}, 40], %w: f32[5, 40, 33], %ids: i64[3, {rows}], %b: f32[33]) {{
  %t: f32[5, 33, 40] @(1320, 1, 33) = permute(%w) {{dims=(0, 2, 1)}}
  %e: f32[3, {rows}, 33, 40] = take(%t, %ids) {{dim=-3}}
  %z: f32[3, {rows}, 40] = exp(%x)
  %a: f32[3, {rows}, 1, 40] = reshape(%z) {{shape=(3, {rows}, 1, 40)}}
  %p: f32[3, {rows}, 33, 40] = mul(%a, %e)
  %s: f32[3, {rows}, 33, 1] = sum(%p) {{dims=(-1,)}}
  %h: f32[3, {rows}, 33] = reshape(%s) {{shape=(3, {rows}, 33)}}
  %y: f32[3, {rows}, 33] = add(%h, %b)
  return %y
}}"""
"""Contiguous along the columns; the rows are two axes, and computed."""

BEHIND = (
    "graph behind(%x: f32[7, 8], %w: f32[3, 8, 4], %n: i32[3]) {\n  %ends: i32[3] = cumsum(%n) {dim=-1}\n"
    '  %y: f32[7, 4] = opaque(%x, %w, %ends) {target="aten._grouped_mm.default", args=($0, $1, $2), kwargs=(), '
    "operand_types=(f32[7, 8], f32[3, 8, 4], i32[3])}\n  return %y\n}"
)
"""A library's grouped GEMM, with more rows than its groups have."""


def chosen(rows: int, groups: int) -> Tensor:
    """All in one group, or in several with one of them empty."""
    ids = torch.randint(groups, (rows,), generator=torch.Generator().manual_seed(rows))
    return torch.where(ids == 2, groups - 1, ids)


def grouped_products(kernel: Kernel) -> list[Statement]:
    dots = (s for s in walk(kernel.body) if isinstance(s, (Dot, DotTiles)))
    return [s for s in dots if isinstance(s, DotTiles) or s.any_rows]


@both
@pytest.mark.parametrize("rows", [1, 2, 9, pytest.param(300, marks=pytest.mark.thorough)])
def test_rows_are_multiplied_by_the_matrices_that_they_choose(target: str, rows: int) -> None:
    inputs = torch.randn(rows, 40), torch.randn(6, 96, 40), chosen(rows, 6)
    made = agrees(GATED.format(rows=rows, dtype="f32"), *inputs, kinds=["kernel"], target=target)
    (kernel,) = made.kernels.values()
    assert unproven_accesses(kernel) == []
    assert len(grouped_products(kernel)) == 2


@both
def test_three_products_of_a_row_are_one_kernel(target: str) -> None:
    inputs = torch.randn(9, 40), torch.randn(6, 96, 40), chosen(9, 6)
    text = THIRDS.format(rows=9, n=32, two=64, all=96)
    (kernel,) = agrees(text, *inputs, kinds=["kernel"], target=target).kernels.values()
    assert len(grouped_products(kernel)) == 3


@both
@pytest.mark.parametrize("rows", [1, 4, pytest.param(70, marks=pytest.mark.thorough)])
def test_matrices_may_be_transposed_and_rows_computed(target: str, rows: int) -> None:
    inputs = torch.randn(3, rows, 40), torch.randn(5, 40, 33), chosen(3 * rows, 5).reshape(3, rows), torch.randn(33)
    made = agrees(TRANSPOSED.format(rows=rows), *inputs, kinds=["kernel"], target=target)
    (kernel,) = made.kernels.values()
    assert unproven_accesses(kernel) == []
    assert len(grouped_products(kernel)) == 1


@both
@pytest.mark.parametrize(("dtype", "rows"), rotating(("bf16", "f16", "f64"), (3, 40, 700)))
def test_all_rows_may_choose_one_matrix_in_any_dtype(dtype: str, rows: int, target: str) -> None:
    """More rows than one block of them has, or few enough that the matrix is not transposed."""
    to: Any = {"bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}[dtype]
    inputs = torch.randn(rows, 40).to(to), torch.randn(6, 96, 40).to(to), torch.full((rows,), 5)
    made = program(GATED.format(rows=rows, dtype=dtype), target)
    (y,) = made(list(inputs))
    h = inputs[0].double() @ inputs[1][5].double().T
    torch.testing.assert_close(y.double(), h[:, :48].sigmoid() * h[:, 48:], rtol=2e-2, atol=2e-2)
    assert grouped_products(next(iter(made.kernels.values())))


@both
def test_rows_behind_the_last_group_have_no_matrix(target: str) -> None:
    """What is computed for them is undefined, as in the library."""
    x, w, counts = torch.randn(7, 8), torch.randn(3, 8, 4), torch.tensor([2, 0, 3], dtype=torch.int32)
    made = compile_graph(parse_graph(BEHIND), Config(strict=True, target=target)).program
    assert "opaque" not in {step.kind for step in made.steps}
    (y,) = made([x, w, counts])
    torch.testing.assert_close(y[:5], torch.cat([x[:2] @ w[0], x[2:5] @ w[2]]))


@both
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_the_number_of_rows_may_be_unknown(target: str, rows: int) -> None:
    text = GATED.format(rows="s0", dtype="f32").replace("gated(", "gated(%n: int(s0), ")
    made, inputs = program(text, target), (torch.randn(rows, 40), torch.randn(6, 96, 40), chosen(rows, 6))
    (kernel,) = made.kernels.values()
    assert unproven_accesses(kernel) == []
    assert len(grouped_products(kernel)) == 2
    expected = evaluate(parse_graph(text), [rows, *inputs], {"s0": rows})
    torch.testing.assert_close(made([rows, *inputs]), expected)


def test_depths_that_are_equal_only_for_some_sizes_stay_the_librarys() -> None:
    """Where all sizes are symbols, half of a gate's columns and the depth of the next matrices are two expressions."""
    text = BEHIND.replace("graph behind(", "graph g(%n: int(s0), ").replace("f32[7, 8]", "f32[7, s0]")
    graph = parse_graph(text.replace("%n: i32", "%c: i32").replace("cumsum(%n)", "cumsum(%c)"))
    made = compile_graph(graph, Config(strict=True))
    assert "opaque" in {step.kind for step in made.program.steps}
    assert not made.remarks.of("failure")


@both
def test_a_matrix_that_does_not_exist_is_reported(target: str) -> None:
    made = program(GATED.format(rows=3, dtype="f32"), target)
    with raises(target, 6, 0, 6):
        made([torch.randn(3, 40), torch.randn(6, 96, 40), torch.tensor([0, 6, 1])])


def test_a_block_of_three_products_has_powers_of_two_of_columns() -> None:
    text = THIRDS.format(rows=2000, n=2048, two=4096, all=6144)
    (region,) = kernel_regions(parse_graph(text))
    kernel = schedule(plan_of(region), "thirds")
    steps = {s.step for s in walk(kernel.body) if isinstance(s, Loop) and s.kind == "tile"}
    assert len(grouped_products(kernel)) == 3 and all(n & (n - 1) == 0 for n in steps)


@every_chip
@pytest.mark.parametrize("rows", [3, 2000])
@pytest.mark.parametrize("packed", [False, True])
def test_grouped_products_compile_for_chips(rows: int, packed: bool, chip: str) -> None:
    """Matrices of bfloat16, or of four bits with a scale for each group; few rows of a matrix and many."""
    triton = pytest.importorskip("fusec.codegen.triton.compile")

    def gated(ids: Tensor, codes: Tensor, scales: Tensor, x: Tensor) -> Tensor:
        matrices = nibbles(codes, scales).to(x.dtype) if packed else codes
        gate, up = torch.bmm(matrices[ids], x[..., None])[..., 0].chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    codes = torch.empty(8, 512, 128, dtype=torch.uint8) if packed else torch.empty(8, 512, 256, dtype=torch.bfloat16)
    floats = torch.empty(8, 512, 32, dtype=torch.bfloat16), torch.empty(rows, 256, dtype=torch.bfloat16)
    (region,) = regions_of(gated, [torch.empty(rows, dtype=torch.int64), codes, *floats])
    kernel = schedule(plan_of(region), "gated", known_chip(chip))
    report = triton.compile_for(kernel, chip)
    assert report.ok and report.multiplies_halves and report.assertions, report
