"""Lengths that are multiples of others are products of symbols, in kernels and in all calls that keep the guards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusec import dynamo
from fusec.dynamo import backend, compiled_graphs


def by_scales(x: Tensor, scale: Tensor) -> Tensor:
    return (x.reshape(*scale.shape, -1) * scale[..., None]).flatten(-2)


def by_pairs_and_scales(p: Tensor, scale: Tensor) -> Tensor:
    """Twice as many codes as bytes are split."""
    return by_scales(torch.stack([p & 15, p >> 4], -1).flatten(-2).float(), scale)


def by_length(x: Tensor, length: int) -> Tensor:
    return x.unflatten(-1, (-1, length)).softmax(-1).flatten(-2)


def by_a_number(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 8)).softmax(-1).flatten(-2)


def twice(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 4)).softmax(-1).unflatten(1, (-1, 3)).sum(2)


def last_parts(x: Tensor, scale: Tensor) -> Tensor:
    """A view of an input, of a length that is computed."""
    return x.view(*scale.shape, -1)[:, -1]


def floats(*shape: int) -> Tensor:
    return torch.randn(shape)


def codes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


CASES: dict[Callable[..., Any], list[tuple[Any, ...]]] = {
    by_scales: [(floats(5, 24), floats(5, 3)), (floats(7, 60), floats(7, 12))],
    by_pairs_and_scales: [(codes(5, 24), floats(5, 3)), (codes(7, 60), floats(7, 12))],
    by_length: [(floats(5, 24), 6), (floats(7, 60), 12)],
    by_a_number: [(floats(5, 24),), (floats(7, 64),)],
    twice: [(floats(5, 24),), (floats(7, 60),)],
    last_parts: [(floats(5, 24), floats(5, 3)), (floats(7, 60), floats(7, 12))],
}


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_one_program_serves_all_lengths(function: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, dynamic=True, fullgraph=True, options={"strict": True})
    for arguments in CASES[function]:
        torch.testing.assert_close(compiled(*arguments), function(*arguments))
    (graph,) = compiled_graphs()
    assert "floor" not in str(graph.graph) and not dynamo.fallbacks()
    assert {step.kind for step in graph.program.steps} <= {"kernel"}


def test_a_length_that_is_no_such_multiple_is_compiled_again() -> None:
    """Groups of an odd number of codes do not fill bytes."""
    torch._dynamo.reset()
    compiled = torch.compile(by_pairs_and_scales, backend=backend, dynamic=True, options={"strict": True})
    for columns, groups in ((24, 3), (24, 16), (60, 12)):
        arguments = codes(5, columns), floats(5, groups)
        torch.testing.assert_close(compiled(*arguments), by_pairs_and_scales(*arguments))
    assert len(compiled_graphs()) == 2
