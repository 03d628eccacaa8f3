"""Inputs for a graph, drawn so that mistakes show: ordinary, positive, tiny, and with special values."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fusec.errors import GraphError
from fusec.ir.graph import Graph, Value
from fusec.ir.ops import Trait
from fusec.ir.types import ScalarType, Size, TensorType, evaluate_size, evaluate_sizes
from fusec.reference.dtypes import torch_dtype
from fusec.verify import field

ROUNDS: dict[str, tuple[str, ...]] = {
    "float64": ("normal", "positive", "tiny", "large"),
    "special values": ("NaN", "+inf", "-inf", "-0", "masked"),
}
"""``tiny`` makes an eps matter; ``large`` makes exponentials overflow; ``positive`` keeps logarithms and roots from
being NaN; ``masked`` has whole rows of -inf and False."""

_SCALES = {"tiny": 1e-5, "large": 1e3}
_SPECIAL = {"NaN": torch.nan, "+inf": torch.inf, "-inf": -torch.inf, "-0": -0.0}


def float_inputs(graph: Graph, symbols: Mapping[str, int], round: str, seed: int) -> list[Any]:
    """Inputs with every float in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [_draw(value, symbols, round, generator) for value in graph.inputs]


def field_inputs(graph: Graph, symbols: Mapping[str, int], seed: int) -> list[Any]:
    """Return inputs with field tensors instead of float tensors."""
    generator = torch.Generator().manual_seed(seed)
    return [
        field.draw(evaluate_sizes(v.type.shape, symbols), generator)
        if isinstance(v.type, TensorType) and v.type.dtype.is_float
        else _draw(v, symbols, "normal", generator)
        for v in graph.inputs
    ]


def _draw(value: Value, symbols: Mapping[str, int], round: str, generator: torch.Generator) -> Any:
    if isinstance(value.type, ScalarType):
        return _draw_scalar(value.type, symbols)
    if not isinstance(value.type, TensorType):
        raise GraphError(f"no input of type {value.type} can be drawn")
    x = _draw_elements(value, value.type, symbols, round, generator)
    for d, stride in enumerate(value.type.strides):
        if stride == 0 and x.shape[d] > 1:  # an expanded dim
            x = x.narrow(d, 0, 1).expand(x.shape)
    return x


def _draw_elements(
    value: Value, type: TensorType, symbols: Mapping[str, int], round: str, generator: torch.Generator
) -> Tensor:
    shape, dtype = evaluate_sizes(type.shape, symbols), type.dtype
    if dtype.is_float:
        return _draw_floats(shape, round, generator)
    if dtype.kind == "bool":
        return _masked(torch.rand(shape, generator=generator) < 0.7, False, round)
    rows = [evaluate_size(n, symbols) for n in _taken_from(value)]
    if len(shape) == 1 and not rows:
        # Rows to write must be distinct; indices should cover the indexed dim.
        return torch.randperm(shape[0], generator=generator).to(torch_dtype(dtype))
    return torch.randint(0, min(rows, default=2), shape, generator=generator).to(torch_dtype(dtype))


def _taken_from(value: Value) -> Iterator[Size]:
    """Yield the lengths of the dims that a value indexes without arithmetic."""
    for user in value.users:
        if user.has(Trait.LOOKUP) and value is user.operands[1]:
            yield user.operands[0].shape[user.attributes["dim"]]
        elif user.has(Trait.VIEW) or user.is_op("cast") or (user.is_op("where") and value in user.operands[1:]):
            yield from _taken_from(user.result)
        elif user.has(Trait.REGION):
            for inner, operand in zip(user.body.inputs, user.operands, strict=True):
                yield from _taken_from(inner) if operand is value else ()


def _draw_scalar(type: ScalarType, symbols: Mapping[str, int]) -> Any:
    if type.kind == "int":
        return 2 if type.expr is None else evaluate_size(type.expr, symbols)
    return 0.7 if type.kind == "float" else True


def _draw_floats(shape: tuple[int, ...], round: str, generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if round == "positive" or not shape:
        # A 0-d float is an eps or a scale.
        return x.abs() + 0.1
    if round in _SCALES:
        return x * _SCALES[round]
    if round in _SPECIAL and x.numel():
        place = int(torch.randint(0, x.numel(), (), generator=generator))
        x.view(-1)[place] = _SPECIAL[round]
    return _masked(x, -torch.inf, round)


def _masked(x: Tensor, fill: float | bool, round: str) -> Tensor:
    """Fill the first row in the round ``masked``."""
    if round == "masked" and x.ndim >= 2 and x.numel():
        x.view(-1, x.shape[-1])[0] = fill
    return x
