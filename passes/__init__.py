"""The pipeline, in order."""

if __name__ != "fusec.passes":
    raise ImportError("import fusec.passes; this folder is only its source")

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fusec.config import Config
from fusec.passes.attention import SpellAttention
from fusec.passes.canonicalize import Canonicalize, normalize
from fusec.passes.fusion import FuseDeclared
from fusec.passes.fusion import load as load_fusions
from fusec.passes.grouping import Group
from fusec.passes.patterns import trace_types
from fusec.passes.raising import Raise
from fusec.passes.raising import load as load_raising
from fusec.pipeline import Pass, Pipeline
from fusec.rewriting.pattern import PatternLibrary

_LIBRARIES: dict[frozenset[str], PatternLibrary] = {}


def declare_all() -> None:
    """Declare every built-in fusion."""
    load_raising()
    load_fusions()


def pattern_library(disabled: frozenset[str] = frozenset()) -> PatternLibrary:
    """The patterns of this process; they differ where fusions that others are built on are left out."""
    declare_all()
    if disabled not in _LIBRARIES:
        _LIBRARIES[disabled] = PatternLibrary(trace_types, normalize, disabled)
    return _LIBRARIES[disabled]


def known_passes(config: Config | None = None) -> dict[str, Callable[..., Pass]]:
    """What makes each pass from its options, by name."""
    names = (config or Config()).disable.split(",")
    library = pattern_library(frozenset(filter(None, map(str.strip, names))))
    made: dict[str, Callable[..., Any]] = {
        "canonicalize": Canonicalize,
        "raise": partial(Raise, library),
        "fuse": partial(FuseDeclared, library),
        "attention": SpellAttention,
        "group": partial(Group, (config or Config()).small_m),
    }
    return made


def default_pipeline(config: Config, target: str = "cpp") -> Pipeline:
    """The passes of a compile, one a line with its reason."""
    # Triton kernels have no scratch memory for a product's prologue yet: products are the vendor's there.
    known = known_passes(replace(config, small_m=0) if target == "triton" else config)
    return Pipeline((
        known["canonicalize"](),  # one spelling per meaning, so that one pattern finds it
        known["raise"](),  # norms, softmax, activations and rotary embeddings get their names back
        known["fuse"](),  # regions across them: residual and norm, gates, projections
        *((known["attention"](),) if target == "cpp" else ()),  # in kernels of ours where they serve it
        known["canonicalize"](),  # what became equal or dead by that
        known["group"](),  # kernels: whatever one loop nest serves, by cost
    ))  # fmt: skip
