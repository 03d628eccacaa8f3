"""Bounds proofs: right kernels are proved for all sizes, and each planted overrun is found."""

from dataclasses import replace

import pytest
import sympy

from fusec.codegen.tile.bounds import size_limits, unproven_accesses
from fusec.codegen.tile.kernel import Buffer, Constant, Kernel, Load, Loop, Store
from fusec.ir.graph import Graph
from fusec.ir.types import F32, TensorType
from tests.codegen.tile_programs import (
    ROW,
    J,
    S,
    column_sum,
    layer_norm,
    one,
    pointwise,
    softmax,
    sum_of_chosen,
    transpose,
)

KERNELS = [
    softmax(3, 37), softmax(S, 37), softmax(S, 37, block=16), layer_norm(S, 45), column_sum(S, 33), column_sum(7, 33),
    sum_of_chosen(S, 33), transpose(5, 3), one("neg", ["a"], F32, size=S * 7), pointwise([], [F32], S, [("a", F32)]),
]  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_right_kernels_are_proved(kernel):
    assert unproven_accesses(kernel) == []


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_a_buffer_short_by_one_is_found(kernel):
    for number, buffer in enumerate(kernel.buffers):
        short = (*kernel.buffers[:number], replace(buffer, numel=buffer.numel - 1), *kernel.buffers[number + 1 :])
        found = unproven_accesses(replace(kernel, buffers=short))
        assert found and all(access.statement.buffer == buffer.name for access in found)


def loads(offset, numel, *loops):
    body = (Load("x", "a", sympy.sympify(offset)),)
    for axis, start, stop, kind in reversed(loops):
        body = (Loop(axis, start, stop, 1 if kind != "tile" else 4, kind, body),)
    return Kernel("k", "pointwise", (Buffer("a", F32, numel, "input"),), (), body)


def test_reversed_order_and_negative_offsets():
    assert not unproven_accesses(loads(S - 1 - ROW, S, ("i", 0, S, "grid")))
    (access,) = unproven_accesses(loads(S - 2 - ROW, S, ("i", 0, S, "grid")))
    assert "i in 0 … s0" in str(access)


def test_what_no_iteration_reaches_is_proved():
    """A tile of no lanes is still loaded, where the address does not name its lanes: nothing masks it."""
    assert not unproven_accesses(loads(0, 0, ("i", 0, 0, "grid")))
    assert not unproven_accesses(loads(ROW, 0, ("i", 0, 0, "tile")))
    assert unproven_accesses(loads(0, 0, ("i", 0, 0, "tile")))


def test_triangular_ranges():
    assert not unproven_accesses(loads(ROW * S + J, S * S, ("i", 0, S, "grid"), ("j", 0, ROW + 1, "tile")))
    assert unproven_accesses(loads(ROW * S + J, S * S, ("i", 0, S, "grid"), ("j", 0, ROW + 2, "tile")))


def test_rounded_quotients_count_as_not_negative():
    half = sympy.floor(S / 2)
    assert not unproven_accesses(loads(ROW, half + 3, ("i", 0, half + 3, "grid")))
    assert unproven_accesses(loads(ROW, half, ("i", 0, half + 1, "grid")))


def test_symbols_are_matched_by_name_whatever_they_assume():
    plain = sympy.Symbol("s0")
    assert not unproven_accesses(loads(sympy.Symbol("i") * plain, S * S, ("i", 0, plain, "serial")))


def test_what_is_not_affine_is_not_claimed():
    assert unproven_accesses(loads(sympy.floor(ROW**2 / 4), 13, ("i", 0, 8, "grid")))


def test_quotients_and_remainders_of_axes_are_proved():
    """[2, 3, 5] and its transpose, by one axis over both outer dims, in blocks of which the last is cut."""
    block = ("b", 0, 2, "grid"), ("i", 4 * sympy.Symbol("b"), sympy.Min(4 * sympy.Symbol("b") + 4, 6), "tile")
    for offset in (sympy.floor(ROW / 3) * 15 + sympy.Mod(ROW, 3) * 5, sympy.Mod(ROW, 3) * 10 + sympy.floor(ROW / 3)):
        assert not unproven_accesses(loads(offset + J, 30, *block, ("j", 0, 5, "tile")))
        assert unproven_accesses(loads(offset + J, 25, *block, ("j", 0, 5, "tile")))
        assert unproven_accesses(loads(offset + J - 1, 30, *block, ("j", 0, 5, "tile")))
    assert unproven_accesses(loads(sympy.Mod(ROW, 4), 3, ("i", 0, 8, "grid")))
    assert not unproven_accesses(loads(3 - sympy.Mod(ROW, 4), 4, ("i", 0, 8, "grid")))
    assert unproven_accesses(loads(sympy.floor(ROW / 2), 4, ("i", 0, 9, "grid")))
    places = sympy.floor(ROW / 6) * 6 + sympy.Mod(ROW, 2) * 3 + sympy.Mod(sympy.floor(ROW / 2), 3)  # [4, 3, 2] turned
    assert not unproven_accesses(loads(places, 24, ("i", 0, 24, "grid")))
    assert unproven_accesses(loads(places, 23, ("i", 0, 24, "grid")))


def test_quotients_and_remainders_by_a_size_are_proved():
    """[b, s, 5] and its transpose, by one axis over both outer dims, in blocks of which the last is cut."""
    batch, block = sympy.Symbol("b", integer=True, positive=True), 4 * sympy.Symbol("block")
    count = sympy.ceiling(batch * S / 4)
    loops = ("block", 0, count, "grid"), ("i", block, sympy.Min(block + 4, batch * S), "tile"), ("j", 0, 5, "tile")
    there, within = sympy.floor(ROW / S), sympy.Mod(ROW, S)
    for offset in (there * S * 5 + within * 5 + J, within * batch * 5 + there * 5 + J):
        assert not unproven_accesses(loads(offset, batch * S * 5, *loops))
        assert unproven_accesses(loads(offset, batch * S * 5 - 1, *loops))
        assert unproven_accesses(loads(offset - 1, batch * S * 5, *loops))
    assert not unproven_accesses(loads(there, batch, *loops))
    assert unproven_accesses(loads(there, batch - 1, *loops))


def test_shares_of_a_range_are_proved():
    """Each thread takes as many neighbours as any."""
    parts, part = sympy.Symbol("parts", integer=True, positive=True), sympy.Symbol("part")
    share = sympy.floor((8 + parts) / parts)
    loops = ("part", 0, parts, "grid"), ("i", part * share, sympy.Min(part * share + share, 9), "serial")
    assert not unproven_accesses(loads(ROW, 9, *loops))
    assert unproven_accesses(loads(ROW, 8, *loops))
    assert unproven_accesses(loads(ROW - 1, 9, *loops))


def test_blocks_that_are_shared_out_are_proved():
    share, block, row = (sympy.Symbol(name, integer=True) for name in ("share", "block", "row"))

    def shared(numel, first):
        inner = Loop("row", block, block + 16, 4, "tile", (Load("x", "a", row),))
        blocks = Loop("block", first, 96, 32, "serial", (inner,))
        body = (Loop("share", 0, 2, 1, "grid", (blocks,)),)
        return Kernel("k", "pointwise", (Buffer("a", F32, numel, "input"),), (), body)

    assert not unproven_accesses(shared(96, 16 * share))
    assert unproven_accesses(shared(95, 16 * share)) and unproven_accesses(shared(96, 8 * share))
    assert not unproven_accesses(shared(104, 8 * share)) and unproven_accesses(shared(96, 16 * share + 1))


def test_a_loop_from_the_later_of_two_places_is_proved():
    start = sympy.Max(0, ROW - 3)
    assert not unproven_accesses(loads(J, 8, ("i", 0, 8, "grid"), ("j", start, 8, "serial")))
    assert unproven_accesses(loads(J - 1, 8, ("i", 0, 8, "grid"), ("j", start, 8, "serial")))


def test_limits_of_symbols_count():
    kernel = loads(ROW * 8 + J, 512 * 8, ("i", 0, S, "grid"), ("j", 0, 8, "tile"))
    assert unproven_accesses(kernel)
    assert not unproven_accesses(kernel, {"s0": 512})
    assert unproven_accesses(kernel, {"s0": 513})


def test_a_slice_up_to_a_symbol_limits_it():
    body = Graph()
    tables = [body.add_input(TensorType(F32, (n, 8), (8, 1))) for n in (512, 256)]
    cut = [body.add_node("slice", [t], {"dim": -2, "start": 0, "stop": S, "step": 1}).result for t in tables]
    other = body.add_node("slice", [cut[0]], {"dim": -1, "start": 0, "stop": 4, "step": 1}).result
    body.set_outputs([*cut, other])
    assert size_limits(body) == {"s0": 256}


def test_remainders_stay_below_their_divisor():
    rest = sympy.Mod(S, 4)
    assert not unproven_accesses(loads(rest, 4))
    assert unproven_accesses(loads(rest, 3))


def test_rounded_quotients_lose_no_more_than_the_rounding():
    padded = 4 * sympy.floor((S + 3) / 4)
    assert not unproven_accesses(loads(ROW, padded, ("i", 0, S, "grid")))
    assert unproven_accesses(loads(ROW, 4 * sympy.floor((S + 2) / 4), ("i", 0, S, "grid")))
    assert unproven_accesses(loads(ROW, padded - 1, ("i", 0, S, "grid")))


def test_quotients_that_may_be_negative_are_bounded_too():
    half = 2 * sympy.floor((S - 5) / 2)  # S - 6 or S - 5
    assert not unproven_accesses(loads(half + 6, S + 2))
    assert unproven_accesses(loads(half + 6, S + 1))
    assert unproven_accesses(loads(half + 4, S + 2))
    assert not unproven_accesses(loads(S - 5 - half, 2))


def test_a_quotient_of_an_axis_without_a_known_end_is_not_claimed():
    assert unproven_accesses(loads(sympy.floor(ROW / 2), S, ("i", 0, S, "grid")))


def test_nothing_is_loaded_from_memory_of_the_kernel_s_own_that_is_empty():
    kernel = loads(ROW, S, ("i", 0, S, "grid"))
    assert not unproven_accesses(kernel)
    own = replace(kernel, buffers=tuple(replace(buffer, role="scratch") for buffer in kernel.buffers))
    (load,) = unproven_accesses(own)
    stored = Store(load.statement.buffer, sympy.Integer(0), Constant(1.0))
    assert not unproven_accesses(replace(own, body=(stored, *own.body)))
    assert unproven_accesses(replace(own, body=(*own.body, stored)))
