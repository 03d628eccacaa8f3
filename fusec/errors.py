"""The errors of fusec: each says what, where, why, and what to do next."""

import difflib
from collections.abc import Iterable

_SHOWN = 20


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for a wrong name: close matches, or else the known names, at most twenty."""
    known = sorted(set(known))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    rest = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"known: {', '.join(known[:_SHOWN])}{rest}"


class FusecError(Exception):
    """Root of every error that fusec raises on purpose."""

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        lines = [what]
        lines += [f"  where: {where}"] if where else []
        lines += [f"  why:   {why}"] if why else []
        lines += [f"  fix:   {fix}"] if fix else []
        super().__init__("\n".join(lines))

    @property
    def reason(self) -> str:
        """The error and its cause in one line, as in a remark."""
        return ": ".join(filter(None, (self.what, self.why)))


class GraphError(FusecError):
    """A graph that breaks an invariant of the IR; raised by the verifier and by the graph's own methods."""


class ParseError(FusecError):
    """Text that is not a graph; names line and column."""


class ImportFailure(FusecError):
    """A model graph that the frontend cannot represent."""


class DeclarationError(FusecError):
    """A fusion or rewrite that is declared wrongly; raised when it is declared or first traced."""


class OptionError(FusecError, ValueError):
    """An unknown option or mode, or a value out of its range."""


class ScheduleError(FusecError):
    """A region that no schedule of the target covers; grouping then does not merge it."""


class BuildError(FusecError):
    """The C++ or Triton compiler is missing or refused a kernel."""


class VerificationError(FusecError):
    """A rewrite whose two sides differ."""
