"""Runs an opaque or ordered node: the call of a torch operation that its attributes describe."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from fusec.errors import GraphError
from fusec.ir.graph import Node
from fusec.ir.types import OtherType, ScalarType, TensorType, evaluate_size
from fusec.reference.dtypes import torch_dtype
from fusec.reference.layout import laid_out


def call_opaque(
    node: Node, operands: Sequence[Any], symbols: Mapping[str, int], *, dtype: torch.dtype | None = None
) -> list[Any]:
    """Return the results of the call; ``dtype`` replaces every float dtype among the arguments.

    An operation without a kernel for that dtype is computed by its reference, or else in the dtypes of the graph.
    """
    try:
        return _call(node, operands, symbols, dtype)
    except RuntimeError:
        if dtype is None:
            raise
        declared = [_declared(x, v.type) for v, x in zip(node.operands, operands, strict=True)]
        found = _call(node, declared, symbols, None)
        return [x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in found]


def _declared(datum: Any, type: Any) -> Any:
    """A tensor of floats in the type that it has in the graph."""
    floats = isinstance(datum, torch.Tensor) and datum.is_floating_point() and isinstance(type, TensorType)
    return datum.to(torch_dtype(type.dtype)) if floats else datum


def _grouped_mm(x: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """``aten._grouped_mm`` of [rows, summed] and [groups, summed, columns]; rows beyond the last end are 0."""
    found = x.new_zeros(x.shape[0], matrices.shape[2])
    for matrix, (start, stop) in zip(matrices, itertools.pairwise([0, *offs.tolist()]), strict=True):
        found[start:stop] = x[start:stop] @ matrix
    return found


_REFERENCES: dict[str, Callable[..., Any]] = {"aten._grouped_mm.default": _grouped_mm}
"""Operations that torch has no kernel in float64 for, in plain PyTorch."""


def _call(node: Node, operands: Sequence[Any], symbols: Mapping[str, int], dtype: torch.dtype | None) -> list[Any]:
    tensors = []
    layouts = node.attributes.get("operand_types") or (None,) * len(operands)
    for value, datum, layout in zip(node.operands, operands, layouts, strict=True):
        if isinstance(value.type, TensorType) and isinstance(datum, (int, float)):
            kind = dtype if dtype is not None and value.type.dtype.is_float else torch_dtype(value.type.dtype)
            datum = torch.full((), datum, dtype=kind, device=value.type.device)
        tensors.append(laid_out(datum, layout, symbols))

    def decode(template: Any) -> Any:
        if isinstance(template, tuple):
            return _decode_tuple(template, tensors, decode, dtype)
        return evaluate_size(template, symbols) if isinstance(template, sympy.Expr) else template

    arguments = [decode(a) for a in node.attributes.get("args", ())]
    keywords = {name: decode(a) for name, a in node.attributes.get("kwargs", ())}
    target = node.attributes["target"]
    operation = _REFERENCES.get(target) if dtype == torch.float64 else None
    return _as_results(node, (operation or resolve(target))(*arguments, **keywords))


_registered: dict[str, Callable[..., Any]] = {}
_numbers = itertools.count()


def register(name: str, function: Callable[..., Any]) -> str:
    """A target for calls of a function that torch has no name for, in this process until ``forget_registered``."""
    target = f"call.{name}_{next(_numbers)}"
    _registered[target] = function
    return target


def forget_registered() -> None:
    """Free the registered functions; their names are not reused."""
    _registered.clear()


def resolve(target: str) -> Any:
    """Return the torch operation of a name (``aten.add.Tensor``, ``torchvision.nms.default``), or a registered one."""
    return _registered[target] if target in _registered else _resolve(target)


@functools.lru_cache(maxsize=1024)
def _resolve(target: str) -> Any:
    found: Any = torch.ops
    try:
        for part in target.removeprefix("torch.ops.").split("."):
            found = getattr(found, part)
    except AttributeError as reason:
        fix = "import the package that registers it"
        raise GraphError(f"torch has no operation {target!r}", why=str(reason), fix=fix) from reason
    return found


def _decode_tuple(template: tuple[Any, ...], operands: Sequence[Any], decode: Any, dtype: torch.dtype | None) -> Any:
    match template:
        case ("%", int(index)):
            return operands[index]
        case ("torch", str(name)):
            constant = getattr(torch, name)
            is_float = isinstance(constant, torch.dtype) and constant.is_floating_point
            return dtype if dtype is not None and is_float else constant
        case ("device", str(name)):
            return torch.device(name)
        case ("complex", float(real), float(imaginary)):
            return complex(real, imaginary)
        case ("list", tuple(items)):
            return [decode(item) for item in items]
    return tuple(decode(item) for item in template)


def _as_results(node: Node, found: Any) -> list[Any]:
    """Return the results of the call, one item for each result of the node."""
    many = isinstance(found, (tuple, list))
    if len(node.results) == 1 and not (many and len(found) == 1 and not isinstance(node.results[0].type, OtherType)):
        return [found]
    results = list(found) if many else [] if found is None else [found]
    if len(results) != len(node.results):
        raise GraphError(f"{node.attributes['target']} returned {len(results)} results, not {len(node.results)}")
    return [_as_number(x, r.type) for x, r in zip(results, node.results, strict=True)]


def _as_number(datum: Any, type: Any) -> Any:
    return datum.item() if isinstance(type, ScalarType) and isinstance(datum, torch.Tensor) else datum
