"""Opaque and ordered nodes as prepared calls of torch operations."""

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch

from fusec.codegen.program.text import ProgramText, same_layout
from fusec.codegen.tile.sizes import PYTHON, sizes_text
from fusec.errors import FusecError
from fusec.ir.graph import Node, Value
from fusec.ir.types import OtherType, ScalarType, TensorType
from fusec.reference.dtypes import torch_dtype
from fusec.reference.opaque import resolve


def write_call(text: ProgramText, node: Node) -> None:
    """Append the line that calls the operation; the target and constant arguments are resolved now."""
    operation = resolve(node.attributes["target"])
    written = _positions_written(operation, node)
    required = node.attributes.get("operand_types") or (None,) * len(node.operands)
    names = []
    for i, (value, type) in enumerate(zip(node.operands, required, strict=True)):
        names.append(_operand(text, value, type, i in written))

    def print_argument(template: Any) -> str:
        return _print_argument(text, template, names, print_argument)

    arguments = [print_argument(a) for a in node.attributes.get("args", ())]
    arguments += [f"{name}={print_argument(a)}" for name, a in node.attributes.get("kwargs", ())]
    text.step("opaque", node.attributes["target"], node.sources)
    # OpOverload.__call__ is a Python function around _op; the call may as well go there.
    function = text.constant(getattr(operation, "_op", operation), "op")
    call = f"{function}({', '.join(arguments)})"
    _write_results(text, node, call)


def _operand(text: ProgramText, value: Value, required: Any, written: bool) -> str:
    if not isinstance(value.type, TensorType) or not isinstance(required, TensorType) or written:
        return text.names[value]
    if text.layouts[value] is None and same_layout(value.shape, value.type.strides, required.strides):
        return text.names[value]  # as a call gave it or the caller passed it; a copy that is none here is made now
    return text.tensor(value, required.strides)


def _print_argument(text: ProgramText, template: Any, names: list[str], again: Callable[[Any], str]) -> str:
    match template:
        case ("%", int(index)):
            return names[index]
        case ("torch", str(name)):
            return text.constant(getattr(torch, name), name)
        case ("device", str(name)):
            return text.device(name)
        case ("complex", float(real), float(imaginary)):
            return f"complex({again(real)}, {again(imaginary)})"
        case ("list", tuple(items)):
            return f"[{', '.join(map(again, items))}]"
        case tuple():
            return f"({''.join(again(item) + ', ' for item in template)})"
        case sympy.Expr():
            return PYTHON.print(template)
        case float() if not math.isfinite(template):
            return f'float("{template}")'
        case bool() | int() | float() | str() | None:
            return repr(template)
    return text.constant(template, "argument")


def _write_results(text: ProgramText, node: Node, call: str) -> None:
    names = [text.define(r, None, node.viewed) for r in node.results]
    if not names:
        text.line(call)
    elif len(names) == 1 and not _comes_in_a_list(node):
        text.line(f"{names[0]} = {call}")
    else:
        text.line(f"{''.join(name + ', ' for name in names)}= {call}")
    for result, name in zip(node.results, names, strict=True):
        if isinstance(result.type, ScalarType):
            text.line(f"{name} = {text.constant(as_number, 'as_number')}({name})")
        text.bind_symbols(result)
        if isinstance(result.type, TensorType) and result.users and result.dtype.kind != "other":  # of no kernel
            _check_result(text, node, result)


def _check_result(text: ProgramText, node: Node, result: Value) -> None:
    """Append a check of what an operation's fake function promised: kernels read memory by it."""
    name, type = text.names[result], result.tensor
    dtype, shape = text.constant(torch_dtype(type.dtype), "dtype"), sizes_text(type.shape)
    arguments = f"{name}, {dtype}, {shape}, {node.attributes['target']!r}"
    check = text.constant(as_promised, "as_promised")
    text.line(f"if {name}.dtype is not {dtype} or {name}.shape != {shape}: {name} = {check}({arguments})")


def as_promised(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], target: str) -> torch.Tensor:
    """Return the tensor with the dtype that its operation's fake function promised.

    Raises:
        FusecError: where its shape is another, since what follows was compiled for the one that was promised.
    """
    if tensor.shape != shape:
        raise FusecError(
            f"{target} returned a tensor of shape {tuple(tensor.shape)}",
            why=f"its fake function promises {shape}, for which what follows was compiled",
            fix="correct the fake function (torch.library.register_fake), or keep the call out of the compiled model",
        )
    return tensor.to(dtype)


def _comes_in_a_list(node: Node) -> bool:
    """Whether the only result is the one item of a list that the operation returns."""
    if isinstance(node.results[0].type, OtherType):
        return False
    schema = getattr(resolve(node.attributes["target"]), "_schema", None)
    return schema is not None and len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.ListType)


def as_number(datum: Any) -> Any:
    """The number that a 0-d tensor holds."""
    return datum.item() if isinstance(datum, torch.Tensor) else datum


def _positions_written(operation: Any, node: Node) -> set[int]:
    """Operands that the operation changes in place."""
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    return set(range(len(node.operands)))
