"""Gated linear units: one half of the hidden layer decides how much of the other half passes."""

from typing import Annotated

from torch import Tensor
from torch.nn import functional as F

from fusec.rewriting.fusion import Dims, fusion

Rows = Annotated[Tensor, Dims("*batch cols")]
Packed = Annotated[Tensor, Dims("*batch 2*half")]
Inner = Annotated[Tensor, Dims("*batch inner")]
Weight = Annotated[Tensor, Dims("cols inner")]


@fusion
def swiglu(gate: Rows, up: Rows) -> Tensor:
    """silu(gate)·up."""
    return F.silu(gate) * up


@fusion
def geglu(gate: Rows, up: Rows) -> Tensor:
    """gelu(gate)·up."""
    return F.gelu(gate) * up


@fusion
def geglu_tanh(gate: Rows, up: Rows) -> Tensor:
    """gelu(gate)·up, gelu by its tanh form."""
    return F.gelu(gate, approximate="tanh") * up


@fusion
def packed_swiglu(x: Packed) -> Tensor:
    """swiglu of the two halves of each row, the gate first."""
    gate, up = x.chunk(2, -1)
    return swiglu(gate, up)


@fusion
def packed_swiglu_gate_last(x: Packed) -> Tensor:
    """swiglu of the two halves of each row, the gate last."""
    up, gate = x.chunk(2, -1)
    return swiglu(gate, up)


@fusion
def packed_geglu(x: Packed) -> Tensor:
    """geglu of the two halves of each row, the gate first."""
    gate, up = x.chunk(2, -1)
    return geglu(gate, up)


@fusion
def packed_geglu_gate_last(x: Packed) -> Tensor:
    """geglu of the two halves of each row, the gate last."""
    up, gate = x.chunk(2, -1)
    return geglu(gate, up)


@fusion
def packed_geglu_tanh(x: Packed) -> Tensor:
    """geglu of the two halves of each row, the gate first, gelu by its tanh form."""
    gate, up = x.chunk(2, -1)
    return geglu_tanh(gate, up)


@fusion
def gated_projection(x: Inner, gate_weight: Weight, up_weight: Weight) -> Tensor:
    """Both projections of a SwiGLU layer and the gate, so that neither half reaches memory."""
    return swiglu(F.linear(x, gate_weight), F.linear(x, up_weight))


@fusion
def gated_projection_gelu(x: Inner, gate_weight: Weight, up_weight: Weight) -> Tensor:
    """Both projections of a GEGLU layer and the gate, gelu by its tanh form."""
    return geglu_tanh(F.linear(x, gate_weight), F.linear(x, up_weight))
