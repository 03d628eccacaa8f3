"""Loop nests of regions: views vanish, axes are split where they are needed, and impossible nests are refused."""

from dataclasses import replace
from typing import Any

import pytest

from fusec.errors import ScheduleError
from fusec.ir.graph import Graph, Value
from fusec.ir.types import BF16, F32, Size, TensorType, contiguous_strides, symbol
from fusec.loops.indexing import lower_to_loops
from fusec.loops.kinds import Limits, classify
from fusec.loops.recomputation import evaluations, repetitions
from tests.contexts import context_of


class Body(Graph):
    """A graph that is quick to write."""

    def tensor(self, *shape: Size) -> Value:
        return self.add_input(TensorType(F32, shape, contiguous_strides(shape)))

    def do(self, op: str, *operands: Value, **attributes: Any) -> Value:
        return self.add_node(op, operands, attributes).result


def rotary(body: Body, x: Value, cos: Value, sin: Value, half: int) -> Value:
    low = body.do("slice", x, dim=-1, start=0, stop=half, step=1)
    high = body.do("slice", x, dim=-1, start=half, stop=2 * half, step=1)
    rotated = body.do("concat", body.do("neg", high), low, dim=-1)
    return body.do("add", body.do("mul", x, cos), body.do("mul", rotated, sin))


def test_rotary_embedding_is_two_segments_over_one_axis() -> None:
    body = Body()
    x, cos, sin = body.tensor(2, 4, 8, 64), body.tensor(1, 1, 8, 64), body.tensor(1, 1, 8, 64)
    body.set_outputs([rotary(body, x, cos, sin, 32)])
    nest = lower_to_loops(body)
    assert len(nest.outputs) == 2
    assert len(nest.axes[3]) == 1
    assert nest.axes[3][0].size == 32
    assert classify(nest).kind == "pointwise"


def test_heads_split_out_of_a_row() -> None:
    body = Body()
    s = symbol("s0")
    x = body.tensor(s, 8, 256)
    heads = body.do("permute", body.do("reshape", x, shape=(s, 8, 4, 64)), dims=(0, 2, 1, 3))
    merged = body.do("reshape", body.do("permute", body.do("exp", heads), dims=(0, 2, 1, 3)), shape=(s, 8, 256))
    body.set_outputs([merged])
    nest = lower_to_loops(body)
    assert [axis.size for axis in nest.axes[2]] == [4, 64]
    assert all(item.kind in ("load", "pointwise") for item in nest.walk())


def test_two_reductions_over_a_row_share_its_loop() -> None:
    body = Body()
    x = body.tensor(6, 40)
    mean = body.do("sum", x, dims=(-1,))
    centred = body.do("sub", x, mean)
    body.set_outputs([body.do("div", centred, body.do("sum", body.do("mul", centred, centred), dims=(-1,)))])
    shape = classify(lower_to_loops(body))
    assert shape.kind == "row"
    assert len({r.bound for r in shape.reductions}) == 1
    assert [axis.size for axis in shape.rows] == [6]


def test_reductions_over_different_rows_are_refused() -> None:
    body = Body()
    x = body.tensor(6, 40)
    both = body.do("add", body.do("sum", x, dims=(-1,)), body.do("sum", x, dims=(-2,)))
    body.set_outputs([both])
    with pytest.raises(ScheduleError, match="different rows"):
        classify(lower_to_loops(body))


def test_a_matmul_of_a_matmul_is_refused() -> None:
    body = Body()
    x, w, v = body.tensor(2, 16), body.tensor(32, 16), body.tensor(8, 32)
    hidden = body.do("contraction", x, w, spec="az,bz->ab")
    body.set_outputs([body.do("contraction", hidden, v, spec="az,bz->ab")])
    with pytest.raises(ScheduleError):
        classify(lower_to_loops(body), Limits(16))


def test_concat_along_a_symbolic_dim_is_refused() -> None:
    body = Body()
    s = symbol("s0")
    body.set_outputs([body.do("concat", body.tensor(2, s), body.tensor(2, 3), dim=-1)])
    with pytest.raises(ScheduleError):
        lower_to_loops(body)


def test_a_result_whose_rows_are_flattened_has_the_axes_of_the_other() -> None:
    body, batch = Body(), symbol("s0")
    x = body.tensor(batch, 5, 8)
    h = body.do("add", x, x)
    rows = body.do("reshape", h, shape=(5 * batch, 8))
    body.set_outputs([h, body.do("sub", rows, body.do("sum", rows, dims=(-1,)))])
    nest = lower_to_loops(body)
    assert [[axis.size for axis in dim] for dim in nest.axes] == [[batch], [5], [8], []]
    assert classify(nest).kind == "row" and not repetitions(evaluations(nest))


def test_two_dims_of_one_size_have_an_axis_each() -> None:
    body = Body()
    x = body.tensor(2, 3, 4)
    permuted = body.do("exp", body.do("permute", x, dims=(2, 0, 1)))
    part = body.do("neg", body.do("slice", x, dim=-2, start=0, stop=3, step=2))
    body.set_outputs([permuted, part])
    for output in lower_to_loops(body).outputs:
        axes = [axis for at in output.index for axis in at.axes]
        assert len(axes) == len(set(axes)) == 3


def test_windows_add_an_axis_to_an_index() -> None:
    body = Body()
    x, w = body.tensor(2, 5, 40), body.tensor(5, 4)
    windows = body.do("window", body.do("exp", x), dim=-1, size=4, step=3)
    weighed = body.do("mul", windows, body.do("reshape", w, shape=(5, 1, 4)))
    body.set_outputs([body.do("sum", weighed, dims=(-1,))])
    nest = lower_to_loops(body)
    (load,) = (item for item in nest.walk() if item.kind == "load" and item.value is x)
    ((at, three), (within, one)) = load.index[2].terms
    assert (at.size, three, within.size, one) == (13, 3, 4, 1) and load.index[2].maximum() == 39
    assert classify(nest).kind == "row"


def test_outputs_of_other_ranks_need_equal_shapes() -> None:
    body = Body()
    x, y = body.do("exp", body.tensor(12)), body.do("exp", body.tensor(2, 1, 1))
    body.set_outputs([x, y])
    with pytest.raises(ScheduleError, match="different shapes"):
        lower_to_loops(body)
    body.set_outputs([x, body.do("exp", body.tensor(1, 1, 12))])
    assert len(lower_to_loops(body).outputs) == 2


@pytest.mark.parametrize(("parts", "fits"), [(16, True), (17, False)])
def test_a_kernel_has_at_most_16_segments(parts: int, fits: bool) -> None:
    body = Body()
    joined = body.do("concat", *(body.do("exp", body.tensor(4, 8)) for _ in range(parts)), dim=-1)
    body.set_outputs([joined])
    if fits:
        assert len(lower_to_loops(body).outputs) == parts
    else:
        with pytest.raises(ScheduleError, match="too many segments"):
            lower_to_loops(body)


@pytest.mark.parametrize(
    ("left", "right", "spec", "why"),
    [
        ((3, 64), (64,), "az,z->a", "it has one column"),
        ((3,), (40, 64), "a,bz->ab", "an operand lacks the summed dim"),
        ((2, 3, 64), (2, 40, 64), "abz,acz->abc", "it is batched"),
        ((3, symbol("s0")), (40, symbol("s0")), "az,bz->ab", "the size s0 is not known"),
    ],
)  # fmt: skip
def test_a_matmul_without_a_kernel_has_a_reason(
    left: tuple[Size, ...], right: tuple[Size, ...], spec: str, why: str
) -> None:
    body = Body()
    body.set_outputs([body.do("contraction", body.tensor(*left), body.tensor(*right), spec=spec)])
    with pytest.raises(ScheduleError, match=why):
        classify(lower_to_loops(body), Limits(16))


SUMMED, ALONG = "the summed dim is not contiguous", "its weight is not contiguous along the summed dim"
APART = "the summed dims of its left operand are not contiguous"


@pytest.mark.parametrize(
    ("left", "right", "spec", "why"),
    [
        ((40, 64), (24, 64), "az,bz->ab", ""),
        ((40, 64), (64, 24), "az,zb->ab", ""),
        ((64, 40), (24, 64), "za,bz->ab", SUMMED),
        ((40, 4, 6), (24, 4, 6), "ayz,byz->ab", ""),
        ((4, 40, 6), (24, 4, 6), "yaz,byz->ab", APART),
        ((40, 64), (24, 64, 3), "az,bzc->abc", ""),
        ((40, 64), (24, 64, 3), "az,bzc->acb", ALONG),
    ],
)
def test_a_matmul_that_is_no_large_m_gemm_has_a_reason(
    left: tuple[Size, ...], right: tuple[Size, ...], spec: str, why: str
) -> None:
    body, limits = Body(), replace(context_of().limits, many=frozenset({F32}))
    product = body.do("contraction", body.tensor(*left), body.tensor(*right), spec=spec)
    body.set_outputs([product])
    if why:
        with pytest.raises(ScheduleError, match=why):
            classify(lower_to_loops(body), limits)
        return
    assert classify(lower_to_loops(body), limits).many
    body.set_outputs([product, body.do("exp", body.inputs[0])])
    with pytest.raises(ScheduleError, match="an output does not depend on a matmul"):
        classify(lower_to_loops(body), limits)


def test_operands_of_a_large_m_gemm_may_have_any_layout() -> None:
    limits = Limits(16, frozenset({F32}))
    for left, right, spec in (((64, 40), (24, 64), "za,bz->ab"), ((40, 4, 6), (24, 4, 6), "ayz,byz->ab")):
        body = Body()
        body.set_outputs([body.do("contraction", body.tensor(*left), body.tensor(*right), spec=spec)])
        assert classify(lower_to_loops(body), limits).many


def test_a_large_m_gemm_has_no_prologue_and_a_type_of_the_target() -> None:
    body = Body()
    x, w = body.tensor(40, 64), body.tensor(24, 64)
    body.set_outputs([body.do("contraction", body.do("exp", x), w, spec="az,bz->ab")])
    with pytest.raises(ScheduleError, match="its left operand is computed in the same kernel"):
        classify(lower_to_loops(body), Limits(16, frozenset({F32})))
    body.set_outputs([body.do("contraction", x, w, spec="az,bz->ab")])
    with pytest.raises(ScheduleError, match="the vendor's GEMM of f32 is faster"):
        classify(lower_to_loops(body), Limits(16, frozenset({BF16})))


@pytest.mark.parametrize(("rows", "many"), [(1, False), (16, False), (17, True), (symbol("s0"), True)])
def test_few_rows_are_a_small_m_gemm(rows: Size, many: bool) -> None:
    body = Body()
    body.set_outputs([body.do("contraction", body.tensor(rows, 64), body.tensor(24, 64), spec="az,bz->ab")])
    assert classify(lower_to_loops(body), Limits(16, frozenset({F32}))).many == many
