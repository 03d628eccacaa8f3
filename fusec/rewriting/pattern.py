"""From a declaration to pattern graphs: traced, canonicalized and rewritten exactly as a model is."""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, TypeAlias

import sympy

from fusec.errors import DeclarationError
from fusec.ir.graph import Graph, Node, Value
from fusec.ir.ops import Trait
from fusec.ir.types import DTYPES, DType
from fusec.rewriting.application import apply_declared
from fusec.rewriting.fusion import FUSIONS, Fusion, Parameter
from fusec.rewriting.index import Index, Kind
from fusec.rewriting.match import Pattern
from fusec.rewriting.rule import REWRITES, Declaration, Rewrite
from fusec.rewriting.sampling import Sizes, sample, symbolize

logger = logging.getLogger(__name__)

Trace: TypeAlias = "Callable[[Callable[..., Any], Sequence[Any]], Graph]"
Normalize: TypeAlias = "Callable[[Graph], None]"

MAX_BATCH = 3
"""Patterns that depend on the number of starred dims are made for 0 to this many."""
_FREE_RANK = 2
"""Number of starred dims in a pattern that fits any number of them."""
_NEVER: tuple[Kind, ...] = (("", None),)
"""The operations of a pattern that does not exist: one that no graph has."""


@dataclass
class PatternLibrary:
    """The patterns of all declarations, made on demand and cached.

    The tracer and the normaliser come from outside, so that nothing here depends on torch or on passes.
    """

    trace: Trace
    normalize: Normalize
    disabled: frozenset[str] = frozenset()
    first: Sequence[Fusion[Any, Any]] = ()
    """The fusions that are looked for before those declared elsewhere."""
    made: dict[tuple[Any, ...], Pattern | None] = field(default_factory=dict)
    kinds: dict[str, tuple[Kind, ...]] = field(default_factory=dict)
    """The operations of fusec's own patterns by title, as far as they have been made."""
    broken: dict[tuple[str, str], str] = field(default_factory=dict)
    """Fusions and spellings that cannot be patterns, and why."""

    def order(self) -> list[Declaration]:
        """Return all declarations in the order in which they are applied."""
        return list(dict.fromkeys((*REWRITES.values(), *self.first, *FUSIONS.values())))

    def before(self, declared: Declaration) -> list[Declaration]:
        """Return what is matched before a declaration, and so found inside it."""
        order = self.order()
        return order[: order.index(declared)] if declared in order else order

    def patterns(self, declared: Declaration, dtype: DType, index: Index | None = None) -> Iterator[Pattern]:
        """Yield a pattern for every spelling and choice of optional operands, richest first, at the usual rank.

        Args:
            declared: the declaration.
            dtype: of its tensors.
            index: of a graph; patterns with an operation that the graph lacks are skipped, and not even made where
                their operations are known.
        """
        seen: list[Any] = []
        for present in choices(declared.parameters):
            for spelling in spellings(declared):
                known = () if index is None else self.known_kinds(declared, spelling, dtype, present)
                if index is not None and known and not index.holds_all(known):
                    continue
                pattern = self.pattern_or_none(declared, spelling, dtype, present)
                if pattern is None or pattern.fingerprint in seen:
                    continue
                if index is None or index.holds_all(pattern.kinds):
                    seen.append(pattern.fingerprint)
                    yield pattern

    def known_kinds(
        self, declared: Declaration, spelling: str, dtype: DType, present: tuple[str, ...]
    ) -> tuple[Kind, ...]:
        """Return the operations of a pattern as far as they are known without tracing it.

        An optional operand only adds operations and a dtype only changes casts, in fusec's own declarations. So the
        pattern that has only what is required is traced first, in one dtype, and bounds the others from below.
        """
        title = self.title(declared, spelling, dtype, present)
        if not title or title in self.kinds:
            return self.kinds.get(title, ())
        *_, least = choices(declared.parameters)
        others = (self.kinds.get(self.title(declared, spelling, d, least), _NEVER) for d in DTYPES.values())
        known = next((kinds for kinds in others if kinds != _NEVER), None)
        if known is None and self.pattern_or_none(declared, spelling, dtype, least):
            known = self.kinds[self.title(declared, spelling, dtype, least)]
        return tuple(kind for kind in known or () if kind[0] != "cast")

    def pattern_or_none(
        self, declared: Declaration, spelling: str, dtype: DType, present: tuple[str, ...]
    ) -> Pattern | None:
        """Return a pattern at the usual rank, and note its operations, or why there is none."""
        try:
            pattern = self.pattern(declared, spelling, dtype, present, _FREE_RANK)
        except DeclarationError as reason:
            self.broken[declared.name, spelling] = str(reason)
            return None
        if title := self.title(declared, spelling, dtype, present):
            self.kinds[title] = pattern.kinds if pattern is not None else _NEVER
        return pattern

    def title(self, declared: Declaration, spelling: str, dtype: DType, present: tuple[str, ...]) -> str:
        """Return the key in ``kinds`` of a pattern that fusec's sources alone determine; empty for any other."""
        if not _is_own(declared) or not all(map(_is_own, REWRITES.values())):
            return ""
        return f"{declared.name} {spelling}({', '.join(present)}) {dtype} without {sorted(self.disabled)}"

    def at_rank(self, pattern: Pattern, declared: Declaration, dtype: DType, rank: int) -> Pattern | None:
        """The pattern with its root at another rank."""
        if pattern.any_rank or rank == len(pattern.root.shape):
            return pattern
        batch = rank - len(pattern.root.shape) + _FREE_RANK
        if not pattern.leading or not 0 <= batch <= MAX_BATCH:
            return None
        present = tuple(dict.fromkeys(pattern.tensors.values()))
        return self.pattern(declared, pattern.spelling, dtype, present, batch)

    def pattern(
        self, declared: Declaration, spelling: str, dtype: DType, present: tuple[str, ...], batch: int
    ) -> Pattern | None:
        """Return one pattern; None where the declaration is meaningless for this dtype or rank.

        Raises:
            DeclarationError: where the declaration cannot be a pattern at all.
        """
        function = spellings(declared)[spelling]
        key = (dtype, present, batch, function, _stated(declared), *map(_stated, _of_users()))
        if key not in self.made:
            graph, samples = self.traced(declared, function, dtype, present, batch)
            self.made[key] = self.specialize(declared, spelling, graph, samples)
        return self.made[key]

    def traced(
        self, declared: Declaration, function: Callable[..., Any], dtype: DType, present: tuple[str, ...], batch: int
    ) -> tuple[Graph, dict[str, Any]]:
        """The plain graph of one side of a declaration, and the samples it was traced with."""
        sizes = Sizes(batch)
        samples = sample(declared.parameters, dtype, present, sizes)
        names = list(inspect.signature(function).parameters)
        try:
            graph = self.trace(function, [samples[name] for name in names])
        except Exception as reason:
            raise DeclarationError(
                f"{declared.name} cannot be traced", where=f"{function.__module__}.{function.__qualname__}",
                why=f"{type(reason).__name__}: {reason}",
            ) from reason  # fmt: skip
        symbolize(graph, sizes)
        tensors = [n for n in names if samples[n] is not None and not isinstance(samples[n], float)]
        for value, name in zip(graph.inputs, tensors, strict=True):
            value.name = name
        return graph, samples

    def specialize(self, declared: Declaration, spelling: str, graph: Graph, samples: dict[str, Any]) -> Pattern | None:
        """Canonicalize a traced graph, apply earlier fusions in it, and make it a pattern."""
        tensors = {v: v.name for v in graph.inputs}
        self.normalize(graph)
        if apply_declared((d for d in self.before(declared) if d.name not in self.disabled), graph, self):
            self.normalize(graph)
        _check_operations(declared, spelling, graph)
        computing = [n for n in graph.nodes if not n.has(Trait.SOURCE)]
        if not computing or any(v.producer is None for v in graph.outputs):
            return None
        if len(computing) == 1 and computing[0].is_op("region"):
            logger.debug("%s, spelling %s, is %s", declared.name, spelling, computing[0].attributes["fusion"])
            return None
        returns = tuple(range(len(graph.outputs)))
        dims = {p.name: p.dims for p in declared.parameters if p.dims is not None}
        batch = {v: dims[n].variadic for v, n in tensors.items()}
        leading = {v: (star, len(v.shape) - len(dims[tensors[v]].fixed)) for v, star in batch.items() if star}
        scalars = {n: name for name, n in samples.items() if isinstance(n, float)}
        _check_scalars(declared, spelling, graph, scalars)
        free = bool(leading) and _is_rank_free(graph, leading)
        return Pattern(
            declared.name, spelling, graph, tensors, leading, scalars, returns, free, tuple(declared.clauses),
            _line_of(spellings(declared)[spelling]),
        )  # fmt: skip


def spellings(declared: Declaration) -> dict[str, Callable[..., Any]]:
    """The functions that write a declaration, by name."""
    if isinstance(declared, Rewrite):
        return {"before": declared.before}
    return declared.spellings


def _line_of(function: Callable[..., Any]) -> str:
    """Return the name of the file and the first line of a function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code else ""


def _of_users() -> list[Declaration]:
    """Return the user's declarations, which may change between two compiles."""
    declared: list[Declaration] = [*REWRITES.values(), *FUSIONS.values()]
    return [d for d in declared if not _is_own(d)]


def _is_own(declared: Declaration) -> bool:
    return declared.module.startswith("fusec.")


def _stated(declared: Declaration) -> tuple[Any, ...]:
    """Return all that a declaration consists of, as a key."""
    sides = (declared.before, declared.after) if isinstance(declared, Rewrite) else declared.spellings.values()
    return (declared.name, *sides, *(clause.predicate for clause in declared.clauses))


def choices(parameters: Sequence[Parameter]) -> Iterator[tuple[str, ...]]:
    """The sets of tensor parameters that may be present, largest first."""
    names = [p.name for p in parameters if p.dims is not None]
    optional = [p.name for p in parameters if p.optional]
    for count in range(len(optional) + 1):
        for absent in combinations(reversed(optional), count):
            yield tuple(n for n in names if n not in absent)


def _check_operations(declared: Declaration, spelling: str, graph: Graph) -> None:
    opaque = next((n for n in graph.nodes if n.has(Trait.OPAQUE)), None)
    if opaque is not None:
        raise DeclarationError(
            f"{declared.name} calls {opaque.attributes['target']}", where=f"spelling {spelling}",
            why="fusec leaves that operation to ATen whole", fix="write it out in simpler operations",
        )  # fmt: skip


def _check_scalars(declared: Declaration, spelling: str, graph: Graph, scalars: dict[float, str]) -> None:
    seen = {abs(n.attributes["value"]) for n in graph.nodes if n.is_op("constant")}
    seen |= {abs(n) for node in graph.nodes for _, n in node.attributes.get("scalars", ()) if isinstance(n, float)}
    for number, name in scalars.items():
        if number not in seen:
            raise DeclarationError(
                f"scalar {name!r} of {declared.name} does not reach its pattern", where=f"spelling {spelling}",
                why="it was computed with, or rounded, before it met a tensor", fix="use it in tensor arithmetic as is",
            )  # fmt: skip


def _is_rank_free(graph: Graph, leading: dict[Value, tuple[str, int]]) -> bool:
    """Return whether nothing in the pattern depends on the number of leading dims."""
    batch_symbols: set[sympy.Symbol] = set()
    for value, (_, count) in leading.items():
        for n in value.shape[:count]:
            batch_symbols |= set() if isinstance(n, int) else n.free_symbols
    fixed = min(len(v.shape) - count for v, (_, count) in leading.items())

    def trailing(node: Node) -> bool:
        if node.has(Trait.POINTWISE | Trait.SOURCE):
            return True
        if node.is_op("slice", "concat"):
            return -node.attributes["dim"] <= fixed
        if node.has(Trait.REDUCTION):
            return all(-d <= fixed for d in node.attributes["dims"])
        return node.is_op("region")

    return all(trailing(n) and not (_symbols(n.attributes) & batch_symbols) for n in graph.nodes)


def _symbols(value: Any) -> set[sympy.Symbol]:
    if isinstance(value, dict):
        return set().union(*map(_symbols, value.values())) if value else set()
    if isinstance(value, tuple):
        return set().union(*map(_symbols, value)) if value else set()
    return set(value.free_symbols) if isinstance(value, sympy.Expr) else set()
