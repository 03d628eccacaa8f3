"""The template of an opaque call: everything an ATen operation needs besides its tensor operands."""

from typing import Any

import sympy
import torch

from fusec.errors import ImportFailure
from fusec.frontend.dtypes import to_type
from fusec.ir.graph import Value
from fusec.ir.types import TensorType


class Template:
    """Collects operands while arguments are turned into frozen data."""

    def __init__(self) -> None:
        self.operands: list[Value] = []
        self.operand_types: list[TensorType | None] = []

    def freeze(self, argument: Any, fake: Any) -> Any:
        """One argument as data; a value becomes a reference to an operand."""
        if isinstance(argument, Value):
            expected = to_type(fake)
            self.operands.append(argument)
            self.operand_types.append(expected if isinstance(expected, TensorType) else None)
            return ("%", len(self.operands) - 1)
        if isinstance(argument, (list, tuple)):
            fakes = fake if isinstance(fake, (list, tuple)) else [None] * len(argument)
            return ("list", tuple(self.freeze(a, f) for a, f in zip(argument, fakes, strict=True)))
        if isinstance(argument, (torch.dtype, torch.layout, torch.memory_format)):
            return ("torch", str(argument).removeprefix("torch."))
        if isinstance(argument, torch.device):
            return ("device", str(argument))
        if isinstance(argument, complex):
            return ("complex", argument.real, argument.imag)
        if argument is None or isinstance(argument, (bool, int, float, str, sympy.Expr)):
            return argument
        raise ImportFailure(
            f"a call of ATen with the argument {argument!r}",
            why=f"the text form of a graph cannot hold a {type(argument).__name__}",
            fix="exclude its caller with torch.compiler.disable",
        )
