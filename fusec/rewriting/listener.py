"""What rewriting tells of its doings, and whom it asks."""

from collections.abc import Iterable
from typing import Protocol

from fusec.ir.graph import Graph, Source
from fusec.rewriting.match import MatchFailure


class RewriteListener(Protocol):
    """Numbers and judges what is applied; the pipeline's context is one."""

    @property
    def verifies(self) -> bool:
        """Whether both sides of every application are to be compared."""

    def application(self, name: str, sources: Iterable[Source] = (), message: str = "") -> bool:
        """Number an application, and say whether it may be made."""

    def agrees(self, name: str, before: Graph, after: Graph, exact: bool = True) -> bool:
        """Whether both sides mean the same."""

    def enabled(self, name: str) -> bool:
        """Whether a rewrite is not left out."""

    def disable(self, name: str, reason: str = "") -> None:
        """Leave a rewrite out from now on."""

    def near_miss(self, failure: MatchFailure) -> None:
        """Take note of an attempt that failed."""
