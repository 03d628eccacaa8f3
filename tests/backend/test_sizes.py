"""Sizes and numbers that change from call to call, without compiling anew."""

from typing import Any

import torch
from torch import Tensor

from fusec import dynamo
from tests.backend.agreement import Block, same


def test_dynamic_shapes_compile_once(backend: Any) -> None:
    dynamo.reset()
    model = Block()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for batch, length in ((2, 5), (3, 7), (4, 16)):
            x = torch.randn(batch, length, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(dynamo.compiled_graphs()) == 1


def test_a_marked_dimension(backend: Any) -> None:
    dynamo.reset()
    compiled = torch.compile(lambda x: x.reshape(-1).softmax(0) * x.shape[0], backend=backend)
    for n in (3, 9):
        x = torch.randn(n, 4)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), x.reshape(-1).softmax(0) * n)
    assert len(dynamo.compiled_graphs()) == 1


def test_sizes_as_numbers(backend: Any) -> None:
    def f(x: Tensor, n: int) -> tuple[Any, ...]:
        return x[:, : n // 2], torch.arange(n) + x.shape[1], x.new_ones(n, 2 * x.shape[0]), n * 3, x * n**0.5

    compiled = torch.compile(f, backend=backend, dynamic=True)
    for n in (4, 6, 7):
        x = torch.randn(n, 2 * n)
        with torch.no_grad():
            same(compiled(x, n), f(x, n))


def test_a_float_argument(backend: Any) -> None:
    compiled = torch.compile(lambda x, s: x * s + s, backend=backend, dynamic=True)
    x = torch.randn(3)
    for s in (0.5, 0.25, 3.0):
        same(compiled(x, s), x * s + s)


def test_strides_of_what_may_be_empty(backend: Any) -> None:
    dynamo.reset()
    compiled = torch.compile(lambda x: x[:, 3:].exp(), backend=backend, dynamic=True)
    for n in (5, 8, 3):
        x = torch.randn(4, n)
        same(compiled(x), x[:, 3:].exp())
