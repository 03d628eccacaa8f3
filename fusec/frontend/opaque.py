"""Opaque calls: all arguments of an operation besides its tensor operands, as data or bound to a function."""

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from fusec.errors import ImportFailure
from fusec.frontend.dtypes import to_type
from fusec.ir.graph import Value
from fusec.ir.types import TensorType
from fusec.reference.opaque import register


class Template:
    """Collects operands while arguments are turned into immutable data."""

    def __init__(self) -> None:
        self.operands: list[Value] = []
        self.operand_types: list[TensorType | None] = []

    def freeze(self, argument: Any, fake: Any) -> Any:
        """Return one argument as data; a value becomes a reference to an operand."""
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


def bind(node: Node, module: torch.nn.Module) -> tuple[str, list[Node]]:
    """A call of a higher-order operation as a function of its nodes: graphs, operations and constants are bound.

    Returns:
        The target that the function is registered as, and its arguments. Its results are flat.
    """
    leaves, spec = pytree.tree_flatten((list(node.args), dict(node.kwargs)))
    modules = {n: attribute(module, n) for n in leaves if isinstance(n, Node) and n.op == "get_attr"}
    bound = [modules[x] if isinstance(modules.get(x), torch.nn.Module) else x for x in leaves]
    places = [i for i, leaf in enumerate(bound) if isinstance(leaf, Node)]
    return register(str(node.target), _call(node.target, bound, places, spec)), [bound[i] for i in places]


def _call(operation: Any, bound: list[Any], places: list[int], spec: pytree.TreeSpec) -> Callable[..., Any]:
    constants = [None if isinstance(leaf, Node) else leaf for leaf in bound]

    def call(*values: Any) -> Any:
        leaves = list(constants)
        for place, value in zip(places, values, strict=True):
            leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        results = pytree.tree_leaves(operation(*args, **kwargs))
        return results[0] if len(results) == 1 else results

    return call


def attribute(module: Any, node: Node) -> Any:
    """Return an attribute of the module."""
    for part in str(node.target).split("."):
        module = getattr(module, part)
    return module
