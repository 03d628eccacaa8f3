"""Complex tensors, which stay ATen's, and what torch only marks as a conjugate or a negative in memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fusec import dynamo


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
    assert "negates what lies in memory" in why
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
