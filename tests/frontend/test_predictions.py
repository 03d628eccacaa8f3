"""Predicted strides of every pointwise operation of ATen, once corrected, against those that eager gives."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from fusec.frontend.predictions import corrected_predictions

NUMBERS = {"number": 2, "float": 0.5, "int": 1, "bool": False, "Scalar": 2, "str": "none"}
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[..., :1].expand_as(x),
    "broadcast": lambda x: x[:, :1],
    "of fewer dims": lambda x: x[0].mT.contiguous().mT,
}


def composed(operation: Any) -> bool:
    """Return whether ATen makes it of other operations, which are traced in its place."""
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), key))


def pointwise() -> Iterator[Any]:
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            found = getattr(packet, overload)
            schema = found._schema
            if torch.Tag.pointwise in found.tags and not schema.is_mutable and schema.arguments and not composed(found):
                yield found


def differing(operation: Any, x: Tensor, layouts: tuple[str, str]) -> str:
    """Call eager and fake function; say where strides differ, and nothing where eager refuses."""
    args: list[Any] = []
    for argument in operation._schema.arguments:
        if str(argument.type) == "Tensor":
            args.append(LAYOUTS[layouts[min(sum(isinstance(a, Tensor) for a in args), 1)]](x))
        elif not argument.kwarg_only and not argument.has_default_value():
            args.append(NUMBERS.get(str(argument.type)))
    mode = FakeTensorMode()
    try:
        real = operation(*args)
        with corrected_predictions(), mode:
            fake = operation(*tree_map_only(Tensor, mode.from_tensor, args))
    except (RuntimeError, TypeError, IndexError, ValueError):
        return ""
    if not isinstance(real, Tensor) or not any(r.alias_info is None for r in operation._schema.returns):
        return ""
    pairs = zip(real.shape, real.stride(), fake.stride(), strict=True)
    alike = all(n == 1 or a == b for n, a, b in pairs)
    return "" if alike else f"{operation} {x.dtype} {layouts}: {real.stride()}, predicted {fake.stride()}"


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(d, marks=pytest.mark.thorough) for d in (torch.int64, torch.bool))], ids=str
)
def test_pointwise_operations_have_eagers_strides(dtype: torch.dtype) -> None:
    x = torch.ones(4, 3, 5, dtype=dtype)
    pairs = [(a, b) for a in LAYOUTS for b in LAYOUTS if "contiguous" in (a, b) or (a, b) in (
        ("broadcast", "of fewer dims"), ("expanded", "of fewer dims"), ("transposed", "swapped"))]  # fmt: skip
    found = [d for op in pointwise() for pair in pairs if (d := differing(op, x, pair))]
    assert not found, "\n".join(found)
