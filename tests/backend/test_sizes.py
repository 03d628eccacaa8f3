"""Sizes and numbers that change from call to call, without compiling anew."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fusec import dynamo
from fusec.remarks import Remarks
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


@pytest.mark.parametrize(
    "function",
    [
        lambda x, k: (x[:, -k:] * 2).sum(1), lambda x, k: x.select(1, -k) * 3, lambda x, k: x[:, -1] * k,
        lambda x, k: x[:, k:-k].sum(1) + x[:, :k].sum(1),
    ],
    ids=["last", "one", "last one", "between"],
)  # fmt: skip
def test_slices_that_begin_at_a_size_and_their_gradients(function: Any, backend: Any) -> None:
    """What is in the slice has another size than anything that its kernel reads or gives."""
    dynamo.reset()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for k in (3, 4, 2):
        x = torch.randn(4, 9, requires_grad=True)
        plain = x.detach().clone().requires_grad_()
        found, expected = compiled(x, k), function(plain, k)
        same(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        same(x.grad, plain.grad)
    for graph in dynamo.compiled_graphs():
        assert not getattr(graph, "remarks", Remarks()).of("failure")


def test_the_gradient_of_a_slice_that_may_be_clamped(backend: Any) -> None:
    def last(x: Tensor) -> Tensor:
        return (x[:, -5:] * 2).sum(1)

    compiled = torch.compile(last, backend=backend, dynamic=True)
    for n in (9, 7, 5, 4, 3):
        x = torch.randn(4, n, requires_grad=True)
        plain = x.detach().clone().requires_grad_()
        compiled(x).square().sum().backward()
        last(plain).square().sum().backward()
        same(x.grad, plain.grad)
