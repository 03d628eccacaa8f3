"""Values that a program keeps from call to call, each until a weight that it comes from is replaced or changed."""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

Mark: TypeAlias = tuple[int, int, int]
"""Which tensor, its count of changes, and where it lies: ``.data = x`` moves it, ``.data.add_(x)`` leaves no mark."""
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

    marks: tuple[int, ...]
    """What ``_marks`` gives."""
    values: tuple[Tensor, ...]
    watched: tuple["weakref.ref[Tensor]", ...]


class Frozen:
    """The values of some recipes; may be called by several threads at once."""

    def __init__(self, recipes: Sequence[Recipe]) -> None:
        _count_fused_steps()
        self.recipes = recipes
        self._found: _Found | None = None
        self._making = threading.Lock()

    def __call__(self, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The values for these weights, which are made anew where their weights are not those of last time."""
        found = self._found
        if found is None or found.marks != _marks(weights):
            with self._making:
                found = self._made(weights)
        return found.values

    def _made(self, weights: tuple[Tensor, ...]) -> _Found:
        marks, old = _marks(weights), self._found
        if old is not None and old.marks == marks:
            return old  # another thread was here first
        count = len(weights)
        changed = {i for i in range(count) if old is None or old.marks[i::count] != marks[i::count]}
        values: dict[int, Tensor] = {}
        if old is not None:
            values = {i: v for i, v in enumerate(old.values) if changed.isdisjoint(self.recipes[i].weights)}
        self._found = old = None  # what is made anew frees its memory first
        with torch.inference_mode(False), torch.no_grad():
            for i, recipe in enumerate(self.recipes):
                if i not in values:
                    values[i] = recipe.make([weights[j] for j in recipe.weights])
        watched, forget = list[weakref.ref[Tensor]](), _forgetting(self)
        for weight in weights:
            watched.append(weakref.ref(weight, forget))
        found = self._found = _Found(marks, tuple(values[i] for i in range(len(values))), tuple(watched))
        return found

    def forget(self) -> None:
        """Give everything up."""
        self._found = None


@cache
def _count_fused_steps() -> None:
    """From now on have the changes counted that fused optimizers make, which torch (2.11 to 2.14) does not."""

    def count(optimizer: Optimizer, *_: object) -> None:
        if not torch.compiler.is_compiling():
            for group in optimizer.param_groups:
                if group.get("fused"):
                    torch.autograd.graph.increment_version(group["params"])

    register_optimizer_step_post_hook(count)


def _marks(weights: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Which tensors, how often each was changed, and where each lies: one after another."""
    return (*map(id, weights), *map(_version, weights), *map(Tensor.data_ptr, weights))


def _forgetting(frozen: Frozen) -> Callable[[object], None]:
    """What forgets the values when a weight dies, and keeps nobody alive."""
    known = weakref.ref(frozen)

    def forget(_: object) -> None:
        if (still_there := known()) is not None:
            still_there.forget()

    return forget


def packed(weight: Tensor, rows: int) -> Tensor:
    """A matrix in blocks of so many rows, each turned, the last one shorter; bfloat16 in pairs along a row."""
    words = weight.contiguous().view(torch.int32)
    whole = len(words) // rows * rows
    out = torch.empty_like(words)
    out[:whole].view(-1, words.shape[1], rows).copy_(words[:whole].view(-1, rows, words.shape[1]).mT)
    out[whole:].view(words.shape[1], -1).copy_(words[whole:].mT)
    return out.view(weight.dtype)
