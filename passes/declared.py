"""The pass that applies the declarations of one stage."""

from dataclasses import dataclass, field

from fusec.errors import OptionError, suggestion
from fusec.ir.graph import Graph
from fusec.pipeline import Context
from fusec.rewriting.application import apply_declared
from fusec.rewriting.closest import closest
from fusec.rewriting.fusion import FUSIONS
from fusec.rewriting.match import MatchFailure
from fusec.rewriting.pattern import PatternLibrary
from fusec.rewriting.rule import REWRITES, Declaration

_FIXED = {"option": False}


@dataclass(frozen=True)
class ApplyDeclared:
    """Make one region of the operations that a declaration names together, for the declarations of one stage."""

    name: str = field(metadata=_FIXED)
    declarations: tuple[Declaration, ...] = field(repr=False, metadata=_FIXED)
    library: PatternLibrary = field(repr=False, compare=False, metadata=_FIXED)
    is_last: bool = field(default=False, metadata=_FIXED)
    """True for the last stage, after which near misses are reported."""
    only: str = ""
    """Names of declarations, joined by ``+``; empty means all."""

    def __post_init__(self) -> None:
        known = {*FUSIONS, *REWRITES, *(d.name for d in self.declarations)}  # one list of names may serve all stages
        for name in sorted(set(self._wanted) - known):
            raise OptionError(f"unknown fusion or rewrite {name!r}", fix=suggestion(name, known))

    def apply(self, graph: Graph, context: Context) -> None:
        """Apply the declarations in order; after the last stage, report near misses and broken declarations."""
        chosen = (d for d in self.declarations if d.name in self._wanted and context.enabled(d.name))
        apply_declared(chosen, graph, self.library, context)
        if not self.is_last:
            return
        # As slow as the passes of a small graph, so only for a tool that shows it.
        context.report_near_misses(graph, self._closest(graph, context) if context.config.record else ())
        for (name, spelling), reason in self.library.broken.items():
            message = f"spelling {spelling} of {name} is no pattern"
            context.remarks.add("failure", self.name, message, subject=name, reason=reason)

    def _closest(self, graph: Graph, context: Context) -> list[MatchFailure]:
        """Return patterns aligned with what is left, and edits tried; what is fused does not depend on that."""
        from fusec.verify.edits import tried_edits  # it compares values, for which torch is loaded

        declared = [d for d in self.library.order() if context.enabled(d.name)]
        try:
            return tried_edits(graph, list(closest(graph, declared, self.library)), declared, self.library)
        except Exception as problem:
            if context.config.strict:
                raise
            reason = f"{type(problem).__name__}: {problem}"
            context.remarks.add("failure", self.name, "near misses could not be found", reason=reason)
            return []

    @property
    def _wanted(self) -> list[str]:
        return self.only.split("+") if self.only else [d.name for d in self.declarations]
