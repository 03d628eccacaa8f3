"""The passes by name, and the default pipeline."""

if __name__ != "fusec.passes":
    raise ImportError("import fusec.passes; this folder is only its source")

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from fusec.cache import open_cache
from fusec.config import Config
from fusec.errors import OptionError, suggestion
from fusec.pass_list import DEFAULT
from fusec.passes import fusion, raising
from fusec.passes.canonicalize import RULES, Canonicalize, normalize
from fusec.passes.declared import ApplyDeclared
from fusec.passes.decompose_sdpa import DecomposeSDPA
from fusec.passes.fold_bias import FoldBiasIntoGemm
from fusec.passes.grouping import Group
from fusec.passes.patterns import trace_types
from fusec.passes.traces import Traces
from fusec.pipeline import Pass, Pipeline
from fusec.rewriting.fusion import FUSIONS as FUSIONS  # complete once the families are imported
from fusec.rewriting.fusion import declared_in
from fusec.rewriting.pattern import PatternLibrary
from fusec.rewriting.rule import REWRITES

RAISED = tuple(f for family in raising.FAMILIES for f in declared_in(family))
"""Declarations that `raise` matches, after rewrites."""
FUSED = tuple(f for family in fusion.FAMILIES for f in declared_in(family))
"""Declarations that `fuse` matches, before the user's own."""
_TRACES = Traces(trace_types)
_LIBRARIES: dict[frozenset[str], PatternLibrary] = {}


def pattern_library(disabled: frozenset[str] = frozenset()) -> PatternLibrary:
    """Return the patterns of this process, one library for each set of disabled fusions."""
    if disabled not in _LIBRARIES:
        _LIBRARIES[disabled] = PatternLibrary(_TRACES, normalize, disabled, RAISED + FUSED, kinds=_TRACES.kinds)
    return _LIBRARIES[disabled]


def kept_traces(config: Config) -> AbstractContextManager[None]:
    """Return a context in which traces of patterns are read from and stored in the cache."""
    return _TRACES.kept(open_cache(config))


def known_passes(config: Config | None = None) -> dict[str, Callable[..., Pass]]:
    """Return the constructor of each pass by name; it takes the pass's options.

    Raises:
        OptionError: where ``disable`` names neither a pass nor a fusion or rewrite.
    """
    config = config or Config()
    library = pattern_library(config.disabled)
    order = tuple(library.order())
    first = order.index(FUSED[0])
    made: dict[str, Callable[..., Any]] = {
        "canonicalize": Canonicalize,
        "raise": partial(ApplyDeclared, "raise", order[:first], library),
        "fuse": partial(ApplyDeclared, "fuse", order[first:], library, True),
        "attention": DecomposeSDPA,
        "group": Group,
        "bias": FoldBiasIntoGemm,
    }
    names = {*made, *FUSIONS, *REWRITES, *(rule.name for rule in RULES)}
    for unknown in sorted(config.disabled - names):
        why = "no pass, fusion or rewrite has that name"
        raise OptionError(f"option 'disable' names {unknown!r}", why=why, fix=suggestion(unknown, names))
    return made


def vendor_pipeline(config: Config) -> Pipeline:
    """Return the passes for a kernel's body whose matmuls are vendor calls."""
    known = known_passes(config)
    return Pipeline((known["group"](), known["bias"]()))


def default_pipeline(config: Config) -> Pipeline:
    """Return the passes of a compile, in order."""
    known = known_passes(config)
    return Pipeline(tuple(known[name]() for name in DEFAULT))
