"""Kernels that differ only in offsets and lengths are built once: layers that share a tensor, or a pool of pages."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch
from torch import Tensor

from fusec.codegen import target_named
from fusec.codegen.program.program import Program
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.kernel import Buffer, Check, ClampIndex, Kernel, Load, Loop, Store, index_symbol
from fusec.codegen.tile.sharing import share
from fusec.dynamo import backend, compiled_graphs
from fusec.ir.types import F32, I64
from fusec.reference.contract import compare_outputs
from tests.codegen.tile_programs import J

STARTS = (0, 5, 10)


def program(function: Callable[..., object], *inputs: Tensor, dynamic: bool = False) -> Program:
    """Compile a function, and compare outputs and inputs with eager's."""
    torch._dynamo.reset()
    fast = torch.compile(function, backend=backend, options={"strict": True}, dynamic=dynamic)
    ours, theirs = ([x.clone() for x in inputs] for _ in range(2))
    exact = [x.double() if x.is_floating_point() else x.clone() for x in inputs]
    found, expected, right = fast(*ours), function(*theirs), function(*exact)
    assert compare_outputs([expected, theirs], [found, ours], [right, exact]).passed
    (compiled,) = compiled_graphs()
    made: Program = compiled.program
    assert not any(unproven_accesses(kernel) for kernel in made.kernels.values() if not kernel.symbols)
    return made


def launches(made: Program) -> list[int]:
    """How often each kernel is launched."""
    return sorted(Counter(step.name for step in made.steps if step.kind == "kernel").values())


def layers(x: Tensor, weights: Tensor) -> Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight) + x
    return x


def rows_of_parts(pool: Tensor, index: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Parts that begin at different places and end at the same one, as those of layers in a pool of pages."""
    for start in STARTS:
        x = x @ weight + pool[start:].index_select(0, index)
    return x


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_layers_of_one_tensor_share_a_kernel(tokens: int, dtype: torch.dtype, dynamic: bool) -> None:
    torch.manual_seed(0)
    made = program(layers, torch.randn(tokens, 32).to(dtype), torch.randn(6, 32, 32).to(dtype) / 8, dynamic=dynamic)
    assert launches(made) == [6]


def sample(*index: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(20, 16), torch.tensor(index), torch.randn(len(index), 16), torch.randn(16, 16) / 4]


def test_parts_of_other_lengths_share_a_kernel() -> None:
    """The first one checks the index for all of them, in a kernel of its own."""
    assert launches(program(rows_of_parts, *sample(0, 9, 3))) == [1, len(STARTS) - 1]


@pytest.mark.parametrize(("bad", "length"), [(19, 15), (15, 15), (14, 10), (10, 10), (-1, 20)])
def test_each_part_has_its_own_bounds(bad: int, length: int) -> None:
    """An index within the pool but beyond a part is an error of that part."""
    torch._dynamo.reset()
    fast = torch.compile(rows_of_parts, backend=backend, options={"strict": True}, dynamic=False)
    with pytest.raises(IndexError, match=f"index {bad} is out of bounds .* size {length} "):
        fast(*sample(0, bad, 3))


def copy_of(offset: int, length: int = 4, size: int = 16, numel: int = 100, to: int = 0) -> Kernel:
    """Copy a part of a row that is chosen at run time."""
    tile = Loop(
        "j", 0, size, 16, "tile", (Load("x", "a", index_symbol("at") * 16 + J + offset), Store("b", J + to, "x"))
    )
    body = (Load("i", "c", sympy.Integer(0)), Check("i", length, 1), ClampIndex("at", "i", length), tile)
    buffers = Buffer("a", F32, numel, "input"), Buffer("c", I64, 1, "input"), Buffer("b", F32, 40, "update")
    return Kernel("copy", "pointwise", buffers, (), body)


def test_what_differs_becomes_symbols() -> None:
    (code, first), (other, second), (again, third) = share([copy_of(0), copy_of(16, 3), copy_of(0)])
    assert code is other is again and code.symbols == ("number0", "number1")
    assert (first, second, third) == ((4, 0), (3, 16), (4, 0))
    (code, numbers), (other, _) = share([copy_of(8, to=8), copy_of(16, to=16)])
    assert code is other and code.symbols == ("number0",) and numbers == (8,)
    text = target_named("cpp").print(code)
    assert "uint64_t(4)" in text and text.count("+ number0") == 2


def test_what_differs_otherwise_is_apart() -> None:
    kernels = [copy_of(8), copy_of(8, size=12), copy_of(8, numel=96), replace(copy_of(16), kind="row")]
    assert share(kernels) == [(kernel, ()) for kernel in kernels]
