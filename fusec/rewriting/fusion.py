"""Declarations of fusions: a plain function is the pattern, the meaning and the documentation of a fused operation."""

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, Union, overload

from fusec.errors import DeclarationError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Dims:
    """The shape of a parameter: ``*batch rows cols``, numbers, and multiples such as ``2*half``.

    ``*batch`` is any number of leading dims, the same wherever the name occurs; a second starred name
    (``*mask``) is leading dims that broadcast to them.
    """

    text: str
    dtype: str = ""
    """Dtype by name; empty means that of the result."""

    @property
    def variadic(self) -> str:
        """The name after the star, or an empty string."""
        first = self.text.split()[:1]
        return first[0][1:] if first and first[0].startswith("*") else ""

    @property
    def fixed(self) -> tuple[str, ...]:
        """The dims after the starred ones."""
        return tuple(word for word in self.text.split() if not word.startswith("*"))

    def check(self, where: str) -> None:
        """Check the text.

        Raises:
            DeclarationError: naming the word at fault.
        """
        for i, word in enumerate(self.text.split()):
            if not re.fullmatch(r"(\*?[a-z_]\w*|\d+|\d+\*[a-z_]\w*)", word) or (word.startswith("*") and i):
                raise DeclarationError(
                    f"invalid dim {word!r} in {self.text!r}", where=where, fix="write it like '*batch 2*half'"
                )


@dataclass(frozen=True)
class Parameter:
    """One parameter of a declaration: a tensor where it has dims, else a number."""

    name: str
    dims: Dims | None
    optional: bool = False


@dataclass(frozen=True)
class Clause:
    """A predicate on what a match has bound; its parameters name what it reads."""

    name: str
    predicate: Callable[..., bool]
    parameters: tuple[str, ...]
    refuses: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that it refuses, for its test: sizes by dim, numbers (or None) by parameter, a name for ``dtype``."""

    @property
    def why(self) -> str:
        """Its reason: the docstring of the predicate."""
        return inspect.getdoc(self.predicate) or ""


@dataclass(eq=False)
class Fusion(Generic[P, R]):
    """A declared fused operation; calling it runs its meaning."""

    name: str
    function: Callable[P, R]
    parameters: tuple[Parameter, ...]
    spellings: dict[str, Callable[P, R]]
    """The ways in which model code writes it, by name; the declaration itself is the first, ``reference``."""
    clauses: list[Clause] = field(default_factory=list)

    @property
    def module(self) -> str:
        """The module that declares it."""
        return self.function.__module__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the declared function."""
        return self.function(*args, **kwargs)

    def spelling(self, function: Callable[P, R]) -> Callable[P, R]:
        """Declare another spelling; it has the same parameters and a name of its own.

        Raises:
            DeclarationError: where the parameters differ or the name is taken.
        """
        names = tuple(inspect.signature(function).parameters)
        if names != tuple(p.name for p in self.parameters):
            wanted = ", ".join(p.name for p in self.parameters)
            raise DeclarationError(f"spelling {function.__name__} of {self.name} takes {names}", fix=f"take {wanted}")
        if function.__name__ in self.spellings:
            raise DeclarationError(f"{self.name} has two spellings {function.__name__}")
        self.spellings[function.__name__] = function
        return function

    @overload
    def where(self, predicate: Callable[..., bool]) -> Callable[..., bool]: ...
    @overload
    def where(self, *, refuses: Mapping[str, Any]) -> Callable[[Callable[..., bool]], Callable[..., bool]]: ...
    def where(
        self, predicate: Callable[..., bool] | None = None, *, refuses: Mapping[str, Any] | None = None
    ) -> Callable[..., Any]:
        """Declare a condition of the match.

        Args:
            predicate: returns whether it holds; its parameters are among those of the fusion.
            refuses: for its test, arguments that it refuses, where the test finds none by itself: sizes by the name
                of a dim, numbers by that of a parameter, None for an operand that is absent, a name for ``dtype``.

        Raises:
            DeclarationError: where it names a parameter that the fusion does not have.
        """

        def declare(predicate: Callable[..., bool]) -> Callable[..., bool]:
            self.clauses.append(make_clause(self.name, predicate, self.parameters, refuses))
            return predicate

        return declare if predicate is None else declare(predicate)


FUSIONS: dict[str, Fusion[Any, Any]] = {}
"""Every declared fusion, in the order of declaration."""


def fusion(function: Callable[P, R]) -> Fusion[P, R]:
    """Declare a fused operation by its meaning, written in plain PyTorch.

    Raises:
        DeclarationError: where a parameter is annotated neither with dims nor as a number, or the name is taken.
    """
    name = function.__name__
    known = FUSIONS.get(name)
    if known is not None and (known.module, known.function.__qualname__) != (
        function.__module__,
        function.__qualname__,
    ):
        raise DeclarationError(f"fusion {name!r} is declared twice", where=f"{known.module} and {function.__module__}")
    FUSIONS[name] = Fusion(name, function, read_parameters(function), {"reference": function})
    return FUSIONS[name]


def declared_in(module: types.ModuleType) -> list[Fusion[Any, Any]]:
    """The fusions that a module declares, in order."""
    return [f for f in vars(module).values() if isinstance(f, Fusion) and f.module == module.__name__]


def read_parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The parameters of a declaration, from its annotations.

    Raises:
        DeclarationError: where one has no usable annotation.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    found = []
    for name in inspect.signature(function).parameters:
        hint, optional = hints.get(name), False
        if typing.get_origin(hint) in (Union, types.UnionType):
            rest = [a for a in typing.get_args(hint) if a is not type(None)]
            hint, optional = rest[0], len(rest) == 1
        if hint in (float, int):
            found.append(Parameter(name, None))
            continue
        notes = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
        dims = next((note for note in notes if isinstance(note, Dims)), None)
        if dims is None:
            raise DeclarationError(
                f"parameter {name!r} of {function.__name__} has no dims",
                fix="annotate it Annotated[Tensor, Dims('*batch cols')], or float",
            )
        dims.check(f"{function.__name__}({name})")
        found.append(Parameter(name, dims, optional))
    return tuple(found)


def make_clause(
    owner: str,
    predicate: Callable[..., bool],
    parameters: tuple[Parameter, ...],
    refuses: Mapping[str, Any] | None = None,
) -> Clause:
    """A named condition of ``owner``.

    Raises:
        DeclarationError: where it names a parameter that its owner does not have.
    """
    wanted = tuple(inspect.signature(predicate).parameters)
    unknown = set(wanted) - {p.name for p in parameters}
    if unknown:
        raise DeclarationError(f"clause {predicate.__name__} of {owner} has unknown {', '.join(sorted(unknown))}")
    words = (word for p in parameters if p.dims for word in p.dims.fixed)
    known = {p.name for p in parameters} | {word.rpartition("*")[2] for word in words} | {"dtype"}
    if strange := set(refuses or ()) - known:
        raise DeclarationError(f"clause {predicate.__name__} of {owner} refuses unknown {', '.join(sorted(strange))}")
    return Clause(predicate.__name__, predicate, wanted, refuses or {})
