"""Declared fusions across operations that have a name: residual and norm, gates, projections with what follows them."""

import importlib
from dataclasses import dataclass, field
from typing import ClassVar

from fusec.ir.graph import Graph
from fusec.pipeline import Context
from fusec.rewriting.application import apply_declared
from fusec.rewriting.fusion import FUSIONS
from fusec.rewriting.pattern import RAISING, PatternLibrary, ordered

FAMILIES = ("norms", "gates", "projections")


def load() -> None:
    """Declare the fusions of this stage."""
    for family in FAMILIES:
        importlib.import_module(f"fusec.passes.fusion.{family}")


@dataclass(frozen=True)
class FuseDeclared:
    """Make one region of operations that a declaration names together; the user's own declarations come last."""

    name: ClassVar[str] = "fuse"
    library: PatternLibrary = field(repr=False, compare=False, metadata={"option": False})
    only: str = ""
    """Names of fusions, joined by ``+``; empty means all."""

    def apply(self, graph: Graph, context: Context) -> None:
        """Apply every fusion of the stage in the order of declaration, then tell what nearly matched."""
        load()
        wanted = set(self.only.split("+")) if self.only else set()
        for declared in ordered(FUSIONS.values()):
            if declared.module.startswith(RAISING) or not context.enabled(declared.name):
                continue
            if not wanted or declared.name in wanted:
                apply_declared(declared, graph, self.library, context)
        context.report_near_misses(graph)
        for (name, spelling), reason in self.library.broken.items():
            message = f"spelling {spelling} of {name} is no pattern"
            context.remarks.add("failure", self.name, message, subject=name, reason=reason)
