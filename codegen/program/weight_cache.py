"""Tensors computed from weights, cached until a weight that they depend on is replaced or modified."""

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
class CachedTensor:
    """The computation of one tensor from weights."""

    weights: tuple[int, ...]
    """Positions of the weights that it depends on."""
    compute: Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True)
class _Entry:
    """The cached values, and the state of the weights from which they were computed."""

    states: tuple[Any, ...]
    """As returned by ``_states``."""
    values: tuple[Tensor | None, ...]
    """None where the storage of one of its weights was freed."""
    freed: set[int]
    """Positions of weights whose storage was freed: the address may be reused by another one."""
    storages: "tuple[weakref.ref[torch.UntypedStorage], ...]"
    """Weak references to storages, not to tensors: torch refuses to swap a tensor that has weak references."""


class WeightCache:
    """A cache of tensors that depend on weights alone; threads may call it concurrently."""

    def __init__(self, tensors: Sequence[CachedTensor]) -> None:
        _count_fused_steps()
        self.tensors = tensors
        self._entry: _Entry | None = None
        self._lock = threading.Lock()

    def __call__(self, weights: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Return the values for these weights; recompute those whose weights are not the ones of the last call."""
        entry = self._entry
        if entry is None or entry.freed or entry.states != _states(weights):
            with self._lock:
                entry = self._update(weights)
        return entry.values

    def _update(self, weights: tuple[Tensor, ...]) -> _Entry:
        storages = [weight.untyped_storage() for weight in weights]  # alive until there are weak references to them
        states, old = _states(weights), self._entry
        if old is not None and old.states == states and not old.freed:
            return old  # updated by another thread while this one waited for the lock
        n = len(weights)
        changed = {i for i in range(n) if old is None or i in old.freed or old.states[i::n] != states[i::n]}
        values: dict[int, Tensor | None] = {}
        if old is not None:
            values = {i: v for i, v in enumerate(old.values) if changed.isdisjoint(self.tensors[i].weights)}
        self._entry = old = None  # frees the memory of stale values before they are recomputed
        with torch.inference_mode(False), torch.no_grad():
            for i, tensor in enumerate(self.tensors):
                if i not in values:
                    values[i] = tensor.compute([weights[j] for j in tensor.weights])
        freed = set[int]()
        references = tuple(weakref.ref(storage, _on_free(self, i, freed)) for i, storage in enumerate(storages))
        entry = self._entry = _Entry(states, tuple(values[i] for i in range(len(values))), freed, references)
        return entry

    def evict(self, weight: int) -> None:
        """Free the values that depend on a weight."""
        entry = self._entry
        if entry is not None:
            values = tuple(None if weight in t.weights else v for t, v in zip(self.tensors, entry.values, strict=True))
            self._entry = replace(entry, values=values) if any(v is not None for v in values) else None


@cache
def _count_fused_steps() -> None:
    """Register a hook that counts the updates of fused optimizers as changes, which torch 2.11 to 2.14 does not."""

    def count(optimizer: Optimizer, *_: object) -> None:
        if not torch.compiler.is_compiling():
            for group in optimizer.param_groups:
                if group.get("fused"):
                    torch.autograd.graph.increment_version(group["params"])

    register_optimizer_step_post_hook(count)


def _states(weights: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Return the identities, version counters, addresses and strides of all weights, one kind after the other.

    ``.data = x`` changes the address or strides; ``.data.add_(x)`` is not detectable.
    """
    pointers, strides = map(Tensor.data_ptr, weights), map(Tensor.stride, weights)
    return (*map(id, weights), *map(_version, weights), *pointers, *strides)


def _on_free(cache: WeightCache, weight: int, freed: set[int]) -> Callable[[object], None]:
    """Return a callback for when the storage of a weight is freed; it holds no reference to the cache."""
    reference = weakref.ref(cache)

    def evict(_: object) -> None:
        freed.add(weight)
        if (alive := reference()) is not None:
            alive.evict(weight)

    return evict
