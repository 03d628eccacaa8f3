"""Raising: what a model spells out in small operations gets its name back."""

import importlib
from dataclasses import dataclass, field
from typing import ClassVar

from fusec.ir.graph import Graph
from fusec.pipeline import Context
from fusec.rewriting.application import apply_declared
from fusec.rewriting.fusion import FUSIONS, Fusion
from fusec.rewriting.pattern import RAISING, PatternLibrary
from fusec.rewriting.rule import REWRITES

FAMILIES = ("activations", "norms", "softmax", "rotary")


def load() -> None:
    """Declare the fusions of this stage."""
    for family in FAMILIES:
        importlib.import_module(f"{RAISING}.{family}")


@dataclass(frozen=True)
class Raise:
    """Recognise norms, activations, softmax and rotary embeddings, whatever their spelling."""

    name: ClassVar[str] = "raise"
    library: PatternLibrary = field(repr=False, compare=False, metadata={"option": False})
    only: str = ""
    """Names of fusions, joined by ``+``; empty means all."""

    def apply(self, graph: Graph, context: Context) -> None:
        """Apply declared rewrites, then every fusion of the stage, in the order of declaration."""
        load()
        chosen: list[Fusion[..., object]] = [f for f in FUSIONS.values() if f.module.startswith(RAISING)]
        wanted = set(self.only.split("+")) if self.only else set()
        for rule in REWRITES.values():
            if not wanted and context.enabled(rule.name):
                apply_declared(rule, graph, self.library, context)
        for declared in chosen:
            if context.enabled(declared.name) and (not wanted or declared.name in wanted):
                apply_declared(declared, graph, self.library, context)
