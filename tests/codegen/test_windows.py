"""Windows that move on: what an input holds goes some rows towards its start, in its own memory where that is safe."""

import pytest
import torch

from fusec.analysis.memory import moved_bytes
from fusec.codegen import target_named
from fusec.codegen.program.program import build_program
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.config import Config
from fusec.ir.parser import parse_graph
from fusec.ir.types import DTYPES
from fusec.passes.grouping import Group
from fusec.reference.dtypes import torch_dtype
from fusec.reference.interpreter import evaluate
from tests.codegen.test_dynamic_indices import agrees, grouped, program
from tests.contexts import context_of


def moving(shape: tuple[int, ...], dim: int, step: int, dtype: str = "f32", spelled: str = "%rest, %new") -> str:
    """A graph that moves what an input holds by some rows along a dim, and puts new ones where place is."""
    rank, n = len(shape), shape[dim]
    new, rest = ((*shape[: dim + rank], m, *shape[dim + rank + 1 :]) for m in (step, n - step))
    start = step if spelled == "%rest, %new" else 0
    return f"""graph move(%x: {dtype}{list(shape)}, %y: {dtype}{list(new)}) {{
      %new: {dtype}{list(new)} = neg(%y)
      %rest: {dtype}{list(rest)} = slice(%x) {{dim={dim}, start={start}, stop={start + n - step}, step=1}}
      %all: {dtype}{list(shape)} = concat({spelled}) {{dim={dim}}}
      %w: {dtype}{list(shape)} = write(%x, %all)
      %read: {dtype}{[*shape[:-1], 1]} = sum(%all) {{dims=(-1,)}}
      return %read
    }}"""


@pytest.mark.parametrize(("shape", "dim", "step"), [
    ((1, 2, 9, 20), -2, 1),
    ((2, 33, 20), -2, 4),
    ((2, 2, 20), -2, 1),
    ((9, 20), -2, 1),
    ((2, 70), -1, 1),  # lanes along what moves
    ((70,), -1, 3),
    ((2, 9, 4, 5), -3, 2),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64"])
def test_a_window_moves_on_in_place(shape: tuple[int, ...], dim: int, step: int, dtype: str) -> None:
    x = (10 * torch.randn(shape)).to(torch_dtype(DTYPES[dtype]))
    text, y = moving(shape, dim, step, dtype), x.narrow(dim, 0, step).clone()
    kernel, *_ = agrees(text, x, y, kinds=["kernel", "kernel"]).kernels.values()
    assert sorted(b.role for b in kernel.buffers) == ["input", "update"] and unproven_accesses(kernel) == []
    region = next(n for n in grouped(text).nodes if n.is_op("region"))
    assert moved_bytes(region) == 2 * x.nbytes + y.nbytes


def test_a_window_moves_in_place_though_a_product_makes_its_new_row() -> None:
    text = """graph move(%x: f32[1, 9, 20], %a: f32[1, 1, 32], %w: f32[20, 32]) {
      %new: f32[1, 1, 20] = contraction(%a, %w) {spec="abz,cz->abc"}
      %rest: f32[1, 8, 20] = slice(%x) {dim=-2, start=1, stop=9, step=1}
      %all: f32[1, 9, 20] = concat(%rest, %new) {dim=-2}
      %done: f32[1, 9, 20] = write(%x, %all)
      return %done
    }"""
    agrees(text, torch.randn(1, 9, 20), torch.randn(1, 1, 32), torch.randn(20, 32), kinds=["kernel", "kernel"])
    *_, region = [n for n in grouped(text).nodes if n.is_op("region")]
    assert moved_bytes(region) == (2 * 9 + 1) * 20 * 4


def test_a_window_moves_in_place_though_rows_are_summed_for_its_new_one() -> None:
    """The concatenation goes with what writes it, not with the sums that make a part of it."""
    text = """graph move(%x: f32[1, 9, 20], %y: f32[1, 1, 20]) {
      %total: f32[1, 1, 1] = sum(%y) {dims=(-1,)}
      %new: f32[1, 1, 20] = div(%y, %total)
      %rest: f32[1, 8, 20] = slice(%x) {dim=-2, start=1, stop=9, step=1}
      %all: f32[1, 9, 20] = concat(%rest, %new) {dim=-2}
      %done: f32[1, 9, 20] = write(%x, %all)
      return %done
    }"""
    agrees(text, torch.randn(1, 9, 20), torch.randn(1, 1, 20), kinds=["kernel", "kernel"])
    *_, region = [n for n in grouped(text).nodes if n.is_op("region")]
    assert moved_bytes(region) == (2 * 9 * 20 + 20 + 1) * 4


def test_a_window_of_which_half_is_new_is_right_too() -> None:
    """Its two parts are one loop."""
    agrees(moving((3, 12, 20), -2, 6), torch.randn(3, 12, 20), torch.randn(3, 6, 20), kinds=["kernel", "kernel"])


def test_a_window_is_read_by_the_kernel_that_moves_it() -> None:
    text = (
        moving((2, 33, 20), -2, 4).replace("sum(%all) {dims=(-1,)}", "neg(%all)").replace("[2, 33, 1]", "[2, 33, 20]")
    )
    agrees(text, torch.randn(2, 33, 20), torch.randn(2, 4, 20), kinds=["kernel"])


@pytest.mark.parametrize("spelled", [
    "%new, %rest",  # towards the end
    "%rest, %part",  # around: the first row is read behind the one that replaces it
    "%rest, %copy",
])  # fmt: skip
@pytest.mark.parametrize(("shape", "dim"), [((2, 9, 20), -2), ((2, 70), -1), ((3, 2, 20), -3)])
def test_what_moves_otherwise_moves_through_memory_of_its_own(shape: tuple[int, ...], dim: int, spelled: str) -> None:
    text = moving(shape, dim, 1, spelled=spelled if spelled == "%new, %rest" else "%rest, %new")
    if spelled != "%new, %rest":
        first = f"slice(%x) {{dim={dim}, start=0, stop=1, step=1}}"
        text = text.replace("neg(%y)", first if spelled == "%rest, %part" else "neg(%first)")
        text = text.replace("%new:", f"%first: f32{list(torch.empty(shape).narrow(dim, 0, 1).shape)} = {first} %new:")
    x = torch.randn(shape)
    expected = [x.clone(), x.narrow(dim, 0, 1).clone()]
    found = [a.clone() for a in expected]
    (value,) = evaluate(parse_graph(text), expected, {}, mutate=True)
    torch.testing.assert_close(program(text)(list(found)), [value])
    torch.testing.assert_close(found, expected)


def test_on_a_gpu_a_window_moves_through_memory_of_its_own() -> None:
    """Lanes see what others have stored. Run by Triton's interpreter."""
    pytest.importorskip("triton")
    graph, x, y = parse_graph(moving((2, 9, 20), -2, 1)), torch.randn(2, 9, 20), torch.randn(2, 1, 20)
    expected = [x.clone(), y]
    value = evaluate(graph, expected, {}, mutate=True)
    Group().apply(graph, context_of("triton", Config(small_m=0)))
    made = build_program(graph, target_named("triton"), context_of("triton", Config(strict=True)))
    assert [step.kind for step in made.steps] == ["kernel", "kernel"]
    torch.testing.assert_close([*made([x, y]), x], [*value, expected[0]])
