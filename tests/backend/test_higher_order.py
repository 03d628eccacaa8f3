"""Operations on functions, and operations of a user's own that change their operands: calls among what is compiled."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from fusec import dynamo
from fusec.reference import opaque
from tests.backend.agreement import check


@torch.library.custom_op("fusec_tests::increase", mutates_args={"x"})
def increase(x: Tensor, by: int) -> None:
    x.add_(by)


@increase.register_fake
def _(x: Tensor, by: int) -> None:
    return None


@torch.library.custom_op("fusec_tests::accumulate", mutates_args={"total"})
def accumulate(total: Tensor, x: Tensor) -> Tensor:
    total.add_(x)
    return total * 2


@accumulate.register_fake
def _(total: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(total)


def chosen(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x * 2,)) * 3


def scanned(x: Tensor) -> Tensor:
    return scan(lambda carry, row: (carry + row, carry * row), x[0], x * 2)[1] + 1


def flexible(x: Tensor) -> Tensor:
    q = x.view(1, 1, *x.shape) * 2
    return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j)) * 2


def increased_value(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    before = y + 1
    increase(y, 3)
    return before, y + 1, x + y


def increased_input(x: Tensor) -> tuple[Tensor, ...]:
    before = x * 2
    increase(x, 3)
    return before, x * 2


def accumulated_row(x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    first = accumulate(x[0], y[1])
    second = accumulate(x[0], first)
    return first, second, x * 2, y


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function", [chosen, scanned, flexible, increased_value, increased_input, accumulated_row], ids=lambda f: f.__name__
)
def test_it_is_a_call_among_what_is_compiled(backend: Any, function: Any, dynamic: bool) -> None:
    check(backend, function, torch.randn(4, 6), dynamic=dynamic)
    (compiled,) = dynamo.compiled_graphs()
    nodes = getattr(compiled, "imported", compiled.graph).nodes
    calls = [n for n in nodes if str(n.attributes.get("target", "")).startswith("call.")]
    assert calls and len(nodes) > len(calls)


@pytest.mark.parametrize("function", [chosen, scanned, increased_value], ids=lambda f: f.__name__)
def test_gradients(backend: Any, function: Any) -> None:
    found, wanted = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    for x, runner in ((found, torch.compile(function, backend=backend)), (wanted, function)):
        results = runner(x)
        sum(y.sum() for y in (results if isinstance(results, tuple) else [results])).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(found.grad, wanted.grad)


def test_what_is_checkpointed_draws_the_same_numbers_again(backend: Any) -> None:
    def step(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5) * x, x, use_reentrant=False)  # type: ignore[no-any-return]

    found, wanted = (torch.randn(64, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    for x, runner in ((found, torch.compile(step, backend=backend)), (wanted, step)):
        torch.manual_seed(1)
        runner(x).sum().backward()
    torch.testing.assert_close(found.grad, wanted.grad)


def test_names_of_calls_are_not_given_again() -> None:
    first = opaque.register("one", lambda: 1)
    opaque.forget_registered()
    second = opaque.register("one", lambda: 2)
    assert first != second and opaque.resolve(second)() == 2
    with pytest.raises(Exception, match="no operation"):
        opaque.resolve(first)
