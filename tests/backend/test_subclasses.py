"""Tensors with classes of their own, which know dispatched operations alone."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

KNOWN = "t addmm mm bmm mul add view _unsafe_view expand transpose clone detach alias relu".split()


class Wrapped(Tensor):
    """Passes on what it knows; composite operations are not among that, as autograd takes them apart."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        return Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return "Wrapped"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> "Wrapped":
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name.removeprefix("aten::") not in KNOWN:
            raise TypeError(f"{function} of {cls.__name__}")
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        return tree_map(lambda x: Wrapped(x) if isinstance(x, Tensor) else x, function(*args, **kwargs))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight, weight[:, 0]).relu()


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t() + 1


@pytest.mark.parametrize("function", [linear, matmul])
def test_composite_operations_are_taken_apart(backend: Any, function: Any) -> None:
    x, weight = torch.randn(2, 4, 8), torch.randn(6, 8)
    with torch.no_grad():
        found = torch.compile(function, backend=backend)(Wrapped(x), weight)
        assert isinstance(found, Wrapped)
        torch.testing.assert_close(found.inner, function(x, weight))
