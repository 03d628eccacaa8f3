"""Declarations of algebra: two plain functions that mean the same."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, overload

from fusec.errors import DeclarationError
from fusec.rewriting.fusion import Clause, Fusion, Parameter, make_clause, read_parameters


@dataclass(eq=False)
class Rewrite:
    """A declared identity, applied from left to right."""

    name: str
    before: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    exact: bool = True
    """True where both sides are equal over a field and bit for bit."""
    after: Callable[..., Any] | None = None
    clauses: list[Clause] = field(default_factory=list)

    @property
    def module(self) -> str:
        """The module that declares it."""
        return self.before.__module__

    def to(self, after: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the right side; its parameters are among those of the left side.

        Raises:
            DeclarationError: where it has a parameter that the left side lacks.
        """
        make_clause(self.name, after, self.parameters)
        self.after = after
        return after

    def where(self, predicate: Callable[..., bool]) -> Callable[..., bool]:
        """Declare a condition.

        Raises:
            DeclarationError: where it names a parameter that the rewrite does not have.
        """
        self.clauses.append(make_clause(self.name, predicate, self.parameters))
        return predicate


Declaration: TypeAlias = "Fusion[Any, Any] | Rewrite"

REWRITES: dict[str, Rewrite] = {}
"""Every declared rewrite, in the order of declaration."""


@overload
def rewrite(before: Callable[..., Any]) -> Rewrite: ...
@overload
def rewrite(*, exact: bool) -> Callable[[Callable[..., Any]], Rewrite]: ...
def rewrite(before: Callable[..., Any] | None = None, *, exact: bool = True) -> Any:
    """Declare an identity by its left side; ``.to`` adds the right side.

    Raises:
        DeclarationError: where the name is taken.
    """

    def declare(function: Callable[..., Any]) -> Rewrite:
        known = REWRITES.get(function.__name__)
        if known is not None and known.module != function.__module__:
            raise DeclarationError(f"rewrite {function.__name__!r} is declared twice")
        REWRITES[function.__name__] = Rewrite(function.__name__, function, read_parameters(function), exact)
        return REWRITES[function.__name__]

    return declare if before is None else declare(before)
