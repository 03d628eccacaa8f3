"""Tests that a declared fusion gets for its declaration alone: of its spellings, its pattern and its kernels.

In a test file: ``test_my_fusions = derived_tests(my_module)``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from types import ModuleType
from typing import Any, TypeAlias

import torch

from fusec import passes
from fusec.compiler import compile_graph
from fusec.config import Config
from fusec.frontend import trace
from fusec.ir.graph import Graph
from fusec.ir.ops import Trait
from fusec.ir.types import BF16, F16, F32, DType
from fusec.pipeline import Context, Pipeline
from fusec.reference.contract import compare_outputs
from fusec.reference.interpreter import evaluate
from fusec.remarks import Remarks
from fusec.rewriting.application import apply_declared, attempts
from fusec.rewriting.fusion import Fusion, declared_in
from fusec.rewriting.match import Match, MatchFailure, Pattern
from fusec.rewriting.matcher import Matcher
from fusec.rewriting.pattern import choices
from fusec.rewriting.sampling import Sizes, symbolize
from fusec.verify import declarations as derived
from fusec.verify.mistakes import mistakes

AnyFusion: TypeAlias = "Fusion[Any, Any]"
Check: TypeAlias = "Callable[[AnyFusion], Iterator[str]]"
"""A check: yields what is wrong with a fusion, as messages."""

_TOLERANCE = {F32: 1e-4, BF16: 5e-2}
_BATCH = (101, 103)
"""Sizes of the starred dims that become symbols: no other size is a multiple of them."""
_SQUARE = 6
"""A dim size that occurs more than once."""
_CLAUSE_TRIALS = 8


def derived_tests(*sources: ModuleType | AnyFusion, checks: Sequence[Check] = ()) -> Callable[..., None]:
    """A test for pytest, parametrized with every fusion and every check.

    Args:
        sources: fusions, and modules whose fusions are all included.
        checks: by default ``CHECKS``.

    Raises:
        ValueError: where there is no fusion among the sources.
    """
    import pytest

    fusions = [f for source in sources for f in fusions_of(source)]
    if not fusions:
        raise ValueError("the sources declare no fusion")

    @pytest.mark.parametrize("check", checks or CHECKS, ids=lambda c: c.__name__)
    @pytest.mark.parametrize("declared", fusions, ids=lambda f: f.name)
    def test(declared: AnyFusion, check: Check) -> None:
        if check is not is_a_pattern and not any(_patterns(declared)):
            pytest.skip("it has no pattern: see is_a_pattern")
        wrong = list(check(declared))
        assert not wrong, "\n".join([f"{declared.name}: {check.__doc__}", *wrong])

    return test


def fusions_of(source: ModuleType | AnyFusion) -> list[AnyFusion]:
    """The fusions that a module declares, or the fusion itself."""
    return [source] if isinstance(source, Fusion) else declared_in(source)


# -- the pattern ------------------------------------------------------------------------------------------------


def is_a_pattern(declared: AnyFusion) -> Iterator[str]:
    """The declaration and every spelling can be traced, for f32 and bf16; some draw satisfies every clause."""
    library = passes.pattern_library()
    for dtype in (F32, BF16):
        found = list(library.patterns(declared, dtype))
        if not found and not any(name == declared.name for name, _ in library.broken):
            yield f"no pattern in {dtype}: it is what an earlier fusion computes, or nothing"
        if derived.accepted(declared, dtype) is None:
            yield f"no arguments that were tried in {dtype} satisfy its clauses"
    yield from (f"{spelling}: {why}" for (name, spelling), why in library.broken.items() if name == declared.name)


def spellings_agree(declared: AnyFusion) -> Iterator[str]:
    """Every spelling computes the same as the declaration."""
    for dtype in (F32, BF16):
        yield from derived.spellings_that_differ(declared, _draw(declared, dtype), _TOLERANCE[dtype])


def every_spelling_is_found(declared: AnyFusion) -> Iterator[str]:
    """Each spelling is found inside a larger graph, with and without its optional operands."""
    for spelling, dtype, absent in product(declared.spellings, (F32, BF16), (False, True)):
        graph = _larger_graph(declared, dtype, spelling, absent)
        yield from _not_found(declared, graph, f"{spelling}, {dtype}{', optional operands absent' * absent}")


def disguises_do_not_hide_it(declared: AnyFusion) -> Iterator[str]:
    """It is found in every type with commuted operands, and where its operands come through views and casts."""
    for dtype, disguise in product((F32, BF16, F16), (derived.commute, derived.wrap_in_views)):
        graph = _larger_graph(declared, dtype)
        disguise(graph)
        yield from _not_found(declared, graph, f"{disguise.__name__}, {dtype}")


def symbolic_sizes_do_not_hide_it(declared: AnyFusion) -> Iterator[str]:
    """It is found where the sizes of the starred dims are symbols, in disguise too."""
    graph = _larger_graph(declared, F32, batch=_BATCH)
    _forget_batch(graph)
    disguised = graph.copy()
    derived.commute(disguised)
    derived.wrap_in_views(disguised)
    if any(p.dims and p.dims.variadic for p in declared.parameters) and not graph.symbols():
        yield "no symbol is in the graph"
    yield from _not_found(declared, graph, "symbolic")
    yield from _not_found(declared, disguised, "symbolic, commuted and in views")


def a_region_keeps_the_results(declared: AnyFusion) -> Iterator[str]:
    """Both sides of the rewrite into a region agree: over a finite field, in float64 and on special values."""
    graph = _larger_graph(declared, F32)
    context = _rewrite(declared, graph, verify=True)
    if not derived.regions_named(graph, declared.name):
        yield "\n".join(_failures(context.remarks)) or "it was not found"


def other_readers_prevent_it(declared: AnyFusion) -> Iterator[str]:
    """It is not found where something else reads an intermediate."""
    for pattern in _patterns(declared):
        if not isinstance(_match(pattern, pattern.graph.copy()), Match):
            yield "the pattern does not match itself"
        for i, value in enumerate(derived.interior_values(pattern.graph)):
            graph = pattern.graph.copy()
            graph.set_outputs([*graph.outputs, derived.interior_values(graph)[i]])
            yield from _found_or_other(_match(pattern, graph), "users", f"another reader of {value.name or i}")


def other_constants_prevent_it(declared: AnyFusion) -> Iterator[str]:
    """It is not found where a constant of it has another value."""
    for pattern in _patterns(declared):
        for i, node in enumerate(pattern.graph.nodes):
            if node.is_op("constant") and abs(node.attributes["value"]) not in pattern.scalars:
                graph = pattern.graph.copy()
                number = node.attributes["value"]
                graph.nodes[i].attributes["value"] = number * 1.5 + 1 if math.isfinite(number) else 1.0
                yield from _found_or_other(_match(pattern, graph), "constant", f"not {number}")


def other_axes_prevent_it(declared: AnyFusion) -> Iterator[str]:
    """It is not found where it reduces along another axis."""
    for pattern in _patterns(declared):
        for i, node in enumerate(pattern.graph.nodes):
            if node.has(Trait.REDUCTION):
                graph = pattern.graph.copy()
                graph.nodes[i].attributes["dims"] = other = (-1,) if node.attributes["dims"] == (-2,) else (-2,)
                if isinstance(_match(pattern, graph), Match):
                    yield f"found with {node.op.name} along {other}"


def what_is_found_is_what_is_declared(declared: AnyFusion) -> Iterator[str]:
    """A graph with a mistake (in a mask, an axis, an operand, a type) holds it only where it means the same."""
    library = passes.pattern_library()
    for case, graph in _mistaken(declared):
        library.normalize(graph)
        for found in attempts(declared, graph, library):
            if isinstance(found, Match):
                why = derived.contradiction(declared, found)
                if why:
                    yield f"found in spite of {case}: {why}\n{graph}"


def every_clause_refuses(declared: AnyFusion) -> Iterator[str]:
    """For every clause there are arguments that it alone refuses, and the attempt to match says so."""
    for clause in declared.clauses:
        for draw in islice(derived.refused(clause, declared, tuple(_TOLERANCE)), _CLAUSE_TRIALS):
            graph = derived.traced(declared.function, _arguments(declared, draw), derived.in_company)
            _rewrite(declared, graph)
            if derived.regions_named(graph, declared.name):
                yield f"{clause.name} refuses {draw}, and yet it is found"
            failed = (a for a in attempts(declared, graph, passes.pattern_library()) if isinstance(a, MatchFailure))
            if any(failure.clause == clause.name for failure in failed):
                break
        else:
            tried = f"its author's {dict(clause.refuses)}" if clause.refuses else "what was tried; give `refuses=`"
            yield f"{clause.name} refused nothing of {tried}"


# -- the kernels ------------------------------------------------------------------------------------------------


def cpp_kernels_are_right(declared: AnyFusion) -> Iterator[str]:
    """Its C++ kernel keeps the numeric rule against the interpreter."""
    for dtype, known in ((F32, "all"), (BF16, "all"), (F32, "named"), (F32, "none")):
        yield from _wrong_kernels(declared, "cpp", dtype, known)


def triton_kernels_are_right(declared: AnyFusion) -> Iterator[str]:
    """Its Triton kernel, run by Triton's interpreter, keeps the numeric rule."""
    for dtype in (F32, BF16):
        yield from _wrong_kernels(declared, "triton", dtype)


PATTERN_CHECKS: tuple[Check, ...] = (
    is_a_pattern, spellings_agree, every_spelling_is_found, disguises_do_not_hide_it, symbolic_sizes_do_not_hide_it,
    a_region_keeps_the_results, other_readers_prevent_it, other_constants_prevent_it, other_axes_prevent_it,
    what_is_found_is_what_is_declared, every_clause_refuses,
)  # fmt: skip
KERNEL_CHECKS: tuple[Check, ...] = (cpp_kernels_are_right, triton_kernels_are_right)
CHECKS = PATTERN_CHECKS + KERNEL_CHECKS


def _wrong_kernels(declared: AnyFusion, target: str, dtype: DType, known: str = "all") -> Iterator[str]:
    """Yield what is wrong with the kernels of a fusion alone; ``known`` says which dims have static sizes."""
    case = f"{target}, {dtype}, {known} sizes known"
    draw = _draw(declared, dtype)
    if known == "named":
        graph = derived.traced(declared.function, _arguments(declared, draw, batch=_BATCH))
        _forget_batch(graph)
    elif known == "none":
        graph = trace(declared.function, _arguments(declared, draw))
    else:
        graph = derived.traced(declared.function, _arguments(declared, draw))
    compiled = compile_graph(graph, Config(target=target))
    yield from (f"{case}: {failure}" for failure in _failures(compiled.remarks))
    kinds = {step.kind for step in compiled.program.steps}
    if known != "none" and "kernel" not in kinds:
        yield f"{case}: no kernel is generated, all runs as {', '.join(sorted(kinds))}"
    tensors = [a for a in _arguments(declared, draw) if isinstance(a, torch.Tensor)]
    reference = evaluate(graph, tensors, dtype=torch.float64)
    comparison = compare_outputs(evaluate(graph, tensors), compiled.program(list(tensors)), reference)
    if not comparison.passed:
        yield f"{case}: {comparison}"


# -- support for the checks --------------------------------------------------------------------------------------


def _draw(declared: AnyFusion, dtype: DType) -> derived.Draw:
    return derived.accepted(declared, dtype) or derived.Draw(dtype)


def _arguments(declared: AnyFusion, draw: derived.Draw, absent: bool = False, **options: Any) -> list[Any]:
    present = list(choices(declared.parameters))[-1 if absent else 0]
    return derived.sample_arguments(declared.parameters, present=present, draw=draw, **options)


def _larger_graph(
    declared: AnyFusion,
    dtype: DType,
    spelling: str = "reference",
    absent: bool = False,
    batch: tuple[int, int] = (2, 3),
) -> Graph:
    arguments = _arguments(declared, _draw(declared, dtype), absent, batch=batch)
    return derived.traced(declared.spellings[spelling], arguments, derived.in_company)


def _forget_batch(graph: Graph) -> None:
    """Make the sizes of the starred dims symbols."""
    sizes = Sizes(len(_BATCH))
    sizes.names = dict(zip(("batch", "length"), _BATCH, strict=True))
    symbolize(graph, sizes)


def _rewrite(declared: AnyFusion, graph: Graph, verify: bool = False) -> Context:
    """Apply everything that precedes a fusion, and the fusion itself."""
    context = Context(Config(verify=verify))
    known = passes.known_passes()
    names = "+".join(d.name for d in (*passes.pattern_library().before(declared), declared))
    Pipeline((known["canonicalize"](), known["raise"](), known["fuse"](only=names))).run(graph, context)
    return context


def _not_found(declared: AnyFusion, graph: Graph, case: str) -> Iterator[str]:
    context = _rewrite(declared, graph)
    yield from (f"{case}: {failure}" for failure in _failures(context.remarks))
    if not derived.regions_named(graph, declared.name):
        yield f"{case}: not found in\n{graph}"


def _failures(remarks: Remarks) -> list[str]:
    """Return the failures; a missing pattern is reported by ``is_a_pattern``."""
    reported = {name for name, _ in passes.pattern_library().broken}
    return [str(r) for r in remarks.of("failure") if r.subject not in reported]


def _patterns(declared: AnyFusion) -> Iterator[Pattern]:
    """Yield its first pattern, if any, without its clauses: sizes and numbers of a pattern are samples."""
    first = next(passes.pattern_library().patterns(declared, F32), None)
    if first is not None:
        yield replace(first, clauses=())


def _mistaken(declared: AnyFusion) -> Iterator[tuple[str, Graph]]:
    """Graphs of the fusion alone with one mistake, where sizes are equal that may be, so that dims can be swapped."""
    library = passes.pattern_library()
    draw = replace(_draw(declared, F32), sizes=(_SQUARE,) * 4)
    arguments = _arguments(declared, draw, batch=(_SQUARE, _SQUARE))
    for spelling, function in declared.spellings.items():
        graph = derived.traced(function, arguments)
        library.normalize(graph)
        apply_declared(library.before(declared), graph, library)
        yield from ((f"{spelling}: {what}", made) for what, made in mistakes(graph))
    for i, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor) and argument.is_floating_point():
            mixed = [*arguments[:i], argument.bfloat16(), *arguments[i + 1 :]]
            with contextlib.suppress(RuntimeError):  # eager refuses it as well
                graph = derived.traced(declared.function, mixed)
                library.normalize(graph)
                apply_declared(library.before(declared), graph, library)
                yield f"a bf16 {declared.parameters[i].name}", graph


def _match(pattern: Pattern, graph: Graph) -> Match | MatchFailure:
    root = graph.outputs[pattern.graph.outputs.index(pattern.root)]
    return Matcher(pattern, graph, set(graph.outputs)).match(root)


def _found_or_other(found: Match | MatchFailure, clause: str, case: str) -> Iterator[str]:
    if isinstance(found, Match):
        yield f"{case}: found"
    elif found.clause != clause:
        yield f"{case}: not found for another reason: {found}"
