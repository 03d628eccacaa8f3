"""Nested tensors (jagged): what is computed is computed of their values; their ragged lengths are no numbers."""

from typing import Any

import torch
from torch import Tensor, nn


def jagged(*lengths: int, requires_grad: bool = False) -> Tensor:
    rows = [torch.randn(n, 16) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=requires_grad)


def test_pointwise_operations_and_a_layer(backend: Any) -> None:
    layer = nn.Linear(16, 8)
    compiled = torch.compile(lambda x: layer(x).relu() * 2, backend=backend)
    with torch.no_grad():
        for lengths in ((3, 5), (3, 5), (4, 1, 2)):
            x = jagged(*lengths)
            found, expected = compiled(x), layer(x).relu() * 2
            assert found.is_nested and found.shape == expected.shape
            torch.testing.assert_close(found.values(), expected.values())
            assert (found + expected).shape == expected.shape  # the ragged dim is the same one


def test_gradients(backend: Any) -> None:
    layer = nn.Linear(16, 8)
    x = jagged(3, 5, requires_grad=True)
    grads = []
    for model in (layer, torch.compile(layer, backend=backend)):
        layer.zero_grad()
        x.grad = None
        (model(x).sin().values() ** 2).sum().backward()
        grads.append([layer.weight.grad.clone(), layer.bias.grad.clone(), x.grad.values().clone()])
    for expected, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)
