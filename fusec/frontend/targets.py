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
    """Return whether the operation mutates an operand."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def functional(node: Node) -> str:
    """The name of the operation, or of its form that changes nothing."""
    return str(node.target).replace("_.", ".") if is_mutable(node) else str(node.target)


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    defaults = _defaults(node.target)
    return defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs


@cache
def _defaults(target: Any) -> dict[str, Any]:
    """Return the arguments of a schema, cached: torch creates new objects on every access."""
    return {argument.name: argument.default_value for argument in target._schema.arguments}


def number(fake: Any) -> Any:
    """A number that the graph computes on sizes: an int, a float, a size, or torch's symbolic boolean."""
    if isinstance(fake, torch.SymFloat):
        return Real(fake.node.expr)
    return fake if isinstance(fake, (bool, float, torch.SymBool)) else to_size(fake)


def fake_of(argument: Any) -> Any:
    """Return the fake tensor or number of an argument of a torch node."""
    if isinstance(argument, Node):
        return argument.meta.get("val")
    if isinstance(argument, (list, tuple)):
        return [fake_of(a) for a in argument]
    return argument


def fake_of_parts(node: Node) -> list[Any] | None:
    """Return the fake results of a node, from its parts, as the partitioner leaves it; None where nobody reads it."""
    parts = {user.args[1]: user.meta.get("val") for user in node.users if user.target is operator.getitem}
    if set(parts) != set(range(len(parts))) or len(parts) < len(node.users) or any(p is None for p in parts.values()):
        raise ImportFailure(f"{node.target} has results of unknown types", why="torch has no metadata for its parts")
    return [parts[i] for i in range(len(parts))] or None


def defines_symbol(node: Node) -> bool:
    """Return whether a number is computed from a tensor at run time."""
    return isinstance(node.target, torch._ops.OpOverload) and any(
        isinstance(a, Node) and isinstance(a.meta.get("val"), torch.Tensor) for a in node.args
    ) and "sym_" not in str(node.target)  # fmt: skip


def keeps_its_place(node: Node) -> bool:
    """Return whether a call must keep its order: random numbers, collectives, checks, numbers read from tensors.

    A higher-order operation may do any of that.
    """
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return draws(node) or target.namespace in _COLLECTIVES or not target._schema.returns or (
        isinstance(node.meta.get("val"), NUMBERS)
    )  # fmt: skip


def draws(node: Node) -> bool:
    """Return whether an operation draws random numbers; one with dropout does unless its probability is 0."""
    target: Any = node.target
    return torch.Tag.nondeterministic_seeded in target.tags and arguments(node).get("dropout_p", 1.0) != 0.0
