"""Several tensors in one storage: what is read before a change is the old value, and a copy stays a copy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec import dynamo
from tests.backend.agreement import check, same, sharing

Change = Callable[[Tensor], object]
ROWS = torch.tensor([0, 2])


def old_diagonal(x: Tensor) -> Tensor:
    old = x.diagonal() * 2
    x.add_(1)
    return old


def old_diagonal_by_einsum(x: Tensor) -> Tensor:
    old = torch.einsum("ii->i", x) * 1.0
    x.fill_diagonal_(0)
    return old


def old_strided_part(x: Tensor) -> Tensor:
    old = x.as_strided((2, 2), (1, 1)).clone()
    x.zero_()
    return old


def old_bits(x: Tensor) -> Tensor:
    old = x.view(torch.int32).clone()
    x.add_(1)
    return old


def old_complex_numbers(x: Tensor) -> Tensor:
    old = torch.view_as_complex(x.view(4, 2, 2)).real * 2
    x.zero_()
    return old


def old_chunk(x: Tensor) -> Tensor:
    old = x.unsafe_chunk(2)[0] * 2
    x.zero_()
    return old


def old_diagonal_beside_a_row(x: Tensor) -> Tensor:
    old = x.diagonal() * 2
    x[0] = 5.0
    return old


def old_diagonal_beside_places(x: Tensor) -> Tensor:
    old = x.diagonal() * 2
    x.index_copy_(0, ROWS, torch.ones(2, 4))
    return old


def old_part_of_a_concatenation(x: Tensor) -> Tensor:
    old = torch.cat([x, x], -1)[:, 0:3:2]
    x.fill_(1)
    return old


def old_sum_of_one_row(x: Tensor) -> Tensor:
    row = x[:1]
    old = row.sum(0, keepdim=True)
    row.index_copy_(0, ROWS[:1], torch.ones(1, 4))
    return old < row


def row_of_its_own_sum(x: Tensor) -> Tensor:
    row = x[:1]
    row.index_copy_(0, ROWS[:1], row.sum(0, keepdim=True))
    return row * 2


@pytest.mark.parametrize(
    "function",
    [old_part_of_a_concatenation, old_sum_of_one_row, row_of_its_own_sum, old_diagonal,
     old_diagonal_by_einsum, old_strided_part, old_bits, old_complex_numbers, old_chunk,
     old_diagonal_beside_a_row, old_diagonal_beside_places],
)  # fmt: skip
def test_a_view_that_aten_makes_is_read_before_its_storage_changes(backend: Any, function: Any) -> None:
    check(backend, function, torch.randn(4, 4))


def copied(x: Tensor, y: Tensor) -> Tensor:
    old = y.clone()
    x.add_(1)
    return old


def added(x: Tensor, y: Tensor) -> Tensor:
    old = y + y
    x.zero_()
    return old


def multiplied(x: Tensor, y: Tensor) -> Tensor:
    old = y @ y.t()
    x.add_(1)
    return old


def scaled_keys(keys: Tensor, values: Tensor) -> Tensor:
    old = F.scaled_dot_product_attention(values + 1, keys, values)
    keys.mul_(2)
    return old


def turned(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :3], x.t()


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (copied, lambda x: (x[1:], x[:-1])),
        (added, lambda x: (x[1:], x[:-1])),
        (multiplied, lambda x: (x[1:], x[:-1])),
        (added, lambda x: (x, x.diagonal())),
        (added, turned),
        (scaled_keys, lambda x: (x.view(1, 2, 4, 2)[..., :1], x.view(1, 2, 4, 2)[..., 1:])),
    ],
)
def test_inputs_that_overlap(backend: Any, function: Any, parts: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    whole, expected_whole = torch.arange(16.0).view(4, 4), torch.arange(16.0).view(4, 4)
    found_parts, expected_parts = parts(whole), parts(expected_whole)
    with torch.no_grad():
        found = torch.compile(function, backend=backend)(*found_parts)
        expected = function(*expected_parts)
    same([found, whole], [expected, expected_whole])
    assert sharing([found, whole]) == sharing([expected, expected_whole])


def test_inputs_that_overlap_in_longer_memory_run_through_aten() -> None:
    """Views of no tensor: of the memory that they share AOTAutograd knows only as much as they reach."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    whole, expected = torch.arange(32.0).view(8, 4), torch.arange(32.0).view(8, 4)
    function(expected[:3], expected[1:4])
    x, y = whole[:3].detach(), whole[1:4].detach()
    with torch.no_grad():
        torch.compile(function, backend="fusec")(x, y)
    assert torch.equal(whole, expected)
    assert dynamo.fallbacks() == ["inputs that share a part of longer memory"]


def by_list(x: Tensor) -> None:
    x[[0, 1]] = 3.0


def by_index(x: Tensor) -> None:
    x[ROWS] = torch.ones(2, 4)


def by_slice(x: Tensor) -> None:
    x[:2] = 2.0


def by_column(x: Tensor) -> None:
    x[:, ROWS] = 1.0


def by_copy(x: Tensor) -> None:
    x.index_copy_(0, ROWS, torch.ones(2, 4))


def by_addition(x: Tensor) -> None:
    x.add_(1)


CHANGES = (by_list, by_index, by_slice, by_column, by_copy, by_addition)


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_of_what_was_changed_stays_a_copy(backend: Any, change: Change) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        change(x)
        copies = x.clone(), x * 1, x[1].clone(), x.to(x.dtype, copy=True), torch.cat([x]), x.repeat(1, 1)
        return *copies, x, x.view(2, 8), x[1]

    check(backend, function, torch.randn(4, 4))


@pytest.mark.parametrize("change", CHANGES)
def test_the_only_copy_of_what_was_changed_stays_one(backend: Any, change: Change) -> None:
    def function(x: Tensor) -> Tensor:
        change(x)
        return x * 1

    check(backend, function, torch.randn(4, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.float64])
def test_views_of_another_type(backend: Any, dtype: torch.dtype) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        made = x + 1
        return x.view(dtype), x[1:].view(dtype), made, made.view(dtype)

    check(backend, function, torch.randn(4, 4))


def test_what_is_multiplied_by_one_is_no_view(backend: Any) -> None:
    check(backend, lambda x: (x.as_strided((2, 2), (1, 1)) * 1, x.diagonal() * 1, x.diagonal()), torch.randn(4, 4))
