"""The layout that a boundary promises: strides of graph outputs and of the operands of opaque calls."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusec.errors import GraphError
from fusec.ir.graph import Graph
from fusec.ir.types import TensorType, Type, evaluate_sizes


def with_strides(x: Tensor, strides: Sequence[int]) -> Tensor:
    """``x`` with these strides: itself where it has them, a view where only dims of length 1 differ, else a copy."""
    if x.stride() == tuple(strides) or x.layout != torch.strided:
        return x
    if x.numel() == 0 or all(a == b or n == 1 for a, b, n in zip(x.stride(), strides, x.shape, strict=True)):
        return x.as_strided(x.shape, strides)
    return copied(x, strides)


def copied(x: Tensor, strides: Sequence[int]) -> Tensor:
    """A fresh tensor with the elements of ``x`` and these strides; where one is 0 the elements must repeat."""
    out = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    target = out
    for d, stride in enumerate(strides):
        if stride == 0 and x.shape[d] > 1:
            target, x = target.narrow(d, 0, 1), x.narrow(d, 0, 1)
    target.copy_(x)
    return out


def laid_out(x: Any, ty: Type | None, symbols: Mapping[str, int]) -> Any:
    """``x`` with the strides of ``ty``, where it has the shape of ``ty``."""
    if not isinstance(x, Tensor) or not isinstance(ty, TensorType) or x.ndim != ty.rank or not x.ndim:
        return x
    try:
        if evaluate_sizes(ty.shape, symbols) != tuple(x.shape):
            return x
        return with_strides(x, evaluate_sizes(ty.strides, symbols))
    except GraphError:  # a size that only an earlier call knows
        return x


def finalize_outputs(
    graph: Graph, results: Sequence[Any], inputs: Sequence[Any], symbols: Mapping[str, int]
) -> list[Any]:
    """Results with the promised strides, none of which shares storage with an input or another result."""
    taken = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, Tensor) and x.layout == torch.strided}
    specialized: list[Any] = []
    for x, ty in zip(results, graph.output_types, strict=True):
        x = laid_out(x, ty, symbols)
        if isinstance(x, Tensor) and x.layout == torch.strided and x.numel():
            if x.untyped_storage().data_ptr() in taken:
                x = copied(x, x.stride())
            taken.add(x.untyped_storage().data_ptr())
        specialized.append(x)
    return specialized
