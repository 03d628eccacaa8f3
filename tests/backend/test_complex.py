"""Types without arithmetic, complex ones first, which stay ATen's; what is only marked as a conjugate or a negative."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusec import dynamo
from tests.backend.agreement import check


def conjugate(c: Tensor) -> Tensor:
    return c.conj().imag + 1


def copied(c: Tensor) -> Tensor:
    return c.conj().imag.clone() * 2


def physical(c: Tensor) -> Tensor:
    return torch.view_as_real(c.conj().resolve_conj())


def views_of_one(c: Tensor) -> tuple[Tensor, ...]:
    d = c * 2
    return d.conj(), d, d.conj().imag, d.imag


def product(c: Tensor) -> Tensor:
    return (c.conj() * c).real + c.imag


FUNCTIONS = [conjugate, copied, physical, views_of_one, product]


@pytest.mark.parametrize("given", ["plain", "conjugate"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_conjugates_are_what_they_are(backend: Any, function: Any, given: str) -> None:
    c = torch.randn(3, dtype=torch.complex64)
    c = c.conj() if given == "conjugate" else c
    torch.testing.assert_close(torch.compile(function, backend=backend)(c), function(c))


def test_an_input_may_be_marked_as_negative(backend: Any) -> None:
    x = torch.randn(5, dtype=torch.complex64).conj().imag
    assert x.is_neg()

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return x[1:] * 2, x.sum(), x

    torch.testing.assert_close(torch.compile(step, backend=backend)(x), step(x))


def test_such_an_input_may_change(backend: Any) -> None:
    """Through ATen, which is told."""
    whole = torch.randn(5, dtype=torch.complex64)
    mine, x = whole.clone().conj().imag, whole.conj().imag

    def step(x: Tensor) -> Tensor:
        x.mul_(3)
        return x + 1

    torch.testing.assert_close(torch.compile(step, backend=backend)(x), step(mine))
    torch.testing.assert_close(x, mine)
    (why,) = dynamo.fallbacks()
    assert "it is a negative view" in why
    dynamo.reset()


def test_a_conjugate_is_saved_for_the_gradient(backend: Any) -> None:
    """Rotary embeddings with an angle that is learned."""
    dynamo.reset()

    def rotated(x: Tensor, angle: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x) * torch.polar(torch.ones_like(angle), angle))

    inputs = torch.randn(3, 4, 2), torch.randn(4)
    found, wanted = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    weights = torch.randn(3, 4, 2)
    (torch.compile(rotated, backend=backend)(*found) * weights).sum().backward()
    (rotated(*wanted) * weights).sum().backward()
    torch.testing.assert_close([x.grad for x in found], [x.grad for x in wanted])
    assert not dynamo.fallbacks()


def ones(x: Tensor) -> Tensor:
    return torch.ones(5, dtype=torch.complex64) + x


def filled(x: Tensor) -> Tensor:
    return torch.full((2, 1), 1j) * x[:1]


def padded(x: Tensor) -> Tensor:
    return F.pad(torch.complex(x, x), (1, 1))


def longer_transform(x: Tensor) -> Tensor:
    return torch.fft.fftn(x, s=(8,), dim=(1,))


def filtered(x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * torch.ones(3, dtype=torch.complex64))


def chosen(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.complex(x, x), torch.zeros((), dtype=torch.complex64))


def joined(x: Tensor) -> Tensor:
    return torch.cat([torch.complex(x, x), torch.zeros(4, 1, dtype=torch.complex64)], 1)


def cached(x: Tensor) -> Tensor:
    places = torch.tensor([1, 2, 3, 4])
    return torch.zeros(8, 5, dtype=torch.complex64).index_copy(0, places, torch.complex(x, x))


def unsigned(x: Tensor) -> tuple[Tensor, ...]:
    types = torch.uint16, torch.uint32, torch.uint64
    return tuple(torch.full((3,), 7, dtype=t).to(torch.float32) * x[0, 0] for t in types)


def float8(x: Tensor) -> Tensor:
    return torch.zeros(5, dtype=torch.float8_e5m2).to(torch.float32) + x.to(torch.float8_e4m3fn).to(torch.float32)


MADE = [ones, filled, padded, longer_transform, filtered, chosen, joined, cached, unsigned, float8]


@pytest.mark.parametrize("function", MADE, ids=lambda f: f.__name__)
def test_numbers_of_types_without_arithmetic_are_made_by_aten(backend: Any, function: Any) -> None:
    check(backend, function, torch.randn(4, 5))


@pytest.mark.parametrize(
    "function", [lambda c: c.angle().sum(), lambda c: c.prod().abs(), lambda c: c.sgn().real.sum()]
)
def test_gradients_of_functions_that_make_complex_constants(backend: Any, function: Any) -> None:
    found, wanted = (torch.randn(4, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    torch.compile(lambda x: function(torch.complex(x, x * 2)), backend=backend)(found).backward()
    function(torch.complex(wanted, wanted * 2)).backward()
    torch.testing.assert_close(found.grad, wanted.grad)
