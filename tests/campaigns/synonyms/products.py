"""Other spellings of matrix products and of linear layers."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.campaigns.respelling import operands_of, synonym


@synonym("linear")
def bias_apart(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """x·Wᵀ + b, the bias by itself."""
    return NotImplemented if bias is None else F.linear(x, weight) + bias


@synonym("linear")
def product_with_transposed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer is a product with the transposed weight."""
    y = x @ weight.t()
    return y if bias is None else y + bias


@synonym("linear")
def transposed_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(W·xᵀ)ᵀ, then the bias."""
    y = torch.matmul(weight, x.mT).mT
    return y if bias is None else y + bias


@synonym("linear")
def linear_by_einsum(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The sum over the inner dim, in letters."""
    y = torch.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


@synonym("linear")
def linear_of_flat_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A product of two matrices, batch and sequence being one dim."""
    if x.ndim != 3:
        return NotImplemented
    flat = x.reshape(-1, x.shape[-1])
    y = torch.mm(flat, weight.t()) if bias is None else torch.addmm(bias, flat, weight.t())
    return y.view(*x.shape[:-1], weight.shape[0])


@synonym("linear")
def linear_by_tensordot(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The sum over named dims."""
    y = torch.tensordot(x, weight, dims=([-1], [1]))
    return y if bias is None else y + bias


@synonym("linear")
def linear_by_batches(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A batch of products with one weight."""
    if x.ndim != 3:
        return NotImplemented
    shared = weight.t().expand(x.shape[0], -1, -1)
    return torch.bmm(x, shared) if bias is None else torch.baddbmm(bias.expand(x.shape[0], 1, -1), x, shared)


@synonym("matmul", "__matmul__")
def product_of_transposed(x: Tensor, y: Tensor) -> Any:
    """x·y = (yᵀ·xᵀ)ᵀ."""
    return (y.mT @ x.mT).mT if x.ndim == y.ndim > 1 else NotImplemented


@synonym("matmul", "__matmul__")
def product_by_einsum(x: Tensor, y: Tensor) -> Any:
    """x·y in letters."""
    if x.ndim != y.ndim or x.ndim < 2:
        return NotImplemented
    batch = "bhg"[: x.ndim - 2]
    return torch.einsum(f"{batch}ij,{batch}jk->{batch}ik", x, y)


@synonym("matmul", "__matmul__")
def product_of_flat_batches(x: Tensor, y: Tensor) -> Any:
    """Batch and heads are one dim for the products."""
    if x.ndim != 4 or y.ndim != 4 or x.shape[:2] != y.shape[:2]:
        return NotImplemented
    return torch.bmm(x.flatten(0, 1), y.flatten(0, 1)).unflatten(0, x.shape[:2])


@synonym("add")
def sum_with_batches_of_products(x: Any, y: Any, **options: Any) -> Any:
    """A·B·α + C in one call, batch and heads being one dim."""
    factors = operands_of(x, "mul")
    if options or len(factors) != 2 or not isinstance(factors[1], float):
        return NotImplemented
    pair = operands_of(factors[0], "matmul")
    if len(pair) != 2 or pair[0].ndim != 4 or pair[1].ndim != 4 or not isinstance(y, Tensor) or y.dtype != x.dtype:
        return NotImplemented
    q, k = (part.flatten(0, 1) for part in pair)
    return torch.baddbmm(y.expand(x.shape).flatten(0, 1), q, k, alpha=factors[1]).view(x.shape)
