"""Scatters of a number: a choice where places are known to be in range; else ATen checks them."""

import pytest
import torch
from torch import Tensor

from tests.passes.canonicalize.test_sorted_rows import applied, rows

RULE = ("scattered-number",)


def marked(places: Tensor, columns: int) -> Tensor:
    return torch.zeros(places.shape[0], columns).scatter(-1, places, 1.0)


def test_places_of_the_largest_are_marked_by_comparisons() -> None:
    assert applied(lambda x: marked(torch.topk(x, 2).indices, 4), rows(5, 4), RULE)


def test_sums_are_left() -> None:
    def counted(x: Tensor) -> Tensor:
        places = torch.topk(x, 2).indices
        return torch.zeros(5, 4).scatter_add(-1, places, torch.ones(5, 2))

    assert not applied(counted, rows(5, 4), RULE)


@pytest.mark.parametrize("columns", [3, 5, 6])
def test_places_that_may_be_out_of_range_are_left_to_aten(columns: int) -> None:
    """The largest are among the first three; who compiles knows only that they are among six."""

    def function(x: Tensor) -> Tensor:
        return marked(torch.topk(x - 100.0 * (torch.arange(6) > 2), 2).indices, columns)

    assert bool(applied(function, rows(5, 6), RULE)) == (columns > 5)
