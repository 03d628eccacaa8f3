"""Gradients, optimizers, random numbers and running statistics through the backend."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusec import dynamo
from tests.backend.agreement import Block, check


def test_gradients(backend: Any) -> None:
    model, x = Block(), torch.randn(2, 5, 8, requires_grad=True)
    model(x).square().mean().backward()
    expected = [x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    torch.compile(model, backend=backend)(x).square().mean().backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    torch.testing.assert_close(found, expected)


def test_gradients_through_attention(backend: Any) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    inputs = [torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(attend(*inputs).sum(), inputs)
    found = torch.autograd.grad(torch.compile(attend, backend=backend)(*inputs).sum(), inputs)
    torch.testing.assert_close(found, expected)


def _inner_tangent(x: Tensor, w: Tensor) -> Any:
    return torch.func.jvp(lambda x: torch.tanh(nn.functional.linear(x, w)), (x,), (x.cos(),))


TRANSFORMED = {
    "gradient of a matrix product": torch.func.grad(lambda x, w: (x @ w).square().sum()),
    "gradient of a linear layer": torch.func.grad(lambda x, w: nn.functional.linear(x, w).square().sum()),
    "gradient of attention": torch.func.grad(
        lambda x, w: nn.functional.scaled_dot_product_attention(x[None], w[None], w[None]).square().sum()
    ),
    "tangent": _inner_tangent,
    "Jacobian, backward": torch.func.jacrev(lambda x, w: torch.tanh(x @ w)),
    "Jacobian, forward": torch.func.jacfwd(lambda x, w: torch.tanh(x @ w)),
    "Hessian": torch.func.hessian(lambda x, w: torch.tanh(x @ w).sum()),
    "gradient of each row": lambda x, w: torch.func.vmap(
        torch.func.grad(lambda w, row: (row @ w).square().sum()), (None, 0)
    )(w, x),
}


@pytest.mark.parametrize("function", TRANSFORMED.values(), ids=TRANSFORMED)
def test_gradients_within_a_call(function: Any, backend: Any) -> None:
    check(backend, function, torch.randn(6, 6), torch.randn(6, 6), grad=True)


def test_gradients_of_what_a_call_makes(backend: Any) -> None:
    def gradient(x: Tensor, w: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().clone().requires_grad_()
            return torch.autograd.grad(torch.tanh(y @ w).sum(), y)[0]

    x, w = torch.randn(6, 6), torch.randn(6, 6)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(gradient, backend=backend)(x, w), gradient(x, w))


def test_requires_grad_of_outputs(backend: Any) -> None:
    x = torch.randn(3, requires_grad=True)
    check(backend, lambda x: (x * 2, (x * 2).detach(), x.detach() > 0), x, grad=True)


def test_a_training_loop_follows_eager(backend: Any) -> None:
    def losses(compiled: bool) -> list[float]:
        torch.manual_seed(1)
        model = Block()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = torch.compile(model, backend=backend) if compiled else model
        x, out = torch.randn(4, 8), []
        for _ in range(5):
            loss = (run(x) - x.flip(0)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)


def test_random_numbers_are_eagers(backend: Any) -> None:
    def draw(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) + torch.randn(3) + torch.rand_like(x)

    x = torch.randn(3)
    compiled = torch.compile(draw, backend=backend)
    for _ in range(2):
        torch.manual_seed(3)
        expected, state = draw(x), torch.get_rng_state()
        torch.manual_seed(3)
        torch.testing.assert_close(compiled(x), expected)
        assert torch.equal(torch.get_rng_state(), state)


def test_dropout_in_training(backend: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    x = torch.randn(5, 4)
    torch.manual_seed(3)
    model(x).sum().backward()
    expected = model[0].weight.grad
    model.zero_grad()
    torch.manual_seed(3)
    torch.compile(model, backend=backend)(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, expected)


def test_running_statistics(backend: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).train()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        x = torch.randn(5, 4)
        found, expected = compiled(x), plain(x)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.thorough), 0.5])
def test_checkpointed_attention(dropout: float, backend: Any) -> None:
    """It is computed again for the gradients; only where it drops something does that take the generator's state."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(8, 24)

        def attend(self, x: Tensor) -> Tensor:
            q, k, v = self.projection(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.attend, x.sin(), use_reentrant=False)

    model = Attention()
    fast = torch.compile(model, backend=backend, dynamic=True)
    for length in (5, 9):
        x, found = torch.randn(3, length, 8, requires_grad=True), []
        for run in (fast, model):
            torch.manual_seed(length)
            found.append(torch.autograd.grad(run(x).square().sum(), (x, *model.parameters())))
        torch.testing.assert_close(*found)
    assert dynamo.fallbacks() == []
