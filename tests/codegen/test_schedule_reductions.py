"""Reductions as loops: long sums stay exact, columns loop inside their lanes, comparisons see rounded values."""

from typing import Any

import pytest
import torch

from fusec.codegen.cpp.printer import print_kernel
from fusec.codegen.cpp.schedules import schedule as cpp_schedule
from fusec.codegen.tile.bounds import accesses, unproven_accesses
from fusec.codegen.tile.chains import Run, chained
from fusec.codegen.tile.kernel import Loop, Store, walk
from fusec.codegen.tile.rows import Tiling
from fusec.codegen.triton.schedules import schedule as triton_schedule
from fusec.compiler import Compiled, compile_graph
from fusec.config import Config
from fusec.errors import BuildError
from fusec.ir.graph import Graph, Value
from fusec.ir.types import BF16, F32, I64, DType, Size, TensorType, contiguous_strides, symbol
from fusec.loops.affine import Axis
from fusec.loops.kinds import Limits
from fusec.loops.plan import plan_kernel
from fusec.reference.contract import compare_outputs
from fusec.reference.interpreter import evaluate


class Body(Graph):
    """A graph that is quick to write."""

    def tensor(self, *shape: Size, dtype: DType = F32) -> Value:
        return self.add_input(TensorType(dtype, shape, contiguous_strides(shape)))

    def do(self, op: str, *operands: Value, **attributes: Any) -> Value:
        return self.add_node(op, operands, attributes).result


def compiled(body: Body, *outputs: Value) -> Compiled:
    body.set_outputs(outputs)
    return compile_graph(body, Config(strict=True))


def longest_chain(loops: list[Run]) -> int:
    """Additions into one accumulator, lanes apart."""
    longest = steps = 1
    for loop in reversed(loops):
        size = loop.within or loop.axis.size
        assert isinstance(size, int)
        steps = (1 if loop.ends_chain else steps) * max(1, -(-size // (loop.covers or loop.step)))
        longest = max(longest, steps)
    return longest


@pytest.mark.parametrize(
    "sizes",
    [(7,), (32,), (33,), (1000,), (30000,), (10**7,), (8, 1024), (1024, 8), (4, 16, 40), (40, 40, 40), (0, 5), (5, 0)],
)
def test_no_chain_is_long(sizes: tuple[int, ...]) -> None:
    loops = chained([(Axis(n), 1) for n in sizes])
    assert longest_chain(loops) <= 32
    assert [loop.axis.size for loop in loops if not loop.covers] == list(sizes)


def test_tiles_have_longer_chains_and_unknown_sizes_are_cut() -> None:
    axis = Axis(2048)
    assert chained([(axis, 16)]) == [Run(axis, 16)]
    assert longest_chain(chained([(Axis(1 << 18), 16)])) <= 128
    assert sum(loop.ends_chain for loop in chained([(Axis(symbol("s0")), 1)])) == 4
    assert sum(loop.ends_chain for loop in chained([(Axis(symbol("s0")), 1)], cuts=1)) == 1


@pytest.mark.parametrize("shape", [(5000, 24), (2_000_000, 2), (3, 2000, 24), (2000, 3, 24)], ids=str)
@pytest.mark.parametrize("rows", [None, symbol("s0")], ids=["static", "symbolic"])
def test_sums_over_many_rows_are_as_exact_as_eagers(shape: tuple[int, ...], rows: Size | None) -> None:
    body = Body()
    x = body.tensor(*(rows if rows is not None and n > 24 else n for n in shape))
    total = body.do("sum", body.do("mul", x, x), dims=tuple(range(-len(shape), -1)))
    values = torch.rand(shape)
    found = compiled(body, total).program([values])
    dims = tuple(range(len(shape) - 1))
    expected, exact = ((v * v).sum(dims, keepdim=True) for v in (values, values.double()))
    assert compare_outputs([expected], found, [exact], torch.float32).passed


def test_columns_that_are_used_again_below_their_sum() -> None:
    body = Body()
    x = body.tensor(6, 40)
    share = body.do("div", x, body.do("sum", body.do("exp", x), dims=(-2,)))
    values = torch.randn(6, 40)
    found = compiled(body, share).program([values])[0]
    torch.testing.assert_close(found, values / values.exp().sum(0))


def test_comparisons_of_half_values_see_them_rounded() -> None:
    body = Body()
    x, y = body.tensor(6, 40, dtype=BF16), body.tensor(6, 40, dtype=BF16)
    product = body.do("mul", x, y)
    is_largest = body.do("eq", product, body.do("max", product, dims=(-1,)))
    unchanged = body.do("eq", x, body.do("add", x, body.constant(1e-6, BF16)))
    whole = body.do("cast", product, dtype=I64)
    run = compiled(body, is_largest, unchanged, whole).program
    values = [torch.randn(6, 40).bfloat16() * 30, torch.randn(6, 40).bfloat16()]
    for found, expected in zip(run(list(values)), evaluate(body, values), strict=True):
        assert torch.equal(found, expected)


def test_what_is_dear_is_kept_once_for_each_column() -> None:
    body = Body()
    e = body.do("exp", x := body.tensor(6, 300))
    y = body.do("div", e, body.do("sum", e, dims=(-1,)))
    body.set_outputs([y])
    assert x.shape == (6, 300)
    kernel = cpp_schedule(plan_kernel(body, Limits()), "kernel", Tiling(16))
    assert [b.numel for b in kernel.buffers if b.role == "scratch"] == [300]
    assert all(a.statement.offset.free_symbols for a in accesses(kernel)) and not unproven_accesses(kernel)


def test_what_no_later_loop_reads_is_not_kept() -> None:
    """The shares are summed in the loop that computes them; only what is computed from them is read later."""
    body = Body()
    e = body.do("exp", body.tensor(6, 300))
    share = body.do("div", e, body.do("sum", e, dims=(-1,)))
    scaled = body.do("exp", share)
    largest, total = body.do("max", scaled, dims=(-1,)), body.do("sum", share, dims=(-1,))
    body.set_outputs([body.do("div", scaled, largest), total])
    kernel = cpp_schedule(plan_kernel(body, Limits()), "kernel", Tiling(16))
    assert [b.numel for b in kernel.buffers if b.role == "scratch"] == [300, 300]  # e and scaled


@pytest.mark.parametrize(("columns", "lanes"), [(5, 8), (300, 512), (512, 512), (40000, 16384)])
def test_a_tile_that_may_hold_a_row_is_no_wider(columns: int, lanes: int) -> None:
    body = Body()
    x = body.tensor(6, columns)
    body.set_outputs([body.do("div", x, body.do("max", x, dims=(-1,)))])
    kernel = triton_schedule(plan_kernel(body, Limits()), "kernel")
    steps = [loop.step for loop in walk(kernel.body) if isinstance(loop, Loop) and loop.kind == "tile"]
    assert steps == [lanes] * (1 if columns <= lanes else 2)  # a row that one tile holds is loaded once


def test_reductions_over_different_columns_have_loops_of_their_own() -> None:
    body = Body()
    x, y = body.tensor(6, 40), body.tensor(6, 23)
    total, largest = body.do("sum", x, dims=(-1,)), body.do("max", y, dims=(-1,))
    rows = body.do("mul", total, largest)
    result = compiled(body, rows, body.do("sub", y, rows), body.do("div", x, largest))
    inputs = [torch.randn(6, 40), torch.randn(6, 23)]
    found = result.program(list(inputs))
    reference = evaluate(result.imported, inputs, dtype=torch.float64)
    assert compare_outputs(evaluate(result.imported, inputs), found, reference).passed


@pytest.mark.parametrize("looked_up", [False, True])
def test_lanes_lie_where_elements_do_and_not_where_few_numbers_do(looked_up: bool) -> None:
    """Rows that are weighed and added up, as those of experts: the weights lie along the sum, all else beside it."""
    body = Body()
    x, weights = body.tensor(40, 6, 512), body.tensor(40, 6, 1)
    if looked_up:
        places = body.tensor(40, 6, dtype=I64)
        x = body.do("take", body.tensor(240, 512), places, dim=-2)
    total = body.do("sum", body.do("mul", x, weights), dims=(-2,))
    ((kernel,),) = [compiled(body, total).program.kernels.values()]
    tiles = [s for s in walk(kernel.body) if isinstance(s, Loop) and s.kind == "tile"]
    (store,) = [s for s in walk(kernel.body) if isinstance(s, Store)]
    (tile,) = [s for s in tiles if store in walk(s.body)]  # another may check the places ahead
    assert tile.axis in map(str, store.offset.free_symbols)


def test_lanes_lie_along_a_row_whose_elements_lie_side_by_side() -> None:
    """Also where what is stored, a number or two for each row, lies side by side across rows."""
    body = Body()
    x, weight = body.tensor(40, 512), body.tensor(512)
    total = body.do("sum", body.do("mul", x, weight), dims=(-1,))
    ((kernel,),) = [compiled(body, total, body.do("exp", total)).program.kernels.values()]
    tiles = [s for s in walk(kernel.body) if isinstance(s, Loop) and s.kind == "tile"]
    stores = [s for s in walk(kernel.body) if isinstance(s, Store)]
    assert tiles and len(stores) == 2
    assert not {t.axis for t in tiles} & {str(symbol) for s in stores for symbol in s.offset.free_symbols}


@pytest.mark.parametrize(("size", "step"), [(3, 1), (4, 3), (20, 7), (1, 2)])
def test_sums_over_windows_are_one_kernel(size: int, step: int) -> None:
    body = Body()
    x, w = body.tensor(3, 20, 37), body.tensor(size)
    windows = body.do("window", x, dim=-2, size=size, step=step)
    made = compiled(body, body.do("tanh", body.do("sum", body.do("mul", windows, w), dims=(-1,))))
    assert [step.kind for step in made.program.steps] == ["kernel"]
    assert not any(unproven_accesses(kernel) for kernel in made.program.kernels.values())
    values, weights = torch.randn(3, 20, 37), torch.randn(size)
    expected, exact = (
        (x.unfold(1, size, step) * w).sum(-1, keepdim=True).tanh()
        for x, w in ((values, weights), (values.double(), weights.double()))
    )
    assert compare_outputs([expected], made.program([values, weights]), [exact]).passed


@pytest.mark.parametrize(("shape", "lanes"), [((1, 1), []), ((3, 2), [2]), ((1, 16), [16]), ((16, 1), [16])], ids=str)
def test_lanes_lie_along_an_axis_that_has_elements(shape: tuple[int, ...], lanes: list[int]) -> None:
    body = Body()
    ((kernel,),) = [compiled(body, body.do("exp", body.tensor(*shape))).program.kernels.values()]
    assert [s.stop for s in walk(kernel.body) if isinstance(s, Loop) and s.kind == "tile"] == lanes


def test_a_store_in_a_tile_loop_that_never_runs_is_refused() -> None:
    """A tile may hold a row of no elements on a GPU; on a CPU it is a loop, and the sum would not be stored."""
    body = Body()
    body.set_outputs([body.do("sum", body.tensor(3, 0), dims=(-1,))])
    plan = plan_kernel(body, Limits())
    print_kernel(cpp_schedule(plan, "kernel", Tiling(16)))
    with pytest.raises(BuildError, match="never runs stores an element"):
        print_kernel(cpp_schedule(plan, "kernel", Tiling(16, longest_row=16)))
