"""Every function of the vector header against float64: within 2 ulp on the whole range, special values included."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
import torch

from fusec.codegen.cpp.build import build
from fusec.codegen.cpp.printer import print_kernel
from fusec.codegen.tile.kernel import Buffer, Compute, Kernel, Load, Loop, Statement, Store
from fusec.config import Config
from fusec.ir.types import BF16, BOOL, F16, F32, F64, I8, I16, I32, I64, U8, DType
from fusec.reference.dtypes import torch_dtype

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.1754944e-38,
           3.4028235e38, 88.72283, 88.7229, -87.33655, -103.9, -104.5, 127.99999, 128.0, -149.0, -150.5]  # fmt: skip
N = sympy.Symbol("n", integer=True, positive=True)
J = sympy.Symbol("i", integer=True, nonnegative=True)


def pointwise(name: str, op: str, dtypes: list[DType], out: DType, compute: DType, lanes: int = 16) -> Kernel:
    """A kernel that applies one operation to arrays of length n, in one tile loop."""
    loads: tuple[Statement, ...] = tuple(Load(f"v{i}", f"x{i}", J) for i in range(len(dtypes)))
    rounds = out if op == "cast" and out in (BF16, F16) else None
    body: tuple[Statement, ...] = (
        *loads,
        Compute("r", op, tuple(f"v{i}" for i in range(len(dtypes))), compute, rounds),
        Store("y", J, "r"),
    )
    buffers = (*(Buffer(f"x{i}", d, N, "input") for i, d in enumerate(dtypes)), Buffer("y", out, N, "output"))
    return Kernel(name, "pointwise", buffers, ("n",), (Loop("i", 0, N, lanes, "tile", body),))


def floats(count: int = 400_003) -> np.ndarray:
    """Evenly spaced bit patterns of float32, and special values; the length is no multiple of a tile."""
    patterns = np.linspace(0, 2**32 - 1, count).astype(np.uint32).view(np.float32)
    ranges = [(-20, 20, 50_001), (0.9, 1.1, 10_001), (-110, 110, 50_001)]
    dense = np.concatenate([np.linspace(*r) for r in ranges])
    return np.concatenate([patterns, dense.astype(np.float32), np.array(SPECIAL, np.float32)])


def ulp_error(found: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Distance from the float64 reference in units of the last place of the correctly rounded float32."""
    with np.errstate(all="ignore"):
        rounded = reference.astype(np.float32)
        unit = np.spacing(np.maximum(np.abs(rounded), np.float32(1e-45))).astype(np.float64)
        error = np.abs(found.astype(np.float64) - reference) / unit
        same = (found == rounded) | (np.isnan(found) & np.isnan(rounded))
        top = np.isinf(rounded) & (np.abs(found) >= np.finfo(np.float32).max)
        return np.where(same | top, 0.0, np.where(np.isfinite(error), error, 1e30))


def _erf(x: np.ndarray) -> Any:
    return torch.erf(torch.from_numpy(x)).numpy()


def _sigmoid(x: np.ndarray) -> Any:
    return np.where(x < 0, np.exp(x) / (1 + np.exp(x)), 1 / (1 + np.exp(-x)))


UNARY: dict[str, Any] = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "log2": np.log2,
    "tanh": np.tanh, "sigmoid": _sigmoid, "erf": _erf, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x, "sin": np.sin, "cos": np.cos,
}  # fmt: skip
EXACT: dict[str, Any] = {
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.rint, "abs": np.abs, "neg": np.negative,
}  # fmt: skip
BOUNDS = {"rsqrt": 1.5, "sqrt": 0.5001, "reciprocal": 0.5001}


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    config = Config(cache_dir=str(tmp_path_factory.mktemp("cache")))
    kernels = [pointwise(f"f_{op}", op, [F32], F32, F32) for op in (*UNARY, *EXACT)]
    kernels += [pointwise("f_pow", "pow", [F32, F32], F32, F32)]
    kernels += [pointwise(f"d_{op}", op, [F64], F64, F64) for op in (*UNARY, *EXACT)]
    return {k.name: b for k, b in zip(kernels, built(kernels, config), strict=True)}


def built(kernels: list[Kernel], config: Config) -> list[Any]:
    return list(build([(k.name, print_kernel(k)) for k in kernels], config))


def call(kernel: Any, *inputs: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    y: np.ndarray = np.zeros(inputs[0].shape, dtype)
    kernel([torch.from_numpy(x) for x in (*inputs, y)], (len(y),))
    return y


@pytest.mark.parametrize("op", [*UNARY, *EXACT])
def test_float_functions_are_within_two_ulp(functions: dict[str, Any], op: str) -> None:
    x = floats()
    with np.errstate(all="ignore"):
        reference = {**UNARY, **EXACT}[op](x.astype(np.float64))
    found = call(functions[f"f_{op}"], x)
    error = ulp_error(found, reference)
    worst = int(error.argmax())
    bound = 0.0 if op in EXACT else BOUNDS.get(op, 2.0)
    assert error[worst] <= bound, f"{op}({x[worst]!r}) = {found[worst]!r}, not {reference[worst]!r}: {error[worst]} ulp"
    if op in EXACT:
        finite = ~np.isnan(x)
        assert (np.signbit(found) == np.signbit(reference))[finite].all()


@pytest.mark.parametrize("op", [*UNARY, *EXACT])
def test_double_functions_agree_with_numpy(functions: dict[str, Any], op: str) -> None:
    with np.errstate(all="ignore"):
        x = floats(20_001).astype(np.float64) * 1.000000123
        reference = {**UNARY, **EXACT}[op](x)
    np.testing.assert_allclose(call(functions[f"d_{op}"], x, dtype=np.float64), reference, rtol=4e-15, atol=5e-323)


def test_power_is_within_two_ulp(functions: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    n = len(SPECIAL)
    x = np.concatenate([np.exp(rng.uniform(-80, 80, 100_000)), rng.uniform(-9, 9, 30_000), np.repeat(SPECIAL, n)])
    y = np.concatenate([rng.uniform(-9, 9, 100_000), rng.integers(-9, 9, 30_000), np.tile(SPECIAL, n)])
    x, y = x.astype(np.float32), y.astype(np.float32)
    with np.errstate(all="ignore"):
        reference = np.power(x.astype(np.float64), y.astype(np.float64))
    error = ulp_error(call(functions["f_pow"], x, y), reference)
    assert error.max() <= 2.0, (x[error.argmax()], y[error.argmax()])


@pytest.mark.parametrize("half", [BF16, F16])
def test_half_types_convert_as_torch_does(half: DType, tmp_path: Path) -> None:
    config = Config(cache_dir=str(tmp_path))
    theirs = torch.bfloat16 if half == BF16 else torch.float16
    down = pointwise("down", "cast", [F32], half, F32)
    up = Kernel("up", "pointwise", (Buffer("x", half, N, "input"), Buffer("y", F32, N, "output")), ("n",),
                (Loop("i", 0, N, 16, "tile", (Load("v", "x", J), Store("y", J, "v"))),))  # fmt: skip
    one = Kernel("one", "pointwise", (Buffer("x", F32, N, "input"), Buffer("y", half, N, "output")), ("n",),
                 (Loop("i", 0, N, 1, "serial", (Load("v", "x", J), Store("y", J, "v"))),))  # fmt: skip
    narrow, widen, scalar = built([down, up, one], config)
    x = torch.from_numpy(floats())
    for kernel, count in ((narrow, len(x)), (scalar, 5000)):
        y = torch.empty(count, dtype=theirs)
        kernel((x[-count:].clone(), y), (count,))
        torch.testing.assert_close(y, x[-count:].to(theirs), rtol=0, atol=0, equal_nan=True)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(theirs)
    y = torch.empty(65536)
    widen((every, y), (65536,))
    torch.testing.assert_close(y, every.float(), rtol=0, atol=0, equal_nan=True)


INTEGER: dict[str, Any] = {"floor_divide": torch.floor_divide, "remainder": torch.remainder, "fmod": torch.fmod,
           "maximum": torch.maximum, "minimum": torch.minimum, "add": torch.add, "mul": torch.mul,
           "shift_left": torch.bitwise_left_shift, "shift_right": torch.bitwise_right_shift,
           "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}  # fmt: skip


def test_integers_and_truth_values_follow_torch(tmp_path: Path) -> None:
    config = Config(cache_dir=str(tmp_path))
    a = torch.tensor([7, -7, 7, -7, 0, 2**31 - 1, -(2**31), 5, 100, -3] * 4)
    b = torch.tensor([3, 3, -3, -3, 5, 2, -1, 31, 40, 1] * 4)
    kernels: list[Kernel] = []
    expected: list[tuple[torch.Tensor, ...]] = []
    for dtype, theirs in ((I32, torch.int32), (I64, torch.int64)):
        for op, function in INTEGER.items():
            if op in ("floor_divide", "remainder", "fmod") and dtype == I32:
                continue  # torch itself traps on INT_MIN / -1
            kernels.append(pointwise(f"{op}_{dtype}", op, [dtype, dtype], dtype, dtype))
            x, y = a.to(theirs), b.to(theirs)
            expected.append((x, y, function(x, y)))
    named = {"and": torch.logical_and, "or": torch.logical_or}
    for op in ("and", "or", "add", "mul", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge"):
        function = named.get(op) or getattr(torch, op)
        kernels.append(pointwise(f"{op}_bool", op, [BOOL, BOOL], BOOL, BOOL))
        x, y = a > 0, b > 0
        expected.append((x, y, function(x, y)))
    for op, function in (("remainder", torch.remainder), ("floor_divide", torch.floor_divide), ("fmod", torch.fmod),
                         ("maximum", torch.maximum), ("minimum", torch.minimum), ("atan2", torch.atan2)):  # fmt: skip
        kernels.append(pointwise(f"{op}_f32", op, [F32, F32], F32, F32))
        x = torch.tensor([7.5, -7.5, 7.5, -7.5, 0.0, -0.0, torch.nan, 1.0, torch.inf, 2.0])
        y = torch.tensor([2.0, 2.0, -2.0, -2.0, 3.0, 3.0, 1.0, torch.nan, 2.0, 0.0])
        expected.append((x, y, function(x, y)))
    for kernel, (x, y, wanted) in zip(built(kernels, config), expected, strict=True):
        out = torch.empty_like(wanted)
        kernel((x, y, out), (len(x),))
        exact = wanted.dtype != torch.float32
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-6, "atol": 0}
        torch.testing.assert_close(out, wanted, equal_nan=True, **tolerance)


CASTS = [*product((F32, F64), (I8, U8, I16, I32, I64)), (I64, F32), (I32, F64), (F64, F32), (BOOL, F32), (F32, BOOL),
         (I64, BOOL), (BOOL, I64), (I64, I8), (I16, U8)]  # fmt: skip
OUT_OF_RANGE = [300.0, -300.0, 40000.0, -40000.0, 2.0**31, -(2.0**31), 2.0**31 - 200, -(2.0**31) - 300, 3e9, -3e9,
                2.0**32 + 5000, 2.0**63, -(2.0**63), 1e20, -1e20, np.inf, -np.inf, np.nan]  # fmt: skip


@pytest.mark.parametrize("lanes", [16, 1])
def test_casts_follow_torch(tmp_path: Path, lanes: int) -> None:
    kernels = [pointwise(f"{a}_to_{b}", "cast", [a], b, b, lanes) for a, b in CASTS]
    values = torch.tensor([0.0, 1.0, -1.5, 2.5, 255.9, 1e6, 16777217.0, *OUT_OF_RANGE] * 3, dtype=torch.float64)
    for kernel, (a, b) in zip(built(kernels, Config(cache_dir=str(tmp_path))), CASTS, strict=True):
        x = values.to(torch_dtype(a))
        y = torch.empty(len(x), dtype=torch_dtype(b))
        kernel((x, y), (len(x),))
        torch.testing.assert_close(y, x.to(torch_dtype(b)), rtol=0, atol=0, equal_nan=True)
