"""Lowering of opaque and ordered nodes to calls of torch operations."""

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch

from fusec.codegen.program.function_builder import FunctionBuilder, same_layout
from fusec.codegen.tile.sizes import PYTHON, sizes_text
from fusec.errors import FusecError
from fusec.ir.graph import Node, Value
from fusec.ir.types import OtherType, ScalarType, TensorType
from fusec.reference.dtypes import torch_dtype
from fusec.reference.opaque import resolve


def lower_opaque_call(code: FunctionBuilder, node: Node) -> None:
    """Append the call of an operation; its target and constant arguments are resolved at compile time."""
    operation = resolve(node.attributes["target"])
    written = _written_positions(operation, node)
    required = node.attributes.get("operand_types") or (None,) * len(node.operands)
    names = []
    for i, (value, type) in enumerate(zip(node.operands, required, strict=True)):
        names.append(_operand(code, value, type, i in written))

    def print_argument(template: Any) -> str:
        return _print_argument(code, template, names, print_argument)

    arguments = [print_argument(a) for a in node.attributes.get("args", ())]
    arguments += [f"{name}={print_argument(a)}" for name, a in node.attributes.get("kwargs", ())]
    code.step("opaque", node.attributes["target"], node.sources)
    # OpOverload.__call__ is a Python wrapper of _op.
    function = code.constant(getattr(operation, "_op", operation), "op")
    call = f"{function}({', '.join(arguments)})"
    _write_results(code, node, call)


def _operand(code: FunctionBuilder, value: Value, required: Any, written: bool) -> str:
    if not isinstance(value.type, TensorType) or not isinstance(required, TensorType) or written:
        return code.names[value]
    if code.layouts[value] is None and same_layout(value.shape, value.type.strides, required.strides):
        return code.names[value]  # as an operation or the caller returned it
    return code.tensor(value, required.strides)


def _print_argument(code: FunctionBuilder, template: Any, names: list[str], again: Callable[[Any], str]) -> str:
    match template:
        case ("%", int(index)):
            return names[index]
        case ("torch", str(name)):
            return code.constant(getattr(torch, name), name)
        case ("device", str(name)):
            return code.device(name)
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
    return code.constant(template, "argument")


def _write_results(code: FunctionBuilder, node: Node, call: str) -> None:
    names = [code.define(r, None, node.viewed) for r in node.results]
    if not names:
        code.line(call)
    elif len(names) == 1 and not _returns_list(node):
        code.line(f"{names[0]} = {call}")
    else:
        code.line(f"{''.join(name + ', ' for name in names)}= {call}")
    for result, name in zip(node.results, names, strict=True):
        if isinstance(result.type, ScalarType):
            code.line(f"{name} = {code.constant(as_scalar, 'as_scalar')}({name})")
        code.bind_symbols(result)
        if isinstance(result.type, TensorType) and result.users and result.dtype.kind != "other":  # may reach a kernel
            _check_result(code, node, result)


def _check_result(code: FunctionBuilder, node: Node, result: Value) -> None:
    """Append a check that a result is as the fake function promised: generated code relies on dtype and shape."""
    name, type = code.names[result], result.tensor
    dtype, shape = code.constant(torch_dtype(type.dtype), "dtype"), sizes_text(type.shape)
    arguments = f"{name}, {dtype}, {shape}, {node.attributes['target']!r}"
    check = code.constant(checked_result, "checked_result")
    code.line(f"if {name}.dtype is not {dtype} or {name}.shape != {shape}: {name} = {check}({arguments})")


def checked_result(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], target: str) -> torch.Tensor:
    """Return a result with the dtype that the fake function of its operation promised.

    Raises:
        FusecError: if its shape differs from the promised one, for which the program was compiled.
    """
    if tensor.shape != shape:
        raise FusecError(
            f"{target} returned a tensor of shape {tuple(tensor.shape)}",
            why=f"its fake function promises {shape}, for which the program was compiled",
            fix="correct the fake function (torch.library.register_fake), or keep the call out of the compiled model",
        )
    return tensor.to(dtype)


def _returns_list(node: Node) -> bool:
    """Return whether an operation with one result returns it in a list."""
    if isinstance(node.results[0].type, OtherType):
        return False
    schema = getattr(resolve(node.attributes["target"]), "_schema", None)
    return schema is not None and len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.ListType)


def as_scalar(result: Any) -> Any:
    """Return the number in a 0-d tensor; a number as it is."""
    return result.item() if isinstance(result, torch.Tensor) else result


def _written_positions(operation: Any, node: Node) -> set[int]:
    """Return the positions of operands that the operation may modify: none of them may be a copy."""
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    return set(range(len(node.operands)))
