"""What a kernel has checked of a dynamic index, later kernels of the program do not check again."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.codegen.program import index_checks, kernels
from fusec.codegen.program.program import Program
from fusec.codegen.tile.bounds import unproven_accesses
from fusec.codegen.tile.kernel import Check, Kernel, walk
from fusec.dynamo import backend
from fusec.errors import BuildError
from tests.codegen.test_sharing import program

TABLES, INDEX = 4, torch.tensor([3, 0, 19, 3, 7])


def layers(x: Tensor, weight: Tensor, tables: Tensor, index: Tensor) -> Tensor:
    for table in tables:
        x = x @ weight + table[index]
    return x


def sample(index: Tensor = INDEX) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(len(INDEX), 16), torch.randn(16, 16) / 4, torch.randn(TABLES, 20, 16), index.clone()


def parts(x: Tensor, weight: Tensor, table: Tensor, index: Tensor) -> Tensor:
    for part in (table, table[11:], table[2:], table[5:]):
        x = x @ weight + part.index_select(0, index)
    return x


def sample_of_parts(*index: int) -> tuple[Tensor, ...]:
    x, weight, (table, *_), _ = sample()
    return x, weight, table, torch.tensor(index)


def checking(made: Program) -> list[bool]:
    """Whether each launch of a kernel with a dynamic index checks it, in order."""
    launched = [made.kernels[step.name] for step in made.steps if step.kind == "kernel"]
    return [any(isinstance(s, Check) for s in walk(k.body)) for k in launched if k.checks != 0]


def test_the_first_of_several_layers_checks() -> None:
    made = program(layers, *sample())
    assert checking(made) == [True] + [False] * (TABLES - 1)
    shorter = [kernel for kernel in made.kernels.values() if kernel.checks is None]
    assert shorter and not any(unproven_accesses(kernel) for kernel in shorter)
    assert all(unproven_accesses(replace(kernel, checks=0)) for kernel in shorter), "nothing else proves them"


@pytest.mark.parametrize("bad", [-21, 20])
def test_an_index_out_of_range_is_an_error_of_the_first(bad: int) -> None:
    torch._dynamo.reset()
    fast = torch.compile(layers, backend=backend, options={"strict": True})
    fast(*sample())
    with pytest.raises(IndexError, match="is out of bounds for dimension 0 with size 20"):
        fast(*sample(torch.tensor([3, 0, bad, 3, 7])))


def test_nothing_is_stored_behind_an_index_out_of_range() -> None:
    def stored(new: Tensor, weight: Tensor, index: Tensor, *caches: Tensor) -> Tensor:
        for cache in caches:
            new = torch.exp(new @ weight)
            cache.index_copy_(0, index, new)
        return new

    def inputs(*index: int) -> tuple[Tensor, ...]:
        return torch.randn(3, 16), torch.randn(16, 16) / 9, torch.tensor(index), *torch.zeros(3, 20, 16).unbind()

    assert checking(program(stored, *inputs(3, 0, 19))) == [True, False, False]
    fast = torch.compile(stored, backend=backend, options={"strict": True})
    *others, first, second, third = inputs(3, 20, 0)
    with pytest.raises(IndexError, match="index 20 is out of bounds"):
        fast(*others, first, second, third)
    assert not any(cache.any() for cache in (first, second, third))


def test_every_length_is_checked_by_the_first() -> None:
    made = program(parts, *sample_of_parts(3, 0, 8, 3, 7))
    assert checking(made) == [True, False, False, False]
    first = next(kernel for kernel in made.kernels.values() if kernel.checks)
    checks = [s for s in walk(first.body) if isinstance(s, Check)]
    assert [(check.length, check.number) for check in checks] == [(20, 1), (9, 2), (18, 3), (15, 4)]
    torch._dynamo.reset()
    fast = torch.compile(parts, backend=backend, options={"strict": True})
    for bad, size in ((20, 20), (9, 9), (18, 9), (-1, 20)):
        with pytest.raises(IndexError, match=f"size {size} "):
            fast(*sample_of_parts(3, 0, 8, 3, bad))


def test_an_index_that_has_changed_is_checked() -> None:
    def moving(x: Tensor, weight: Tensor, tables: Tensor, index: Tensor) -> Tensor:
        for part in tables.split(2):
            x = layers(x, weight, part, index)
            index += 1
        return x

    index = torch.tensor([3, 0, 18, 3, 7])
    assert checking(program(moving, *sample(index))) == [True, False, True, False]
    torch._dynamo.reset()
    fast = torch.compile(moving, backend=backend, options={"strict": True})
    with pytest.raises(IndexError, match="index 20 is out of bounds"):
        fast(*sample())


def test_an_index_of_another_tensor_is_checked() -> None:
    def two(x: Tensor, weight: Tensor, tables: Tensor, index: Tensor, other: Tensor) -> Tensor:
        return layers(layers(x, weight, tables[:2], index), weight, tables[2:], other)

    assert checking(program(two, *sample(), INDEX.flip(0))) == [True, False, True, False]
    torch._dynamo.reset()
    fast = torch.compile(two, backend=backend, options={"strict": True})
    with pytest.raises(IndexError, match="index 20 is out of bounds"):
        fast(*sample(), torch.tensor([3, 0, 20, 3, 7]))


def test_lengths_may_be_symbols() -> None:
    """A length that the first kernel does not know is checked where it is known."""

    def parts(x: Tensor, weight: Tensor, index: Tensor, *tables: Tensor) -> Tensor:
        for table in tables:
            x = x @ weight + table.index_select(0, index)
        return x

    x, weight, (one, two, three, *_), _ = sample()

    def inputs(length: int, last: int, bad: int = 0) -> tuple[Tensor, ...]:
        return x, weight, torch.tensor([3, 0, bad, 3, 7]), one[:length], two[:length], three[:last]

    assert checking(program(parts, *inputs(19, 17), dynamic=True)) == [True, False, True]
    torch._dynamo.reset()
    fast = torch.compile(parts, backend=backend, options={"strict": True}, dynamic=True)
    for length, last, bad, size in ((19, 17, 19, 19), (19, 17, 17, 17), (15, 20, 15, 15), (9, 15, -1, 9)):
        with pytest.raises(IndexError, match=f"index {bad} .* size {size} "):
            fast(*inputs(length, last, bad))


def test_no_more_checks_than_have_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_checks, "MAX_CHECKS", 2)
    assert checking(program(parts, *sample_of_parts(3, 0, 8, 3, 7))) == [True, False, True, True]


def test_where_a_kernel_is_not_built_each_checks_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATen, which would run in its place, knows nothing of what later kernels allow."""
    build, errors = kernels._build, [BuildError("a kernel could not be built", why="of a test")]

    def failing_once(given: dict[str, Kernel], *rest: Any) -> dict[str, Any]:
        first = next(name for name, kernel in given.items() if kernel.checks)
        return build(given, *rest) | ({first: errors.pop()} if errors else {})

    monkeypatch.setattr(kernels, "_build", failing_once)
    assert checking(program(parts, *sample_of_parts(3, 0, 8, 3, 7))) == [True, True, True, True] and not errors


def test_a_kernel_alone_checks() -> None:
    """Kernels are scheduled with their checks: what is left out depends on the program around."""
    made = program(layers, *(x[:1] if x.ndim == 3 else x for x in sample()))
    assert [kernel.checks for kernel in made.kernels.values() if kernel.checks != 0] == [1]
