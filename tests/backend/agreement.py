"""Compiled and eager compared, and a compiler that only interprets."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusec import dynamo


def interpret(graph: Any, config: Any) -> Any:
    return SimpleNamespace(graph=graph, program=dynamo.interpreted(graph))


def check(backend: Any, function: Any, *inputs: Any, grad: bool = False, dynamic: bool | None = None) -> Any:
    """Compiled and eager agree in values, types, strides, whose storage outputs have, and what happens to inputs."""
    copies = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    with torch.set_grad_enabled(grad):
        expected, found = function(*copies), compiled(*inputs)
    same(found, expected)
    same(list(inputs), copies)
    assert sharing([found, *inputs]) == sharing([expected, *copies])
    return compiled


def sharing(values: Any) -> list[int]:
    """For each tensor, the number of the first that has the same storage."""
    storages = [x.untyped_storage()._cdata for x in tree_leaves(values) if isinstance(x, Tensor)]
    return [storages.index(storage) for storage in storages]


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
    elif isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.requires_grad == expected.requires_grad
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected, equal_nan=True)
    else:
        assert found == expected


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
