"""The pipeline, in order."""

if __name__ != "fusec.passes":
    raise ImportError("import fusec.passes; this folder is only its source")

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from fusec.cache import open_cache
from fusec.config import Config
from fusec.errors import OptionError, suggestion
from fusec.passes import fusion, raising
from fusec.passes.canonicalize import RULES, Canonicalize, normalize
from fusec.passes.declared import ApplyDeclared
from fusec.passes.decompose_sdpa import DecomposeSDPA
from fusec.passes.fold_bias import FoldBiasIntoGemm
from fusec.passes.grouping import Group
from fusec.passes.patterns import trace_types
from fusec.passes.traces import Traces
from fusec.pipeline import Pass, Pipeline
from fusec.rewriting.fusion import FUSIONS, declared_in
from fusec.rewriting.pattern import PatternLibrary
from fusec.rewriting.rule import REWRITES

MEANINGS = tuple(f for family in raising.FAMILIES for f in declared_in(family))
"""What `raise` looks for, after rewrites."""
FUSED = tuple(f for family in fusion.FAMILIES for f in declared_in(family))
"""What `fuse` looks for, before the user's own fusions."""
_TRACES = Traces(trace_types)
_LIBRARIES: dict[frozenset[str], PatternLibrary] = {}


def pattern_library(disabled: frozenset[str] = frozenset()) -> PatternLibrary:
    """The patterns of this process; they differ where fusions that others are built on are left out."""
    if disabled not in _LIBRARIES:
        _LIBRARIES[disabled] = PatternLibrary(_TRACES, normalize, disabled, MEANINGS + FUSED)
    return _LIBRARIES[disabled]


def kept_traces(config: Config) -> AbstractContextManager[None]:
    """Within it, patterns are not traced anew where an earlier process that shares the cache has traced them."""
    return _TRACES.kept(open_cache(config))


def known_passes(config: Config | None = None) -> dict[str, Callable[..., Pass]]:
    """What makes each pass from its options, by name.

    Raises:
        OptionError: where ``disable`` names neither a pass nor a fusion or rewrite.
    """
    config = config or Config()
    library = pattern_library(config.disabled)
    order = tuple(library.order())
    first = order.index(FUSED[0])
    made: dict[str, Callable[..., Any]] = {
        "canonicalize": Canonicalize,
        "raise": partial(ApplyDeclared, "raise", raising.__doc__, order[:first], library),
        "fuse": partial(ApplyDeclared, "fuse", fusion.__doc__, order[first:], library, True),
        "attention": DecomposeSDPA,
        "group": Group,
        "bias": FoldBiasIntoGemm,
    }
    names = {*made, *FUSIONS, *REWRITES, *(rule.name for rule in RULES)}
    for unknown in sorted(config.disabled - names):
        why = "no pass, fusion or rewrite is called so"
        raise OptionError(f"option 'disable' names {unknown!r}", why=why, fix=suggestion(unknown, names))
    return made


def vendor_pipeline(config: Config) -> Pipeline:
    """The passes that make a program of a kernel's body with all matmuls as vendor calls."""
    known = known_passes(config)
    return Pipeline((known["group"](), known["bias"]()))


def default_pipeline(config: Config) -> Pipeline:
    """The passes of a compile, one a line with its reason."""
    known = known_passes(config)
    return Pipeline((
        known["canonicalize"](),  # one spelling per meaning, so that one pattern finds it
        known["raise"](),  # norms, softmax, activations and rotary embeddings get their names back
        known["fuse"](),  # regions across them: residual and norm, gates, projections
        known["attention"](),  # calls that a kernel of ours can serve are spelled out
        known["canonicalize"](),  # what became equal or dead by that
        known["group"](),  # kernels: whatever one loop nest serves, by cost
        known["bias"](),  # a product of the vendor takes the bias that a kernel would only add
    ))  # fmt: skip
