"""Values that a program keeps from call to call, each until a weight that it comes from is replaced or changed."""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_version: Callable[[Tensor], int] = attrgetter("_version")


@dataclass(frozen=True)
class Recipe:
    """How a value follows from weights."""

    weights: tuple[int, ...]
    """Positions of those it needs."""
    make: Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True)
class _Found:
    """All values, and the state of all weights that they were made of."""

    marks: tuple[Any, ...]
    """What ``_marks`` gives."""
    values: tuple[Tensor | None, ...]
    """None where a storage of its weights was freed."""
    freed: set[int]
    """Positions of weights whose storage was freed: its address may be given to another one."""
    watched: "tuple[weakref.ref[torch.UntypedStorage], ...]"
    """The storages. Torch refuses to swap a tensor that has weak references, and so has none."""


class Frozen:
    """The values of some recipes; may be called by several threads at once."""

    def __init__(self, recipes: Sequence[Recipe]) -> None:
        _count_fused_steps()
        self.recipes = recipes
        self._found: _Found | None = None
        self._making = threading.Lock()

    def __call__(self, weights: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """The values for these weights, which are made anew where their weights are not those of last time."""
        found = self._found
        if found is None or found.freed or found.marks != _marks(weights):
            with self._making:
                found = self._made(weights)
        return found.values

    def _made(self, weights: tuple[Tensor, ...]) -> _Found:
        storages = [weight.untyped_storage() for weight in weights]  # alive until they are watched
        marks, old = _marks(weights), self._found
        if old is not None and old.marks == marks and not old.freed:
            return old  # another thread was here first
        count = len(weights)
        changed = {i for i in range(count) if old is None or i in old.freed or old.marks[i::count] != marks[i::count]}
        values: dict[int, Tensor | None] = {}
        if old is not None:
            values = {i: v for i, v in enumerate(old.values) if changed.isdisjoint(self.recipes[i].weights)}
        self._found = old = None  # what is made anew frees its memory first
        with torch.inference_mode(False), torch.no_grad():
            for i, recipe in enumerate(self.recipes):
                if i not in values:
                    values[i] = recipe.make([weights[j] for j in recipe.weights])
        freed = set[int]()
        watched = tuple(weakref.ref(storage, _forgetting(self, i, freed)) for i, storage in enumerate(storages))
        found = self._found = _Found(marks, tuple(values[i] for i in range(len(values))), freed, watched)
        return found

    def forget(self, weight: int) -> None:
        """Free the values that come from a weight."""
        found = self._found
        if found is not None:
            values = tuple(None if weight in r.weights else v for r, v in zip(self.recipes, found.values, strict=True))
            self._found = replace(found, values=values) if any(v is not None for v in values) else None


@cache
def _count_fused_steps() -> None:
    """From now on have the changes counted that fused optimizers make, which torch (2.11 to 2.14) does not."""

    def count(optimizer: Optimizer, *_: object) -> None:
        if not torch.compiler.is_compiling():
            for group in optimizer.param_groups:
                if group.get("fused"):
                    torch.autograd.graph.increment_version(group["params"])

    register_optimizer_step_post_hook(count)


def _marks(weights: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Which tensors, how often each was changed, and how each lies in memory: one after another.

    ``.data = x`` moves a tensor or changes its strides; ``.data.add_(x)`` leaves no mark.
    """
    pointers, strides = map(Tensor.data_ptr, weights), map(Tensor.stride, weights)
    return (*map(id, weights), *map(_version, weights), *pointers, *strides)


def _forgetting(frozen: Frozen, weight: int, freed: set[int]) -> Callable[[object], None]:
    """A callback for the end of a weight's storage, which keeps nobody alive."""
    known = weakref.ref(frozen)

    def forget(_: object) -> None:
        freed.add(weight)
        if (still_there := known()) is not None:
            still_there.forget(weight)

    return forget


def packed(weight: Tensor, rows: int) -> Tensor:
    """A matrix in blocks of so many rows, each transposed, the last one shorter; bfloat16 in pairs along a row."""
    words = weight.contiguous().view(torch.int32)
    whole = len(words) // rows * rows
    out = torch.empty_like(words)
    out[:whole].view(-1, words.shape[1], rows).copy_(words[:whole].view(-1, rows, words.shape[1]).mT)
    out[whole:].view(words.shape[1], -1).copy_(words[whole:].mT)
    return out.view(weight.dtype)
