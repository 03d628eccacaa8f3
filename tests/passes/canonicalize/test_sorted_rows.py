"""Look-alikes of rows that are sorted by group, of all rows in order, and of an order restored: each is left alone."""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.config import Config
from fusec.frontend import trace
from fusec.passes.canonicalize import normalize
from fusec.pipeline import Context
from fusec.reference.interpreter import evaluate

RULES = {"groups-of-sorted-rows", "counted-rows", "restored-order"}


def applied(function: Callable[..., Any], x: Tensor, rules: Collection[str] = RULES) -> set[str]:
    """Simplify a function, keeping eager's result; return which of some rules applied to it."""
    graph, context = trace(function, [x], symbolic=False), Context(Config())
    normalize(graph, context)
    (found,) = evaluate(graph, [x])
    torch.testing.assert_close(found, function(x))
    return {r.subject for r in context.remarks.of("passed")}.intersection(rules)


def rows(n: int, columns: int = 4) -> Tensor:
    return torch.randn(n, columns, generator=torch.Generator().manual_seed(0))


def histogram(groups: Tensor, *limits: int) -> Tensor:
    return torch.histc(groups.float(), 4, *(limits or (0, 3)))


def ends(groups: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.cumsum(histogram(groups), 0, dtype=dtype)


def counted(x: Tensor, of: Callable[[Tensor], Tensor], position: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """For each row the number of ends up to its position, of ids in order."""
    place = torch.arange(x.shape[0])
    ordered, _ = torch.sort(x.argmax(-1))
    return (of(ordered) <= (place[:, None] if position is None else position(place))).sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: counted(x, ends),
        lambda x: counted(x, lambda s: ends(s, torch.int64), lambda p: p[:, None].expand(-1, 4)),
        lambda x: counted(x, lambda s: ends(s)[None].expand(9, 4)),
        lambda x: (ends(torch.sort(x.argmax(-1))[0]) <= torch.arange(9)[:, None]).sum(-1, True, dtype=torch.int64),
    ],
)
def test_groups_are_what_the_rows_are_sorted_by(function: Callable[[Tensor], Tensor]) -> None:
    assert applied(function, rows(9)) == {"groups-of-sorted-rows"}


OTHER_COUNTS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "ends along the rows": (lambda x: counted(x, lambda s: ends(s)[:, None].expand(4, 4), lambda p: p), rows(4)),
    "each end several times": (
        lambda x: counted(x, lambda s: ends(s)[:, None].expand(4, 4).reshape(16, 1).expand(16, 4)), rows(16)
    ),
    "ends of a table in another order": (
        lambda x: counted(x, lambda s: ends(s).reshape(2, 2)[:, None].expand(2, 8, 2).reshape(8, 4)), rows(8)
    ),
    "positions several times": (
        lambda x: counted(x, ends, lambda p: p[:4, None].expand(4, 2).reshape(8, 1)), rows(8)
    ),
    "positions in another order": (lambda x: counted(x, ends, lambda p: p.reshape(2, 4).T.reshape(8, 1)), rows(8)),
    "positions from 1": (lambda x: counted(x, ends, lambda p: p[:, None] + 1), rows(8)),
    "positions of bytes": (lambda x: counted(x, ends, lambda p: p.to(torch.uint8)[:, None]), rows(300)),
    "ends of bytes": (lambda x: counted(x, lambda s: ends(s).to(torch.uint8)), rows(300)),
    "sums of bytes": (lambda x: counted(x, lambda s: ends(s, torch.uint8)), rows(300)),
    "sums that are rounded": (lambda x: counted(x, lambda s: ends(s, torch.float16)), rows(3000)),
    "ids of bytes": (lambda x: counted(x, lambda s: ends(s.to(torch.uint8))), rows(30, 300)),
    "ids that are true or false": (lambda x: counted(x, lambda s: ends(s.bool())), rows(30)),
    "a histogram of other limits": (lambda x: counted(x, lambda s: histogram(s, 0, 4).cumsum(0).long()), rows(30)),
    "a histogram from below zero": (lambda x: counted(x, lambda s: histogram(s, -1, 3).cumsum(0).long()), rows(30)),
    "a histogram without limits": (
        lambda x: counted(x, lambda s: torch.histc(s.float(), 1, 0, 0).cumsum(0, dtype=torch.int32)), rows(9, 2)
    ),
    "negative ids": (
        lambda x: (ends(torch.sort(x.argmax(-1) - 2)[0]) <= torch.arange(9)[:, None]).sum(-1, keepdim=True), rows(9)
    ),
    "another sort": (
        lambda x: (ends(torch.sort(x.argmax(-1), descending=True)[0]) <= torch.arange(9)[:, None]).sum(-1, True),
        rows(9),
    ),
    "fewer rows": (lambda x: counted(x, ends, lambda p: p[:7, None]), rows(9)),
    "a number with a fraction": (
        lambda x: (ends(torch.sort(x.argmax(-1))[0]) <= torch.arange(9)[:, None]).sum(-1, True, dtype=torch.float32),
        rows(9),
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", OTHER_COUNTS)
def test_other_counts_are_left(why: str) -> None:
    function, x = OTHER_COUNTS[why]
    assert not applied(function, x)


def inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def at_least_two(order: Tensor) -> Tensor:
    """No order, but each index is in range."""
    return torch.full_like(order, 2).scatter_reduce(0, order, torch.arange(len(order)), "amax")


def reordered(x: Tensor, compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """What is computed of the sorted rows, of all rows, and of the order, put back in order."""
    _, order = torch.sort(x[:, 0])
    return compute(x[order], x, order)[inverse(order)]


OTHER_ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "only one operand is sorted": lambda x: reordered(x, lambda y, x, _: y * x),
    "rows are told apart by position": lambda x: reordered(x, lambda y, *_: y * torch.arange(8)[:, None]),
    "rows see their neighbours": lambda x: reordered(x, lambda y, *_: y + y.roll(1, 0)),
    "rows see all of them": lambda x: reordered(x, lambda y, *_: y @ y.T),
    "rows are reversed": lambda x: reordered(x, lambda y, *_: y.flip(0)),
    "another order in between": lambda x: reordered(x, lambda y, x, p: y[torch.sort(x[:, 1])[1]]),
    "rows twice": lambda x: reordered(x, lambda y, *_: torch.cat([y, y])),
    "some rows": lambda x: x[p := torch.sort(x[:, 0])[1]][inverse(p)[:3]],
    "another order is put back": lambda x: x[torch.sort(x[:, 1])[1]][inverse(torch.sort(x[:, 0])[1])],
    "positions are combined": lambda x: (x[p := torch.sort(x[:, 0])[1]] * 2)[at_least_two(p)],
    "the order of the columns": lambda x: (x[:4] * torch.sort(x[:4, 0])[0])[:, inverse(torch.sort(x[:4, 1])[1])],
}


@pytest.mark.parametrize("why", OTHER_ORDERS)
def test_other_orders_are_left(why: str) -> None:
    assert not applied(OTHER_ORDERS[why], rows(8))


def test_each_row_and_all_rows_in_another_order_are_told_apart() -> None:
    assert "restored-order" in applied(lambda x: reordered(x, lambda y, *_: y[:, None] * y[None]), rows(8))


OTHER_LOOKUPS: dict[str, Callable[[Tensor], Tensor]] = {
    "not all rows": lambda x: x[torch.arange(8) // 3],
    "the first rows often": lambda x: x[torch.arange(24) // 4],
    "not from the first row": lambda x: x[torch.arange(1, 9) // 2],
    "over and over": lambda x: x[torch.arange(16) % 8],
    "the other way round": lambda x: x[torch.arange(7, -1, -1)],
    "as many as rows, each twice": lambda x: x[torch.arange(8) // 2],
    "a table of rows": lambda x: x[torch.arange(3) // torch.full((8, 1), 1)],
}


@pytest.mark.parametrize("why", OTHER_LOOKUPS)
def test_other_lookups_are_left(why: str) -> None:
    assert not applied(OTHER_LOOKUPS[why], rows(8))
