"""Triton kernels compiled ahead of time for chips that are not here: nothing is refused, nothing spills."""

import pytest

from fusec.codegen.tile.kernel import Compute, Constant
from fusec.codegen.triton.compile import CHIPS, compile_for
from fusec.codegen.triton.prelude import FUNCTIONS
from fusec.errors import BuildError
from fusec.ir.types import BF16, BOOL, F16, F32, F64, I8, I64, U8
from tests.codegen.tile_programs import S, column_sum, fold_inside, layer_norm, one, pointwise, softmax, transpose

KERNELS = {
    "softmax": softmax(S, 1000, BF16),
    "softmax_tiled": softmax(S, 5000, F16, block=1024),
    "softmax_long": softmax(8, 16384, BF16),
    "layer_norm": layer_norm(S, 4096, BF16),
    "column_sum": column_sum(S, 768, block=128),
    "transpose": transpose(100, 64),
    "fold_any": fold_inside("max", 300, BOOL, BOOL),
    "fold_prod": fold_inside("prod", 300, F64, F64),
}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_without_spills(name, chip):
    report = compile_for(KERNELS[name], chip)
    assert report.ok, report
    assert report.registers > 0 and report.assembly_bytes > 0


@pytest.mark.parametrize("chip", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_all_float_functions_compile(dtype, chip):
    """One kernel that calls every unary function, in the type that half types compute in and in f64."""
    functions = (
        "exp exp2 expm1 log log1p log2 tanh sigmoid erf sin cos sqrt rsqrt reciprocal floor ceil round trunc sign"
    )
    computes, last = [], "a"
    for op in functions.split():
        computes.append(Compute(f"v_{op}", op, (last,), dtype))
        last = f"v_{op}"
    for op in ("fmod", "remainder", "floor_divide", "maximum", "minimum", *(("pow", "atan2") if dtype == F32 else ())):
        computes.append(Compute(f"v_{op}", op, (last, "b"), dtype))
        last = f"v_{op}"
    computes.append(Compute("y", "cast", (last,), F32, BF16))
    kernel = pointwise(computes, [dtype, dtype], S, [("y", BF16)], block=256)
    assert compile_for(kernel, chip).ok


def test_integer_functions_compile():
    computes = [
        Compute("p", "pow", ("a", "b"), I64), Compute("q", "floor_divide", ("p", "b"), I64),
        Compute("r", "remainder", ("q", Constant(7)), I64), Compute("y", "shift_left", ("r", Constant(2)), I64),
    ]  # fmt: skip
    for chip in ("sm_90", "gfx942"):
        assert compile_for(pointwise(computes, [I64, I64], S, [("y", I64)]), chip).ok


@pytest.mark.parametrize("dtype", [I8, U8], ids=str)
def test_powers_of_narrow_integers_compile(dtype):
    assert compile_for(one("pow", ["a", "b"], dtype), "sm_80").ok


def test_sin_keeps_a_table_on_the_stack_but_does_not_spill():
    assert compile_for(one("sin", ["a"], F32), "sm_80").ok


def test_what_triton_refuses_says_which_kernel(monkeypatch):
    monkeypatch.setitem(FUNCTIONS, "tanh", "def tanh(x):\n    return tl.no_such_function(x)")
    with pytest.raises(BuildError, match="one_tanh for sm_90"):
        compile_for(one("tanh", ["a"], F32), "sm_90")
