"""The C++ printer on hand-written tile programs: each kernel is built and compared with torch."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import sympy
import torch

from fusec.codegen.cpp.build import CppKernel, build
from fusec.codegen.cpp.compiler import _AMX, FLAGS, LINK_FLAGS, _query, find_compiler
from fusec.codegen.cpp.expressions import print_constant
from fusec.codegen.cpp.printer import PARALLEL_WORK, print_kernel
from fusec.codegen.tile.kernel import (
    PARTS,
    Buffer,
    Compute,
    Constant,
    Fold,
    Index,
    Init,
    Kernel,
    Load,
    Loop,
    Store,
    Update,
)
from fusec.config import Config
from fusec.errors import BuildError
from fusec.ir.graph import Source
from fusec.ir.types import BF16, BOOL, F16, F32, F64, I8, I64, U8, DType, Size, symbol

LANES = 16
THEIRS = {F32: torch.float32, F64: torch.float64, BF16: torch.bfloat16, F16: torch.float16, I64: torch.int64}


def axis(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, nonnegative=True)


i, j, k, p = (axis(n) for n in "ijkp")
ROWS = symbol("rows")


def add(dtype: DType, cols: int, work: int = 0) -> Kernel:
    """Row-wise addition of a vector to a matrix, with the row count unknown."""
    inner = (Load("a", "x", i * cols + j), Load("b", "bias", j), Compute("c", "add", ("a", "b"), dtype),
             Store("y", i * cols + j, "c"))  # fmt: skip
    buffers = (Buffer("x", dtype, ROWS * cols, "input"), Buffer("bias", dtype, cols, "input"),
               Buffer("y", dtype, ROWS * cols, "output"))  # fmt: skip
    loop = Loop("i", 0, ROWS, 1, "grid", (Loop("j", 0, cols, LANES, "tile", inner),))
    return Kernel("add_bias", "pointwise", buffers, ("rows",), (loop,), ROWS * cols * work, "x + bias")


def softmax(dtype: DType, cols: int) -> Kernel:
    """Two passes over a row that lies in scratch memory in between."""
    body = (
        Init("m", "max", F32, True),
        Loop("j", 0, cols, LANES, "tile", (Load("x1", "x", i * cols + j), Update("m", "max", ("x1",)))),
        Fold("top", "max", "m", F32),
        Init("t", "sum", F32, True),
        Loop("j", 0, cols, LANES, "tile", (
            Load("x2", "x", i * cols + j), Compute("d", "sub", ("x2", "top"), F32), Compute("e", "exp", ("d",), F32),
            Update("t", "sum", ("e",)), Store("row", j, "e"))),
        Fold("total", "sum", "t", F32),
        Loop("j", 0, cols, LANES, "tile", (
            Load("e2", "row", j), Compute("q", "div", ("e2", "total"), F32), Store("y", i * cols + j, "q"))),
    )  # fmt: skip
    buffers = (Buffer("x", dtype, ROWS * cols, "input"), Buffer("y", dtype, ROWS * cols, "output"),
               Buffer("row", F32, cols, "scratch"))  # fmt: skip
    return Kernel("softmax", "row", buffers, ("rows",), (Loop("i", 0, ROWS, 1, "grid", body),), ROWS * cols * 40)


def column_sum(cols: int) -> Kernel:
    """A reduction across rows, a tile of columns at a time."""
    body = (Init("acc", "sum", F32, True), Loop("i", 0, ROWS, 1, "serial", (
        Load("v", "x", i * cols + j), Update("acc", "sum", ("v",)))), Store("y", j, "acc"))  # fmt: skip
    buffers = (Buffer("x", F32, ROWS * cols, "input"), Buffer("y", F32, cols, "output"))
    return Kernel("column_sum", "column", buffers, ("rows",), (Loop("j", 0, cols, LANES, "tile", body),))


def gemv(dtype: DType, n: int, inner: int) -> Kernel:
    """One row times a weight of [n, inner], the outputs split over the threads, the row staged in scratch."""
    first, last = sympy.floor(p * n / PARTS), sympy.floor((p + 1) * n / PARTS)
    body = (
        Loop("k", 0, inner, LANES, "tile", (Load("s", "x", k), Store("row", k, "s"))),
        Loop("i", first, last, 1, "serial", (
            Init("acc", "sum", F32, True),
            Loop("k", 0, inner, LANES, "tile", (
                Load("a", "row", k), Load("b", "w", i * inner + k), Update("acc", "sum", ("a", "b")))),
            Fold("total", "sum", "acc", F32), Store("y", i, "total"))),
    )  # fmt: skip
    buffers = (Buffer("x", dtype, inner, "input"), Buffer("w", dtype, n * inner, "input"),
               Buffer("y", dtype, n, "output"), Buffer("row", F32, inner, "scratch"))  # fmt: skip
    grid = Loop("p", 0, PARTS, 1, "grid", body)
    return Kernel("linear", "contraction", buffers, (), (grid,), 2 * n * inner)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return Config(cache_dir=str(tmp_path_factory.mktemp("cache")))


def built(config: Config, *kernels: Kernel) -> list[CppKernel]:
    out = build([(kernel.name, print_kernel(kernel)) for kernel in kernels], config)
    for item in out:
        if isinstance(item, BuildError):
            raise item
    return out  # type: ignore[return-value]


@pytest.mark.parametrize("cols", [1, 15, 16, 100, 257])
def test_rows_of_any_length(config: Config, cols: int) -> None:
    dtypes = [F32, F64, BF16, F16, I64]
    adds = built(config, *(add(d, cols) for d in dtypes if d not in (BF16, F16)))
    for kernel, dtype in zip(adds, (F32, F64, I64), strict=True):
        x, bias = (torch.randn(s).mul(9).to(THEIRS[dtype]) for s in ((5, cols), (cols,)))
        y = torch.full((6, cols), 7).to(x)
        kernel((x, bias, y), (5,))
        assert torch.equal(y[:5], x + bias)
        assert (y[5] == 7).all(), "written beyond the end"
    softmaxes = built(config, *(softmax(d, cols) for d in (F32, BF16, F16)))
    for kernel, dtype in zip(softmaxes, (F32, BF16, F16), strict=True):
        x = torch.randn(5, cols).mul(4).to(THEIRS[dtype])
        y = torch.zeros_like(x)
        kernel((x, y), (5,))
        torch.testing.assert_close(y, x.softmax(-1))


def test_padding_lanes_do_not_count(config: Config) -> None:
    (kernel,) = built(config, softmax(F32, 17))
    x = torch.full((2, 17), -50.0)  # the padding is 0, far above
    y = torch.zeros_like(x)
    kernel((x, y), (2,))
    torch.testing.assert_close(y, x.softmax(-1))


def test_columns_and_matrix_vector(config: Config) -> None:
    shared = replace(gemv(F32, 33, 100), work=PARALLEL_WORK)
    columns, product, halves = built(config, column_sum(37), shared, gemv(BF16, 5, 40_000))
    x = torch.randn(19, 37)
    y = torch.zeros(37)
    columns((x, y), (19,))
    torch.testing.assert_close(y, x.sum(0))
    for kernel, dtype, n, inner in ((product, torch.float32, 33, 100), (halves, torch.bfloat16, 5, 40_000)):
        x, w = torch.randn(inner).to(dtype), torch.randn(n, inner).to(dtype)
        for threads in (1, 2, 3, 5):
            y = torch.zeros(n, dtype=dtype)
            torch.set_num_threads(threads)
            kernel((x, w, y), ())
            torch.testing.assert_close(y, w @ x, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)


def test_strided_gathered_and_indexed_tiles(config: Config) -> None:
    n = symbol("n")
    body = (
        Load("a", "x", 3 * j + 1), Load("b", "x", sympy.floor(j / 2)), Load("c", "x", sympy.Integer(0)),
        Index("q", 2 * j + 5), Compute("f", "cast", ("q",), F32), Compute("s", "add", ("a", "b"), F32),
        Compute("t", "add", ("s", "c"), F32), Compute("u", "mul", ("t", "f"), F32),
        Compute("big", "gt", ("u", Constant(0.0)), F32), Compute("v", "where", ("big", "u", Constant(-1.0)), F32),
        Compute("up", "gt", ("c", Constant(0.0)), F32), Compute("w", "where", ("up", "v", "f"), F32),
        Store("y", 2 * j, "w"), Store("mask", j, "big"),
    )  # fmt: skip
    buffers = (Buffer("x", F32, 3 * n, "input"), Buffer("y", F32, 2 * n, "output"), Buffer("mask", BOOL, n, "output"))
    (kernel,) = built(config, Kernel("mixed", "pointwise", buffers, ("n",), (Loop("j", 0, n, 8, "tile", body),)))
    for count in (1, 8, 21):
        x, y = torch.randn(3 * count), torch.zeros(2 * count)
        x[0] = x[0].abs() * (-1) ** count
        mask = torch.zeros(count, dtype=torch.bool)
        kernel((x, y, mask), (count,))
        at = torch.arange(count)
        f = 2 * at + 5
        u = (x[1::3] + x[at // 2] + x[0]) * f
        assert torch.equal(mask, u > 0)
        torch.testing.assert_close(y[::2], torch.where(x[0] > 0, torch.where(u > 0, u, -torch.ones(())), f.float()))


def test_every_reduction_folds(config: Config) -> None:
    n, kernels = symbol("n"), []
    for op in ("sum", "prod", "max", "min"):
        for dtype in (F32, F64, I64):
            loop = Loop("j", 0, n, LANES, "tile", (Load("v", "x", j), Update("acc", op, ("v",))))
            zero = sympy.Integer(0)
            body = (Init("acc", op, dtype, True), loop, Fold("r", op, "acc", dtype), Store("y", zero, "r"))
            buffers = (Buffer("x", dtype, n, "input"), Buffer("y", dtype, 1, "output"))
            kernels.append(Kernel(f"{op}_{dtype}", "row", buffers, ("n",), body))
    for kernel in built(config, *kernels):
        op, _, name = kernel.name.partition("_")
        theirs = {"f32": torch.float32, "f64": torch.float64, "i64": torch.int64}[name]
        for count in (1, 16, 63, 200):
            x = torch.randint(1, 3, (count,)).to(theirs) if op == "prod" else torch.randn(count).mul(50).to(theirs)
            y = torch.zeros(1, dtype=theirs)
            kernel((x, y), (count,))
            expected = getattr(x, op)()
            torch.testing.assert_close(y[0], expected.to(theirs), rtol=1e-5, atol=1e-5)
            if op in ("max", "min") and theirs.is_floating_point:
                x[count // 2] = torch.nan
                kernel((x, y), (count,))
                assert y.isnan().all()


def test_threads_give_the_same_bits(config: Config) -> None:
    (kernel,) = built(config, add(F32, 64, work=100_000))
    x, bias = torch.randn(500, 64), torch.randn(64)
    results = [torch.empty_like(x) for _ in range(4)]

    def launch(y: torch.Tensor) -> None:
        for _ in range(20):
            kernel((x, bias, y), (500,))

    threads = [threading.Thread(target=launch, args=(y,)) for y in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(y, x + bias) for y in results)


def test_no_rows_touch_nothing(config: Config) -> None:
    (kernel,) = built(config, softmax(F32, 8))
    kernel((torch.empty(0, 8), torch.empty(0, 8)), (0,))


def test_text_is_readable_and_says_where_it_comes_from() -> None:
    source = Source(file="model.py", line=12, module="layers.0.mlp")
    kernel = softmax(F32, 100)
    text = print_kernel(Kernel(**{**kernel.__dict__, "formula": "softmax\nof x \\", "sources": (source,)}))
    assert "// from layers.0.mlp, model.py:12" in text
    assert 'extern "C" EXPORT int64_t softmax(void* const* buffers, const int64_t* symbols, Team& team)' in text
    assert "if (!team.enter(" in text
    assert all(len(line) < 160 for line in text.splitlines())


@pytest.mark.parametrize(
    "kernel", [add(F32, 33), softmax(BF16, 100), softmax(F32, 1 << 20), column_sum(33), gemv(F32, 40, 64)]
)
def test_lines_are_indented_as_they_nest(kernel: Kernel) -> None:
    depth = 0
    lines = print_kernel(kernel).splitlines()
    for line in lines[next(n for n, line in enumerate(lines) if line.startswith('extern "C"')) :]:
        depth -= line.lstrip().startswith("}")
        assert line.startswith("#") or len(line) - len(line.lstrip()) == 2 * depth, line
        depth += line.endswith("{")
    assert depth == 0


def test_threads_start_where_there_is_work_for_them() -> None:
    few, many = (print_kernel(gemv(F32, n, 64)) for n in (2, PARALLEL_WORK // 128))
    assert "team.enter(false)" in few
    assert "team.enter(true)" in many
    enters = print_kernel(add(F32, 33, work=40)).replace(" * ", "*")
    assert f"team.enter({40 * 33}*rows >= {PARALLEL_WORK})" in enters


@pytest.mark.parametrize(
    ("work", "shares"),
    [(PARALLEL_WORK, "team.sharing"), (PARALLEL_WORK - 1, "1"), (symbol("n"), "team.sharing")],
)
def test_who_works_alone_does_nothing_for_others_again(work: Size, shares: str) -> None:
    assert f"const int64_t parts = {shares};" in print_kernel(replace(gemv(F32, 8, 64), work=work))


def test_names_of_functions_and_keywords_are_free(config: Config) -> None:
    body = (Load("exp", "float", j), Compute("tanh", "exp", ("exp",), F32), Store("new", j, "tanh"))
    buffers = (Buffer("float", F32, 8, "input"), Buffer("new", F32, 8, "output"))
    (kernel,) = built(config, Kernel("names", "pointwise", buffers, (), (Loop("j", 0, 8, 8, "tile", body),)))
    x, y = torch.randn(8), torch.zeros(8)
    kernel((x, y), ())
    torch.testing.assert_close(y, x.exp())


LITERALS: list[tuple[float, DType, str]] = [
    (1e-6, F32, "1e-06f"),
    (2, F32, "2.0f"),
    (float("-inf"), F32, "-__builtin_inff()"),
    (3.5e38, F32, "__builtin_inff()"),
    (True, BOOL, "true"),
    (-3, I64, "int64_t(-3)"),
    (0.1, F64, "0.1"),
    (float("nan"), F64, '__builtin_nan("")'),
    (float("nan"), F32, '__builtin_nanf("")'),
    (-(2**63), I64, "int64_t((-9223372036854775807LL - 1))"),
    (2**63 - 1, I64, "int64_t(9223372036854775807LL)"),
    (-(2**31), I64, "int64_t(-2147483648LL)"),
    (2**31 - 1, I64, "int64_t(2147483647)"),
    (300, I8, "int8_t(44)"),
    (200, I8, "int8_t(-56)"),
    (-1, U8, "uint8_t(255)"),
    (1e30, F32, "1e+30f"),
    (1e39, F64, "1e+39"),
    (-1e39, BF16, "-__builtin_inff()"),
    (float("-inf"), F64, "-__builtin_inf()"),
    (0, BOOL, "false"),
]


@pytest.mark.parametrize(("value", "dtype", "text"), LITERALS)
def test_literals(value: float, dtype: DType, text: str) -> None:
    assert print_constant(Constant(value), dtype) == text


def test_flags_are_safe() -> None:
    assert not any(flag in ("-Ofast", "-ffast-math", "-funsafe-math-optimizations") for flag in (*FLAGS, *LINK_FLAGS))
    assert "-fopenmp" in FLAGS and "-fopenmp" not in LINK_FLAGS


def test_equal_kernels_are_one_function(config: Config) -> None:
    first, second = softmax(F32, 24), softmax(F32, 24)
    renamed = Kernel(**{**second.__dict__, "name": "other", "formula": "something else"})
    a, b = built(config, first, renamed)
    assert a.function is b.function and (a.name, b.name) == ("softmax", "other")


def test_a_bad_kernel_fails_alone(config: Config) -> None:
    good = softmax(F32, 8)
    result = build([("good", print_kernel(good).replace("softmax(", "good(")), ("bad", "this is no C++")], config)
    assert isinstance(result[0], CppKernel) and isinstance(result[1], BuildError)
    assert "error" in str(result[1])


def test_a_missing_compiler_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler-here")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler") as caught:
        find_compiler()
    assert "CXX" in str(caught.value)


def test_a_compiler_that_does_not_work_does_not_hide_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    working = find_compiler()
    monkeypatch.delenv("CXX", raising=False)
    for name, text in (("c++", "exit 1"), ("g++", f'exec {working.command[0]} "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert find_compiler().command == (str(tmp_path / "g++"),)
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "clang++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "clang++").chmod(0o755)
    _query.cache_clear()
    with pytest.raises(BuildError, match=r"refused|did not run"):
        find_compiler()


def test_where_linux_refuses_the_registers_of_amx_kernels_are_built_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A compiler that says what a processor with AMX makes it say."""
    macros = "".join(f"#define __{name}__ 1\n" for name in _AMX)
    script = f"""#!/bin/sh\ncase "$*" in *-mno-amx-tile*) ;; *) echo '{macros}' ;; esac\n"""
    (tmp_path / "g++").write_text(script)
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    for permitted in (True, False):
        monkeypatch.setattr("fusec.codegen.cpp.compiler._permits_amx", lambda permitted=permitted: permitted)
        _query.cache_clear()
        assert find_compiler().has_amx == permitted
        assert ("-mno-amx-tile" in find_compiler().machine_flags) != permitted
    _query.cache_clear()
