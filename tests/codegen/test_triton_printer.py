"""Printed Triton kernels, run by Triton's interpreter, against torch."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import sympy
import torch
from triton.runtime.interpreter import InterpreterBuilder

from fusec.codegen.tile.kernel import Buffer, Compute, Constant, Fold, Kernel, Load, Loop, Store
from fusec.codegen.triton.compile import compile_for
from fusec.codegen.triton.interpreter import InterpretedKernel
from fusec.codegen.triton.printer import print_kernel
from fusec.errors import ScheduleError
from fusec.ir.graph import Source
from fusec.ir.types import BF16, BOOL, F16, F32, F64, I8, I32, I64, U8, symbol
from tests.codegen.tile_programs import (
    J,
    S,
    column_sum,
    fold_inside,
    layer_norm,
    one,
    pointwise,
    softmax,
    sum_of_chosen,
    transpose,
)

TORCH = {
    F64: torch.float64, F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16, I64: torch.int64,
    I32: torch.int32, I8: torch.int8, U8: torch.uint8, BOOL: torch.bool,
}  # fmt: skip
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 1e-4, -1e-4, 88.0, -88.0, 1e30, -1e30,
                        math.inf, -math.inf, math.nan])  # fmt: skip


def run(kernel, *inputs, sizes=()):
    """The results of a kernel on these inputs, each allocated at its buffer's length."""
    values = dict(zip(kernel.symbols, sizes, strict=True))
    outputs = [
        torch.zeros(int(sympy.sympify(b.numel).subs({symbol(k): v for k, v in values.items()})), dtype=TORCH[b.dtype])
        for b in kernel.buffers
        if b.role == "output"
    ]
    InterpretedKernel(kernel)([*inputs, *outputs], sizes)
    return outputs


def sampled(dtype, n=100, special=True):
    """Numbers of a dtype; the special ones first."""
    if dtype == BOOL:
        return torch.arange(n) % 3 == 0
    if dtype.is_float:
        x = torch.randn(n, dtype=torch.float64) * 2
        if special:
            x[: len(SPECIAL)] = SPECIAL.double()
        return x.to(TORCH[dtype])
    low = 0 if dtype == U8 else -9
    return torch.randint(low, 9, (n,)).to(TORCH[dtype])


def assert_near(actual, expected, ulps):
    """Equal, or within some units in the last place of the expected number; NaN where NaN."""
    torch.testing.assert_close(
        actual, expected, rtol=ulps * torch.finfo(expected.dtype).eps, atol=1e-37, equal_nan=True
    )


def assert_same_zeros(actual, expected):
    """Zeros of the same sign."""
    zero = expected == 0
    assert torch.equal(actual[zero].signbit(), expected[zero].signbit())


UNARY = {
    "neg": torch.neg, "abs": torch.abs, "floor": torch.floor, "ceil": torch.ceil, "round": torch.round,
    "trunc": torch.trunc, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "exp": torch.exp,
    "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log, "log1p": torch.log1p, "log2": torch.log2,
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "erf": torch.erf, "sin": torch.sin, "cos": torch.cos,
}  # fmt: skip
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
    "minimum": torch.minimum, "pow": torch.pow, "atan2": torch.atan2, "fmod": torch.fmod,
    "remainder": torch.remainder, "floor_divide": torch.floor_divide,
}  # fmt: skip
COMPARE = {"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("op", UNARY)
def test_unary_operations_are_near_torch(op, dtype):
    torch.manual_seed(0)
    x = sampled(dtype)
    if op in ("sin", "cos"):
        x[x.abs() > 1e6] = 3e4
    (y,) = run(one(op, ["a"], dtype), x)
    assert_near(y, UNARY[op](x), 8)
    assert_same_zeros(y, UNARY[op](x))


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("op", UNARY)
def test_unary_operations_are_right_over_the_whole_range(op, dtype):
    info = torch.finfo(TORCH[dtype])
    exponents = torch.linspace(math.log2(info.smallest_normal) - 20, math.log2(info.max) - 0.01, 5000).double()
    sizes = torch.exp2(exponents).to(TORCH[dtype])
    x = torch.cat([sizes, -sizes, torch.linspace(-110, 110, 5000, dtype=TORCH[dtype])])
    (y,) = run(one(op, ["a"], dtype, size=len(x)), x)
    assert_near(y, UNARY[op](x.double()).to(x.dtype), 4)


@pytest.mark.parametrize("op", ["exp", "sigmoid", "expm1"])
def test_exponentials_of_large_numbers_do_not_rely_on_the_chips(op, monkeypatch):
    """A chip's is 2^t of a rounded t: so is the interpreter's here, which otherwise has numpy's exact one."""

    def coarse(builder, arg):
        return builder.unary_op(arg, lambda x: np.exp2(x * np.float32(1.4426950408889634)))

    monkeypatch.setattr(InterpreterBuilder, "create_exp", coarse)
    x = torch.linspace(-87.3, 88.7, 20_001)
    (y,) = run(one(op, ["a"], F32, size=len(x)), x)
    assert_near(y, UNARY[op](x.double()).float(), 3)
    (weights,) = run(one("exp_of_weight", ["a"], F32, size=len(x)), x)
    assert ((weights / x.double().exp()).float() - 1).abs().max() > 16 * 2**-23  # the chip's, as it is here


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("op", BINARY)
def test_binary_operations_are_near_torch(op, dtype):
    if op in ("atan2", "pow") and dtype == F64:
        with pytest.raises(ScheduleError, match=op):
            print_kernel(one(op, ["a", "b"], dtype))
        return
    torch.manual_seed(0)
    special = SPECIAL.to(TORCH[dtype])
    a, b = sampled(dtype, 400), sampled(dtype, 400)
    pairs = torch.cartesian_prod(special, special)
    if op in ("fmod", "remainder", "floor_divide"):
        pairs = torch.cartesian_prod(special[2:10], special[2:10])  # finite; others are quotients by hand
    a[: len(pairs)], b[: len(pairs)] = pairs[:, 0], pairs[:, 1]
    if op == "floor_divide":
        keep = b.abs() > 0.3
        a, b = a[keep][:100].contiguous(), b[keep][:100].contiguous()
    (y,) = run(one(op, ["a", "b"], dtype, size=len(a)), a, b)
    expected = BINARY[op](a, b)
    assert_near(y, expected, 8)
    if op not in ("maximum", "minimum"):
        assert_same_zeros(y, expected)


@pytest.mark.parametrize("op", [*COMPARE, "isnan", "isinf"])
def test_comparisons_are_exact(op):
    a, b = sampled(F32), sampled(F32).roll(1)
    b[:40] = a[:40]
    inputs = [a, b] if op in COMPARE else [a]
    (y,) = run(one(op, ["a", "b"][: len(inputs)], F32, BOOL), *inputs)
    assert torch.equal(y, (COMPARE.get(op) or getattr(torch, op))(*inputs))


@pytest.mark.parametrize("dtype", [I64, I32, I8, U8], ids=str)
@pytest.mark.parametrize("op", "add mul sub maximum minimum floor_divide remainder fmod and or xor lt eq".split())
def test_integer_operations_are_exact(op, dtype):
    torch.manual_seed(1)
    a, b = sampled(dtype), sampled(dtype)
    if op in ("floor_divide", "remainder", "fmod"):
        b[b == 0] = 3
    names = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
    result = BOOL if op in COMPARE else dtype
    (y,) = run(one(op, ["a", "b"], dtype, result), a, b)
    assert torch.equal(y, getattr(torch, names.get(op, op))(a, b))


ON_INTEGERS = list(itertools.product(["neg", "abs", "sign", "floor", "round", "not"], [I64, I32, I8, U8]))


@pytest.mark.parametrize(("op", "dtype"), ON_INTEGERS, ids=str)
def test_unary_integer_operations_are_exact(op, dtype):
    a = sampled(dtype)
    (y,) = run(one(op, ["a"], dtype), a)
    expected = a if op in ("floor", "round") else getattr(torch, {"not": "bitwise_not"}.get(op, op))(a)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", [I32, I8, U8], ids=str)
@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 300, -1])
def test_a_constant_wraps_where_it_is_cast(value, dtype):
    (y,) = run(one("cast", [Constant(value)], dtype, size=5))
    assert torch.equal(y, torch.full((5,), value).to(TORCH[dtype]))


@pytest.mark.parametrize("dtype", [I64, I32, I8, U8], ids=str)
def test_shifts_of_integers_are_defined_for_any_count(dtype):
    a, b = sampled(dtype), torch.randint(-3, 70, (100,)).to(TORCH[dtype])
    for op, expected in (("shift_left", a << b), ("shift_right", a >> b)):
        (y,) = run(one(op, ["a", "b"], dtype), a, b)
        assert torch.equal(y, expected), op


@pytest.mark.parametrize("dtype", [I64, I32, I8, U8], ids=str)
def test_powers_of_integers_are_exact(dtype):
    bases = torch.tensor([0, 1, -1, 2, -2, 3, 5, 7, -128, 127])
    exponents = torch.tensor([0, 1, 2, 3, 6, 31, 63, 64, 65, 100, 127, -1, -2, -3, -128])
    a, b = torch.cartesian_prod(bases, exponents).to(TORCH[dtype]).T.contiguous()
    (y,) = run(one("pow", ["a", "b"], dtype, size=len(a)), a, b)
    assert torch.equal(y, a**b)


def test_scalar_conditions_meet_tiles():
    row = Compute("r", "gt", ("m", Constant(0.0)), F32)
    body = (
        Load("m", "m", sympy.Integer(0)),
        row,
        Loop("j", 0, 8, 8, "tile", (
            Load("x", "a", J), Compute("c", "lt", ("x", Constant(1.0)), F32),
            Compute("y", "and", ("r", "c"), BOOL), Store("y", J, "y"),
        )),
    )  # fmt: skip
    buffers = (Buffer("m", F32, 1, "input"), Buffer("a", F32, 8, "input"), Buffer("y", BOOL, 8, "output"))
    x = torch.randn(8)
    for m in (1.0, -1.0):
        (y,) = run(Kernel("mask", "row", buffers, (), body), torch.tensor([m]), x)
        assert torch.equal(y, (x < 1) & (m > 0))


def test_sign_of_nan_and_infinity():
    x = sampled(F32)
    (y,) = run(one("sign", ["a"], F32), x)
    assert torch.equal(y[x > 0], torch.ones_like(y[x > 0])) and torch.equal(y[x < 0], -torch.ones_like(y[x < 0]))
    assert (y[(x == 0) | x.isnan()] == 0).all()
    assert torch.equal(y, x.sign())


@pytest.mark.parametrize("op", ["and", "or", "xor", "not", "eq", "maximum"])
def test_booleans(op):
    a, b = sampled(BOOL), sampled(BOOL).roll(1)
    names = {"not": torch.logical_not, "and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor,
             "eq": torch.eq, "maximum": torch.logical_or}  # fmt: skip
    inputs = [a] if op == "not" else [a, b]
    (y,) = run(one(op, ["a", "b"][: len(inputs)], BOOL), *inputs)
    assert torch.equal(y, names[op](*inputs))


@pytest.mark.parametrize("exponent", [2, 3, 0.5, -0.5, -1, 2.5, -2, 0, 12])
def test_constant_powers(exponent):
    x = sampled(F32, special=False)
    (y,) = run(one("pow", ["a", Constant(exponent)], F32), x)
    assert_near(y, x**exponent, 8)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("op", ["add", "mul", "div", "floor_divide"])
def test_the_sign_of_a_constant_zero_counts(op, dtype):
    x = sampled(dtype)
    for zero in (0.0, -0.0):
        (y,) = run(one(op, ["a", Constant(zero)], dtype), x)
        expected = BINARY[op](x, zero)
        assert torch.equal(y.nan_to_num(7), expected.nan_to_num(7))
        assert_same_zeros(y, expected)


@pytest.mark.parametrize("target", [F32, F64, BF16, F16, I64, I32, U8, BOOL], ids=str)
@pytest.mark.parametrize("source", [F32, F64, I64, BOOL, F16], ids=str)
def test_casts_round_as_torch_does(source, target):
    torch.manual_seed(2)
    x = sampled(source, special=target.is_float or target == BOOL)
    if target == U8 and source != BOOL:
        x = x.abs()
    compute = F32 if target in (BF16, F16) else target
    rounds = target if compute != target else None
    kernel = pointwise([Compute("y", "cast", ("a",), compute, rounds)], [source], 100, [("y", compute)])
    (y,) = run(kernel, x)
    assert torch.equal(y.nan_to_num(7) if y.dtype.is_floating_point else y, _plain(x.to(TORCH[target]).to(y.dtype)))


def _plain(x):
    return x.nan_to_num(7) if x.dtype.is_floating_point else x


def test_constants_keep_full_precision_and_type():
    config = Compute("y", "where", ("k", Constant(0.1), Constant(math.pi)), F64)
    f64 = pointwise([Compute("k", "gt", ("a", Constant(0.1)), F64), config], [F64], 10, [("y", F64)])
    x = torch.linspace(-1, 1, 10, dtype=torch.float64)
    (y,) = run(f64, x)
    assert torch.equal(y, torch.where(x > 0.1, x * 0 + 0.1, x * 0 + math.pi))
    i64 = pointwise([Compute("y", "maximum", ("a", Constant(2**40)), I64)], [I64], 10, [("y", I64)])
    assert (run(i64, torch.arange(10))[0] == 2**40).all()


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 200])
def test_pointwise_on_ragged_sizes_computes_in_f32_and_stores_rounded(size, dtype):
    computes = [Compute("t", "mul", ("a", Constant(1.7)), F32), Compute("y", "add", ("t", "b"), F32)]
    kernel = pointwise(computes, [dtype, dtype], size, [("y", dtype), ("t", F32)])
    a, b = (torch.randn(size).to(TORCH[dtype]) for _ in range(2))
    y, t = run(kernel, a, b)
    assert torch.equal(t, a.float() * 1.7)
    assert torch.equal(y, (a.float() * 1.7 + b.float()).to(TORCH[dtype]))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rows, cols, block", [(3, 1, None), (3, 37, None), (2, 64, None), (3, 37, 16), (2, 32, 16)])
def test_softmax(rows, cols, block, dtype):
    x = torch.randn(rows, cols).to(TORCH[dtype])
    (y,) = run(softmax(rows, cols, dtype, block), x)
    expected = x.double().softmax(-1).to(TORCH[dtype])
    assert_near(y.reshape(rows, cols), expected, 8)


def test_what_is_not_chosen_is_not_read():
    x, chosen = torch.randint(-9, 9, (6, 37)).float(), torch.tensor([True, False, True, True, False, True])
    (y,) = run(sum_of_chosen(6, 37), x.where(chosen[:, None], math.nan), chosen)
    assert torch.equal(y, x.sum(1) * chosen)


@pytest.mark.parametrize("block", [None, 16])
def test_softmax_of_nan_and_masked_rows(block):
    x = torch.randn(4, 37)
    x[0, 36], x[1, 5], x[2, :], x[3, 3:] = math.nan, math.inf, -math.inf, -math.inf
    (y,) = run(softmax(4, 37, block=block), x)
    y, expected = y.reshape(4, 37), x.softmax(-1)
    assert torch.equal(y.isnan(), expected.isnan())
    assert_near(y[3], expected[3], 8)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("rows", [1, 3])
def test_layer_norm_with_symbolic_rows(rows, block, dtype):
    torch.manual_seed(3)
    x, w, b = (torch.randn(n).to(TORCH[dtype]) for n in ((rows, 45), 45, 45))
    y, mean = run(layer_norm(S, 45, dtype, block), x, w, b, sizes=[rows])
    expected = torch.nn.functional.layer_norm(x.double(), (45,), w.double(), b.double())
    torch.testing.assert_close(mean, x.double().mean(-1).float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y.reshape(rows, 45).double(), expected, rtol=2e-6 if dtype == F32 else 8e-3, atol=4e-6)


FOLDS = [
    *((op, F32) for op in ("sum", "prod", "max", "min")), ("max", I64), ("min", I32), ("sum", I64), ("max", I8),
    ("max", BOOL), ("min", BOOL), ("max", U8),
]  # fmt: skip


@pytest.mark.parametrize("op, dtype", FOLDS)
def test_folds_of_one_tile(op, dtype):
    torch.manual_seed(4)
    x = sampled(dtype, 3 * 21, special=False).reshape(3, 21)
    (y,) = run(fold_inside(op, 21, dtype, dtype), x)
    expected = {"sum": x.sum, "prod": x.prod, "max": x.amax, "min": x.amin}[op](-1)
    if dtype == F32:
        torch.testing.assert_close(y, expected)
    else:
        assert torch.equal(y, expected)


@pytest.mark.parametrize("op", ["max", "min"])
def test_maximum_of_a_row_is_nan_where_one_is(op):
    x = torch.randn(3, 21)
    x[1, 20] = math.nan
    (y,) = run(fold_inside(op, 21, F32, F32), x)
    assert y.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("rows, cols", [(1, 5), (7, 33), (4, 16)])
def test_column_sum(rows, cols):
    x = torch.randn(rows, cols)
    for kernel, sizes in ((column_sum(rows, cols), []), (column_sum(S, cols), [rows])):
        (y,) = run(kernel, x, sizes=sizes)
        torch.testing.assert_close(y, x.sum(0))


def test_strided_loads_over_two_grid_axes_and_positions():
    x = torch.arange(30.0).reshape(5, 2, 3)
    y, at = run(transpose(5, 3), x)
    assert torch.equal(y.reshape(3, 2, 5), x.permute(2, 1, 0))
    assert torch.equal(at.reshape(3, 2, 5), (torch.arange(5) + 10 * torch.arange(3)[:, None, None]).expand(3, 2, 5))


def test_views_are_read_from_their_first_element():
    kernel = one("neg", ["a"], F32, size=10)
    storage = torch.arange(40.0)
    (y,) = run(kernel, storage[7:17])
    assert torch.equal(y, -storage[7:17])


def test_an_empty_grid_launches_nothing():
    assert run(column_sum(3, 0), torch.empty(3, 0))[0].numel() == 0


def test_one_tile_prints_without_a_loop_and_full_tiles_without_a_mask():
    text = print_kernel(softmax(5, 64))
    assert "for " not in text and "mask" not in text
    assert "mask_j = j < 37" in print_kernel(softmax(5, 37))
    assert "for j_start in range(0, 37, BLOCK):" in print_kernel(softmax(5, 37, block=16))


@pytest.mark.parametrize("wide", [False, True])
def test_a_program_asks_for_its_number_once(wide):
    cols = 2**30 if wide else 5
    assert print_kernel(transpose(7, cols)).count("tl.program_id(0)") == 1


def test_offsets_are_wide_only_where_sizes_ask_for_it():
    for rows in (5, 2**25 - 1):
        assert "int64" not in print_kernel(softmax(rows, 64))
    for rows in (S, 2**25, 2**26):
        assert "tl.program_id(0).to(tl.int64)" in print_kernel(softmax(rows, 64))


def test_lanes_named_in_a_loop_are_named_anew_behind_it():
    def row(start):
        return Loop("j", 0, 4, 4, "tile", (Load("x", "a", J + start), Store("y", J + start, "x")))

    step = sympy.Symbol("i", integer=True, nonnegative=True)
    buffers = (Buffer("a", F32, 12, "input"), Buffer("y", F32, 12, "output"))
    repeated = Loop("i", 0, 2, 1, "serial", (row(4 * step),))
    for body, named in (((repeated, row(8)), 2), ((row(8), repeated), 1)):
        kernel, x = Kernel("k", "pointwise", buffers, (), body), torch.randn(12)
        assert print_kernel(kernel).count("tl.arange") == named
        assert torch.equal(run(kernel, x)[0], x)


def test_names_stay_clear_of_python_and_triton():
    loop = Loop("in", 0, 4, 4, "tile", (Load("tl", "a", sympy.Symbol("in")), Store("y", sympy.Symbol("in"), "tl")))
    kernel = Kernel("lambda", "pointwise", (Buffer("a", F32, 4, "input"), Buffer("y", F32, 4, "output")), (), (loop,))
    x = torch.randn(4)
    assert torch.equal(run(kernel, x)[0], x)


def test_a_number_is_replaced_when_every_warp_has_it():
    """Each loads it for itself, and one of them stores."""
    tile = Loop(
        "j", 0, 2048, 2048, "tile", (Load("x", "a", J), Compute("z", "mul", ("x", "v"), F32), Store("y", J, "z"))
    )
    number = sympy.Integer(0)
    body = (Load("v", "n", number), tile, Compute("w", "add", ("v", Constant(1.0)), F32), Store("n", number, "w"))
    buffers = (Buffer("a", F32, 2048, "input"), Buffer("n", F32, 1, "update"), Buffer("y", F32, 2048, "output"))
    kernel = Kernel("k", "pointwise", buffers, (), (Loop("p", 0, 1, 1, "grid", body),))
    text = print_kernel(kernel)
    assert text.index("tl.load(n_ptr") < text.index("tl.debug_barrier()") < text.index("tl.store(n_ptr")
    assert text.count("tl.debug_barrier()") == 1
    assert compile_for(kernel, "sm_90").ok and compile_for(kernel, "gfx942").ok
    x, n, y = torch.randn(2048), torch.tensor([3.0]), torch.empty(2048)
    InterpretedKernel(kernel)([x, n, y])
    assert torch.equal(y, 3 * x) and n == 4


def test_what_triton_cannot_hold_is_refused():
    loop = Loop("b", 0, 4, 1, "grid", ())
    scratch = Kernel("k", "row", (Buffer("t", F32, 4, "scratch"),), (), (loop,))
    with pytest.raises(ScheduleError, match="scratch"):
        print_kernel(scratch)
    with pytest.raises(ScheduleError, match="power of two"):
        print_kernel(pointwise([], [], 10, [], block=48))
    part = Loop("j", 0, 20, 8, "tile", (Load("x", "a", J), Fold("r", "max", "x", F32)))
    with pytest.raises(ScheduleError, match="several tiles"):
        print_kernel(Kernel("k", "row", (Buffer("a", F32, 20, "input"),), (), (part,)))


def test_a_kernel_says_what_it_computes_and_where_that_is_written() -> None:
    source = Source(file="model.py", line=12, module="layers.0.mlp")
    kernel = replace(softmax(3, 100), sources=(source, source))
    text = print_kernel(kernel)
    assert f"# {kernel.formula}\n#   layers.0.mlp, model.py:12\n@triton.jit" in text
