"""The same maths in other words: calls of torch replaced by others that mean the same, wherever a model makes them.

A synonym is a plain function with the parameters of the call that it may stand for. ``Respelled`` is entered around a
model or a captured graph; at every place where a synonym applies, a coin that depends on the seed alone says whether it
is taken. What a synonym calls may be respelled in turn, so that a few dozen synonyms make any number of spellings.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DEPTH = 3
"""How deep synonyms are taken inside what synonyms write."""


@dataclass(frozen=True)
class Synonym:
    """Another way to write some call of torch."""

    name: str
    calls: tuple[str, ...]
    """The names of the functions it may stand for: ``add`` for ``torch.add``, ``Tensor.add`` and ``+``."""
    write: Callable[..., Any]
    """Takes the arguments of the call; gives NotImplemented, before it computes anything, where it does not apply."""
    wraps: bool = False
    """Whether it takes the function itself too, before its arguments."""

    @property
    def law(self) -> str:
        """The identity in words."""
        return (self.write.__doc__ or "").strip()


SYNONYMS: dict[str, Synonym] = {}
"""Every synonym, in the order of declaration."""


def synonym(*calls: str, wraps: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function to be another way to write these calls.

    Args:
        calls: names of functions.
        wraps: whether it takes the function itself too, before its arguments.

    Raises:
        ValueError: where the name is taken.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.strip("_").replace("_", "-")
        if name in SYNONYMS:
            raise ValueError(f"synonym {name!r} is declared twice")
        SYNONYMS[name] = Synonym(name, calls, function, wraps)
        return function

    return declare


class Respelled(TorchFunctionMode):
    """Within it, calls of torch are written in other words."""

    def __init__(self, names: Collection[str] | None = None, seed: int = 0, share: float = 0.5) -> None:
        super().__init__()
        self.seed, self.share = seed, share
        self.by_call: dict[str, list[Synonym]] = {}
        for one in SYNONYMS.values():
            if names is None or one.name in names:
                for call in one.calls:
                    self.by_call.setdefault(call, []).append(one)
        self.open: list[Synonym] = []
        """The synonyms that are being written."""
        self.met, self.taken = Counter[str](), Counter[str]()
        """How often each synonym was looked at, and how often it was taken."""
        self.origins: dict[int, tuple[Tensor, str, tuple[Any, ...]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write a call in other words, or make it as it is."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        for one in self._chosen(name):
            with self._writing(one):
                result = one.write(*[func] * one.wraps, *args, **kwargs)
            if result is not NotImplemented:
                self.taken[one.name] += 1
                return result
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not kwargs:
            self.origins[id(result)] = (result, name, args)
        return result

    def _chosen(self, name: str) -> Iterator[Synonym]:
        if len(self.open) >= _DEPTH:
            return
        found = []
        for one in self.by_call.get(name, ()):
            if one not in self.open:
                self.met[one.name] += 1
                draw = random.Random(f"{self.seed} {one.name} {self.met[one.name]}")
                if draw.random() < self.share:
                    found.append((draw.random(), one))
        yield from (one for _, one in sorted(found, key=lambda pair: pair[0]))

    @contextmanager
    def _writing(self, one: Synonym) -> Iterator[None]:
        self.open.append(one)
        try:
            with self:
                yield
        finally:
            self.open.pop()


def operands_of(value: Any, name: str) -> tuple[Any, ...]:
    """The arguments of the call of that name that made a tensor; none where something else did."""
    mode = _innermost()
    held, made_by, args = mode.origins.get(id(value), (None, "", ())) if mode is not None else (None, "", ())
    return args if held is value and made_by == name else ()


def _innermost() -> Respelled | None:
    for mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if isinstance(mode, Respelled):
            return mode
    return None
