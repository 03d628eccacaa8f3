"""Questions that the importer asks of one torch node."""

import operator
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from fusec.errors import ImportFailure
from fusec.frontend.sizes import Real, to_size

NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
CHECKS = ("aten._assert_scalar", "aten.sym_constrain_range", "aten._assert_tensor_metadata")
_COLLECTIVES = ("_c10d_functional", "c10d", "_dtensor", "c10d_functional")


def is_mutable(node: Node) -> bool:
    """Whether the operation changes an operand."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def functional(node: Node) -> str:
    """The name of the operation, or of its form that changes nothing."""
    return str(node.target).replace("_.", ".") if is_mutable(node) else str(node.target)


def arguments(node: Node) -> dict[str, Any]:
    """What an operation is called with, by name."""
    defaults = _defaults(node.target)
    return defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs


@cache
def _defaults(target: Any) -> dict[str, Any]:
    """Torch makes new objects of a schema at every look."""
    return {argument.name: argument.default_value for argument in target._schema.arguments}


def number(fake: Any) -> Any:
    """A number that the graph computes on sizes: an int, a float, a size, or a truth value as torch has it."""
    if isinstance(fake, torch.SymFloat):
        return Real(fake.node.expr)
    return fake if isinstance(fake, (bool, float, torch.SymBool)) else to_size(fake)


def fake_of(argument: Any) -> Any:
    """What an argument of a torch node is as a fake tensor or number."""
    if isinstance(argument, Node):
        return argument.meta.get("val")
    if isinstance(argument, (list, tuple)):
        return [fake_of(a) for a in argument]
    return argument


def fake_of_parts(node: Node) -> list[Any] | None:
    """What a node gives whose parts alone are described, as the partitioner leaves it; None where nobody reads it."""
    parts = {user.args[1]: user.meta.get("val") for user in node.users if user.target is operator.getitem}
    if set(parts) != set(range(len(parts))) or len(parts) < len(node.users) or any(p is None for p in parts.values()):
        raise ImportFailure(f"{node.target} gives results of unknown types", why="torch describes no part of them")
    return [parts[i] for i in range(len(parts))] or None


def defines_symbol(node: Node) -> bool:
    """Whether a number comes out of a tensor at run time."""
    return isinstance(node.target, torch._ops.OpOverload) and any(
        isinstance(a, Node) and isinstance(a.meta.get("val"), torch.Tensor) for a in node.args
    ) and "sym_" not in str(node.target)  # fmt: skip


def keeps_its_place(node: Node) -> bool:
    """Whether a call must stay where it is: random numbers, collectives, checks, numbers read off tensors.

    A higher-order operation may do any of that.
    """
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return draws(node) or target.namespace in _COLLECTIVES or not target._schema.returns or (
        isinstance(node.meta.get("val"), NUMBERS)
    )  # fmt: skip


def draws(node: Node) -> bool:
    """Whether an operation draws random numbers; one that is random only by its dropout may drop nothing."""
    target: Any = node.target
    return torch.Tag.nondeterministic_seeded in target.tags and arguments(node).get("dropout_p", 1.0) != 0.0
