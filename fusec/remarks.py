"""Remarks: every decision of the compiler as data. The CLI, the page, ``explain`` and the logs are views of them."""

import logging
from dataclasses import dataclass, field
from typing import Any, Literal

logger = logging.getLogger(__name__)

Kind = Literal["passed", "missed", "failure", "analysis"]
LAUNCH = "launch"
"""The pass of remarks on kernels that turn out to be none when they are first launched."""


@dataclass(frozen=True)
class Remark:
    """One decision."""

    kind: Kind
    """``passed``: done; ``missed``: could have been; ``failure``: went wrong, was left out; ``analysis``: a fact."""
    pass_name: str
    message: str
    """The message, in one line."""
    subject: str = ""
    """Name of the fusion, rewrite, kernel or ATen operation it is about."""
    reason: str = ""
    suggestion: str = ""
    sources: tuple[str, ...] = ()
    """Source locations in the model: ``layers.0.mlp, model.py:12``."""
    application: int | None = None
    """Number of the application of a rewrite, by which it can be vetoed."""
    figures: dict[str, float | int | str] = field(default_factory=dict)
    """Bytes, FLOPs, launches."""

    def to_json(self) -> dict[str, Any]:
        """Return the remark as JSON data."""
        return dict(vars(self))

    def __str__(self) -> str:
        number = "" if self.application is None else f"#{self.application} "
        why = f": {self.reason}" if self.reason else ""
        place = f" at {self.sources[0]}" if self.sources else ""
        return f"[{self.kind}] {self.pass_name}: {number}{self.message}{why}{place}"


class Remarks(list[Remark]):
    """The remarks of one compile, in order."""

    def add(self, kind: Kind, pass_name: str, message: str, **fields: Any) -> None:
        """Append one, and log it."""
        remark = Remark(kind, pass_name, message, **fields)
        self.append(remark)
        logger.log(logging.WARNING if kind == "failure" else logging.DEBUG, "%s", remark)

    def of(self, *kinds: Kind) -> list[Remark]:
        """Return the remarks of some kinds."""
        return [r for r in self if r.kind in kinds]
