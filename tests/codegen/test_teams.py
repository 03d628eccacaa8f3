"""Threads run a row of kernels as one team: each iteration once, in the order that results ask for."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import sympy
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec.codegen.cpp.build import CppKernel, build
from fusec.codegen.cpp.printer import PARALLEL_WORK, print_kernel
from fusec.codegen.target import Launch
from fusec.codegen.tile.kernel import (
    PARTS,
    Buffer,
    Check,
    Compute,
    Constant,
    Index,
    Init,
    Kernel,
    Load,
    Loop,
    Statement,
    Store,
    Update,
    index_symbol,
)
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.dynamo import backend, compiled_graphs
from fusec.frontend import trace
from fusec.ir.types import F32, I64, Size, evaluate_size, product, symbol
from tests.machines import profile

THREADS = (1, 2, 3, 7)
A, B, C = (sympy.Symbol(n, integer=True, nonnegative=True) for n in "abc")
N = symbol("n")
PART = index_symbol("part")


def built(*kernels: Kernel) -> list[CppKernel]:
    out = build([(kernel.name, print_kernel(kernel)) for kernel in kernels], Config())
    assert all(isinstance(kernel, CppKernel) for kernel in out), out
    return out  # type: ignore[return-value]


def counting(name: str, counts: tuple[Size, ...], work: Size = PARALLEL_WORK) -> Kernel:
    """Adds 1 at each place of a nest of grids."""
    place: sympy.Expr = sympy.Integer(0)
    for axis, count in zip((A, B, C), counts, strict=False):
        place = place * count + axis
    body: tuple[Statement, ...] = (
        Load("x", "y", place), Compute("z", "add", ("x", Constant(1.0)), F32), Store("y", place, "z"),
    )  # fmt: skip
    for axis, count in reversed(list(zip((A, B, C), counts, strict=False))):
        body = (Loop(str(axis), 0, count, 1, "grid", body),)
    return Kernel(name, "pointwise", (Buffer("y", F32, sympy.Integer(1) << 20, "update"),), ("n",), body, work)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("counts", [(1,), (5,), (N,), (3, 5), (N, 4), (2, 3, N), (4, 2, 2), (N, 1, 4)])
def test_every_iteration_runs_once(threads: int, counts: tuple[Size, ...]) -> None:
    (kernel,) = built(counting("count", counts))
    torch.set_num_threads(threads)
    for n in (0, 1, 2, 13):
        y = torch.zeros(200)
        kernel((y,), (n,))
        ran = evaluate_size(product(counts), {"n": n})
        assert y[:ran].eq(1).all() and not y[ran:].any()


def test_places_in_loops_of_one_are_known_when_compiled() -> None:
    text = print_kernel(counting("count", (N, 1, 4)))
    assert "own[0]" in text and "const int64_t b = 0;" in text and "own[2]" in text


def test_a_grid_begins_and_goes_on_as_its_loop_says() -> None:
    body = (Index("v", A), Store("y", A, "v"))
    grid = Loop("a", 3, N, 4, "grid", body)
    buffers = (Buffer("y", I64, N, "output"),)
    (kernel,) = built(Kernel("steps", "pointwise", buffers, ("n",), (grid,), PARALLEL_WORK))
    torch.set_num_threads(3)
    for n in (2, 3, 4, 7, 8, 30):
        y = torch.zeros(40, dtype=torch.int64)
        kernel((y,), (n,))
        expected = torch.zeros_like(y)
        expected[3:n:4] = torch.arange(3, max(n, 3), 4)
        assert y.equal(expected)


def dealing(name: str, *body: Statement) -> Kernel:
    """A kernel over y with a part for each thread."""
    buffers = (Buffer("y", F32, sympy.Integer(1) << 20, "update"),)
    grid = Loop("part", 0, PARTS, 1, "grid", body)
    return Kernel(name, "contraction", buffers, ("n",), (grid,), PARALLEL_WORK)


@pytest.mark.parametrize("threads", THREADS)
def test_what_is_dealt_runs_once(threads: int) -> None:
    """Loop after loop, again and again, whatever the kernels between."""

    def again(place: sympy.Expr) -> tuple[Statement, ...]:
        return Load("x", "y", place), Compute("z", "add", ("x", Constant(1.0)), F32), Store("y", place, "z")

    inner = Loop("b", 0, N, 1, "dynamic", again(1 + A * N + B))
    kernel = dealing("deal", Loop("c", 0, 1, 1, "dynamic", again(C)), Loop("a", 0, 3, 1, "serial", (inner,)))
    deal, count, alone = built(kernel, counting("count", (1 + 3 * N,)), counting("alone", (1 + 3 * N,), 0))
    torch.set_num_threads(threads)
    call = row([deal, count, deal, deal, alone, deal, count, deal])
    for n in (0, 1, 2, 3, 13, 14):
        for _ in range(20):
            y = torch.zeros(64)
            assert not call(y, y, n)  # type: ignore[operator]
            assert y[: 1 + 3 * n].eq(8).all() and not y[1 + 3 * n :].any()


def test_a_slow_thread_is_relieved() -> None:
    """While the first of 16 iterations takes long, the other thread runs what was dealt to the same one."""
    slow = Loop("b", 0, sympy.Max(0, 1 - A) * 10**8, 1, "serial", (Update("t", "sum", (Constant(1.0),)),))
    body = Init("t", "sum", F32, False), slow, Store("y", A, "t"), Index("p", PART), Store("z", A, "p")
    grid = Loop("part", 0, PARTS, 1, "grid", (Loop("a", 0, 16, 1, "dynamic", body),))
    buffers = Buffer("y", F32, 16, "output"), Buffer("z", I64, 16, "output")
    (kernel,) = built(Kernel("relieved", "contraction", buffers, (), (grid,), PARALLEL_WORK))
    torch.set_num_threads(2)
    y, ran = torch.empty(16), torch.empty(16, dtype=torch.int64)
    kernel((y, ran), ())
    assert y[0] > 1e7 and not y[1:].any()
    assert ran[1:8].eq(1 - ran[0]).all()


def row(kernels: list[CppKernel], checks: int = 0) -> object:
    """The call of kernels one after another on the buffers y, z, each of which may have one check."""
    constants: dict[str, object] = {}

    def bind(thing: object, hint: str) -> str:
        constants[name := f"{hint}_{len(constants)}"] = thing
        return name

    launches = [
        Launch(kernel, ("y.data_ptr()", "z.data_ptr()")[: 2 if i < checks else 1], ("n",), i + 1 if i < checks else 0)
        for i, kernel in enumerate(kernels)
    ]
    return eval(f"lambda y, z, n: {kernels[0].call_text(launches, bind)}", constants)


@pytest.mark.parametrize("threads", THREADS)
def test_kernels_see_what_those_before_have_done(threads: int) -> None:
    """Those that all take part in and those of the first thread alone, in every order: running sums are exact."""

    def running(name: str, work: int) -> Kernel:
        """y[i] = 2 y[n - 1 - i] + 1, which reads what another thread has written."""
        body = (Load("x", "y", N - 1 - A), Compute("t", "mul", ("x", Constant(2.0)), F32),
                Compute("z", "add", ("t", Constant(1.0)), F32), Store("y", N + A, "z"))  # fmt: skip
        back = (Load("x", "y", N + A), Store("y", A, "x"))
        loops = Loop("a", 0, N, 1, "grid", body), Loop("a", 0, N, 1, "serial", back)
        return Kernel(name, "pointwise", (Buffer("y", F32, 2 * N, "update"),), ("n",), loops, work)

    alone, shared = built(running("alone", 0), running("shared", PARALLEL_WORK))
    torch.set_num_threads(threads)
    for pattern in ("ss", "as", "sa", "aass", "sasa", "ssaas"):
        call = row([{"a": alone, "s": shared}[letter] for letter in pattern])
        for _ in range(30):
            y = torch.randint(-4, 4, (2 * 37,)).float()
            expected = y[:37]
            for _ in pattern:
                expected = 2 * expected.flip(0) + 1
            assert not call(y, y, 37)  # type: ignore[operator]
            assert y[:37].equal(expected)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("works", [(0, 0), (0, PARALLEL_WORK), (PARALLEL_WORK, 0), (PARALLEL_WORK, PARALLEL_WORK)])
def test_nothing_runs_after_a_check_that_failed(threads: int, works: tuple[int, int]) -> None:
    def checked(name: str, work: int) -> Kernel:
        """Adds 1 to y, if the number in z is below its length."""
        load, check = Load("v", "z", sympy.Integer(0)), Check("v", 10, 1)
        grid = counting(name, (N,), work).body
        buffers = Buffer("y", F32, N, "update"), Buffer("z", I64, 1, "update")
        return Kernel(name, "pointwise", buffers, ("n",), (load, check, *grid), work)

    def moving(name: str) -> Kernel:
        """Adds 9 to z."""
        body = (Load("v", "z", sympy.Integer(0)), Compute("w", "add", ("v", Constant(9)), I64),
                Store("z", sympy.Integer(0), "w"))  # fmt: skip
        return Kernel(name, "pointwise", (Buffer("y", F32, 1, "input"), Buffer("z", I64, 1, "update")), ("n",), body)

    first, second, move = built(checked("first", works[0]), checked("second", works[1]), moving("move"))
    torch.set_num_threads(threads)
    call = row([first, move, second, move, second, first], checks=6)
    for _ in range(20):
        for start, ran, failed in ((0, 2, 5), (1, 1, 3), (10, 0, 1)):
            y, z = torch.zeros(50), torch.tensor([start])
            fault = call(y, z, 50)  # type: ignore[operator]
            assert y.eq(ran).all() and z.item() == start + 9 * ran
            assert divmod(fault, 256) == (z.item(), failed)


@pytest.mark.parametrize("threads", THREADS)
def test_attention_with_few_heads_is_the_same_for_any_team(threads: int) -> None:
    """Its keys are shared out, and each share's sums lie in memory that all see."""
    torch._dynamo.reset()
    shapes = (1, 1, 1, 64), (1, 1, 4096, 64), (1, 1, 4096, 64)
    inputs = [torch.randn(shape) for shape in shapes]
    attend = torch.compile(F.scaled_dot_product_attention, backend=backend)
    expected = attend(*inputs)
    (compiled,) = compiled_graphs()
    assert any(b.role == "shared" for kernel in compiled.program.kernels.values() for b in kernel.buffers)
    torch.testing.assert_close(expected, F.scaled_dot_product_attention(*inputs))
    torch.set_num_threads(threads)
    for _ in range(50):
        assert compiled.program(list(inputs))[0].equal(expected)


def test_many_callers_have_a_team_each() -> None:
    def layers(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = torch.tanh(F.linear(x, weight))
        return x

    weights = [torch.randn(300, 300) / 17 for _ in range(4)]
    inputs = [torch.randn(2, 300) for _ in range(8)]
    found = compile_graph(trace(layers, (inputs[0], *weights)), profile(f32=100.0, bf16=100.0))
    torch.set_num_threads(2)
    expected = [found.program([x, *weights])[0] for x in inputs]

    def again(i: int) -> bool:
        return all(found.program([inputs[i], *weights])[0].equal(expected[i]) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(again, range(8)))


def test_a_team_has_the_threads_that_torch_was_told() -> None:
    """By whichever thread, and whichever calls."""
    (kernel,) = built(counting("count", (PARTS,)))

    def team() -> int:
        y = torch.zeros(64)
        kernel((y,), (0,))
        return int(y.sum())

    for threads in (3, 1, 2):
        torch.set_num_threads(threads)
        with ThreadPoolExecutor(1) as elsewhere:
            assert (team(), elsewhere.submit(team).result()) == (threads, threads)
