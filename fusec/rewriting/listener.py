"""The interface by which rewriting reports applications and near misses, and asks for permission."""

from collections.abc import Iterable
from typing import Protocol

from fusec.ir.graph import Graph, Source
from fusec.rewriting.match import MatchFailure


class RewriteListener(Protocol):
    """Numbers, permits and checks applications; the pipeline's context implements it."""

    @property
    def verifies(self) -> bool:
        """Return whether both sides of every application are to be compared."""

    def application(self, name: str, sources: Iterable[Source] = (), message: str = "") -> bool:
        """Number an application, and return whether it may be made."""

    def agrees(self, name: str, before: Graph, after: Graph, exact: bool = True) -> bool:
        """Return whether both sides are equivalent."""

    def enabled(self, name: str) -> bool:
        """Return whether a rewrite is enabled."""

    def disable(self, name: str, reason: str = "") -> None:
        """Disable a rewrite from now on."""

    def near_miss(self, failure: MatchFailure) -> None:
        """Record an attempt that failed."""
