"""The tracer of patterns: declarations are traced by the frontend and canonicalized as models are."""

from collections.abc import Callable, Sequence
from typing import Any

from fusec.ir.graph import Graph
from fusec.ir.types import TensorType


def trace_types(function: Callable[..., Any], samples: Sequence[Any]) -> Graph:
    """Return the graph of a function on tensors of these types; other samples are passed unchanged."""
    import torch

    from fusec.frontend import trace
    from fusec.frontend.dtypes import to_torch_dtype
    from fusec.frontend.torch_internals import outside_tracing

    def tensor(ty: TensorType) -> torch.Tensor:
        return torch.empty([int(n) for n in ty.shape], dtype=to_torch_dtype(ty.dtype), device="meta")

    with outside_tracing():
        given = [tensor(s) if isinstance(s, TensorType) else s for s in samples]
    return trace(function, given, symbolic=False)
