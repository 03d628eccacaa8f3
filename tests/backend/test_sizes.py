"""Sizes and numbers that change from call to call, without compiling anew."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fusec import dynamo
from fusec.errors import ImportFailure
from fusec.remarks import Remarks
from tests.backend.agreement import Block, check, same


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


FLOATS = {
    "half": lambda x: x * (x.shape[1] / 2) + x.shape[1] / 2,
    "quotient": lambda x: torch.arange(x.shape[1]) * (4 / x.shape[1]) + x,
    "by hand": lambda x: x.sum(1) / (x.shape[1] / 4),
    "root": lambda x: x * x.shape[1] ** -0.5 + (x.shape[1] / 3) ** 0.5,
    "base": lambda x: x / (10000.0 * (2.0 * x.shape[1] / 4 - 1.0) ** (8 / 6)),
    "bounds": lambda x: x.clamp(max=x.shape[1] / 40, min=-1 / x.shape[1]),
    "filled": lambda x: torch.full((3, x.shape[1]), x.shape[1] / 2) + x[:3],
    "of ATen": lambda x: torch.nn.functional.celu(x, alpha=1 / x.shape[1]),
    "smoothing": lambda x: torch.nn.functional.cross_entropy(x, torch.arange(4) % 3, label_smoothing=0.1),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_made_of_sizes_are_not_rounded(name: str, backend: Any) -> None:
    dynamo.reset()
    compiled = torch.compile(FLOATS[name], backend=backend, dynamic=True)
    for n in (9, 7, 8):
        x = torch.randn(4, n)
        with torch.no_grad():
            same(compiled(x), FLOATS[name](x))
    for graph in dynamo.compiled_graphs():
        assert not getattr(graph, "remarks", Remarks()).of("failure")
    assert not dynamo.fallbacks()


NUMBERS = {
    "slice": lambda x, k: x[:, k:].exp(),
    "abs": lambda x, k: x + abs(k),
    "max": lambda x, k: x + max(k, 0) + min(k, 1),
    "towards zero": lambda x, k: x + int(k / 2),
    "pad": lambda x, k: torch.nn.functional.pad(x, (max(k, 0), max(-k, 0))) + 1,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_be_negative(name: str, backend: Any) -> None:
    """A symbol is positive: negative numbers are ATen's, which is told, also where the first is one."""
    for numbers in ((3, -3, 4), (-3, 3, -2)):
        torch._dynamo.reset()
        dynamo.reset()
        compiled = torch.compile(NUMBERS[name], backend=backend, dynamic=True)
        for k in numbers:
            x = torch.randn(4, 9)
            with torch.no_grad():
                same(compiled(x, k), NUMBERS[name](x, k))
        told = [reason for reason in dynamo.fallbacks() if "not positive" in reason]
        assert len(told) == len(dynamo.fallbacks())
    dynamo.reset()


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_be_0(name: str, backend: Any) -> None:
    """It is compiled as such, whether it comes first or later."""
    for numbers in ((3, 0, 4, 0), (0, 3, 0)):
        torch._dynamo.reset()
        compiled = torch.compile(NUMBERS[name], backend=backend, dynamic=True)
        for k in numbers:
            x = torch.randn(4, 9)
            with torch.no_grad():
                same(compiled(x, k), NUMBERS[name](x, k))
    assert not dynamo.fallbacks()


def test_a_number_that_is_not_positive_is_counted(backend: Any) -> None:
    dynamo.reset()
    compiled = torch.compile(lambda x, k: x + abs(k), backend=backend, dynamic=True)
    for k in (3, -3, -4):
        with torch.no_grad():
            assert compiled(torch.zeros(2), k)[0] == abs(k)
    assert dynamo.fallbacks() == ["a number that is not positive: k=-3"]
    dynamo.reset()


def test_a_number_that_is_not_positive_is_refused_where_nothing_may_fall_back(backend: Any) -> None:
    compiled = torch.compile(lambda x, k: x + abs(k), backend=backend, dynamic=True, options={"strict": True})
    with torch.no_grad():
        assert compiled(torch.zeros(2), 3)[0] == 3
        with pytest.raises(ImportFailure, match="k=-3"):
            compiled(torch.zeros(2), -3)


def test_a_truth_value_of_sizes_is_left_to_aten(backend: Any) -> None:
    compiled = torch.compile(lambda x, k: x * (k > 4), backend=backend, dynamic=True)
    for k in (3, 5, 4):
        x = torch.randn(2)
        with torch.no_grad():
            same(compiled(x, k), x * (k > 4))
    dynamo.reset()


def test_an_assignment_behind_the_end_changes_nothing(backend: Any) -> None:
    def put(x: Tensor) -> Tensor:
        y = x.exp()
        y[:, 5:] = 0
        return y

    compiled = torch.compile(put, backend=backend, dynamic=True)
    for n in (3, 9, 4, 5, 6):
        x = torch.randn(4, n)
        with torch.no_grad():
            same(compiled(x), put(x))


def test_writes_to_a_part_compile_once(backend: Any) -> None:
    dynamo.reset()

    def write(x: Tensor, places: Tensor, rows: Tensor) -> Tensor:
        x[:, places] = rows
        x[:, 1:][:, places] += rows
        x.flatten(0, 1)[places, :] -= 1
        return x.sum(1)

    compiled = torch.compile(write, backend=backend, dynamic=True)
    for batch, length, width in ((2, 7, 3), (3, 9, 5), (5, 8, 6)):
        x, rows = torch.randn(batch, length, width), torch.randn(batch, 4, width)
        plain, places = x.clone(), torch.tensor([4, 1, 5, 2])
        same(compiled(x, places, rows), write(plain, places, rows))
        same(x, plain)
    assert len(dynamo.compiled_graphs()) == 1 and not dynamo.fallbacks()


def test_whole_numbers_made_of_halves(backend: Any) -> None:
    def part(x: Tensor) -> Tensor:
        return x[:, : int(x.shape[1] / 2.0)] * int(x.shape[1] * 0.75) + torch.arange(int(x.shape[1] * 0.5))

    dynamo.reset()
    compiled = torch.compile(part, backend=backend, dynamic=True)
    for n in (9, 7, 8):
        x = torch.randn(4, n)
        with torch.no_grad():
            same(compiled(x), part(x))
    for graph in dynamo.compiled_graphs():
        assert not getattr(graph, "remarks", Remarks()).of("failure")


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("correction", [1, 3, 0.5])
def test_variances_of_fewer_than_their_correction(correction: float, backend: Any) -> None:
    def variance(x: Tensor) -> Tensor:
        return x.var(1, correction=correction) * 2

    compiled = torch.compile(variance, backend=backend, dynamic=True)
    for n in (5, 2, 3, 4):
        x = torch.randn(2, n)
        same(compiled(x), variance(x))


def strided_part(x: Tensor) -> Tensor:
    x.view(2, -1)[:, ::3] -= 1
    return x * 2


@pytest.mark.parametrize("shape", [(4, 4), (8, 2), (16,), (2, 8)])
def test_sizes_that_only_guards_know_to_be_equal(shape: tuple[int, ...], backend: Any) -> None:
    """``2 * (n // 2)`` is ``n``, as a view of two rows was asked for."""
    check(backend, strided_part, torch.randn(shape), dynamic=True)
