"""The rest of the contract of a compiled model: everything that a user can observe besides the numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusec.reference.contract import copy_arguments, unit_roundoff


@dataclass(frozen=True)
class TensorFacts:
    """The properties of a tensor that a user can observe besides its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str
    requires_grad: bool
    aliases: tuple[int, ...]
    """The inputs whose storage it shares."""


@dataclass(frozen=True)
class Observation:
    """One call: its outputs and side effects."""

    outputs: list[Any]
    facts: list[TensorFacts | None]
    """Properties of each output; None for one that is no tensor."""
    structure: str
    """Nesting of the outputs."""
    inputs: list[Tensor] = field(repr=False)
    """The argument tensors after the call."""
    random_state: Tensor = field(repr=False)


def observe(function: Callable[..., Any], arguments: Sequence[Any], seed: int = 0) -> Observation:
    """Call a function on copies of the arguments (with their strides and aliases), and record all effects."""
    copies = copy_arguments(arguments)
    torch.manual_seed(seed)
    outputs = function(*copies)
    inputs = [x for x in pytree.tree_leaves(copies) if isinstance(x, Tensor)]
    places: dict[int, list[int]] = {}
    for i, x in enumerate(inputs):
        places.setdefault(x.untyped_storage().data_ptr(), []).append(i)
    leaves, structure = pytree.tree_flatten(outputs)
    facts = [_facts(x, places) if isinstance(x, Tensor) else None for x in leaves]
    return Observation(leaves, facts, str(structure), inputs, torch.get_rng_state())


def contract_breaches(eager: Observation, compiled: Observation) -> list[str]:
    """Return the differences of a compiled call from the eager one other than rounding, as messages."""
    breaches = []
    if eager.structure != compiled.structure:
        return [f"the outputs are nested as {compiled.structure}, not {eager.structure}"]
    for i, (e, f) in enumerate(zip(eager.facts, compiled.facts, strict=True)):
        breaches += [f"output {i}: {what}" for what in _differences(e, f)]
    for i, (theirs, mine) in enumerate(zip(eager.inputs, compiled.inputs, strict=True)):
        if theirs.dtype != mine.dtype or theirs.shape != mine.shape or not _near(theirs, mine):
            breaches.append(f"input {i} is different after the call")
    if not torch.equal(eager.random_state, compiled.random_state):
        breaches.append("the random state is not eager's after the call")
    return breaches


def _facts(x: Tensor, places: dict[int, list[int]]) -> TensorFacts:
    aliases = tuple(places.get(x.untyped_storage().data_ptr(), ())) if x.numel() else ()
    return TensorFacts(x.dtype, tuple(x.shape), x.stride(), str(x.device), x.requires_grad, aliases)


def _differences(eager: TensorFacts | None, compiled: TensorFacts | None) -> list[str]:
    if eager is None or compiled is None:
        return [] if eager is compiled else ["a tensor on one side only"]
    return [
        f"{name} is {mine}, not {theirs}"
        for name, theirs, mine in ((n, getattr(eager, n), getattr(compiled, n)) for n in vars(eager))
        if mine != theirs
    ]


def _near(a: Tensor, b: Tensor) -> bool:
    """Return whether two values are equal up to rounding, which ``compare_outputs`` bounds."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    rtol = 32 * unit_roundoff(a.dtype)
    scale = float(a.detach().abs().nan_to_num().max()) if a.numel() else 0.0
    return torch.allclose(a.detach(), b.detach(), rtol=rtol, atol=rtol * scale, equal_nan=True)
